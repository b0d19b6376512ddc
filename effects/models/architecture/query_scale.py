"""Factors of queries that grow with their positions.

Theory. A softmax over more keys is flatter, so scores of a long context should be larger
(temperature tuning, Llama 4; Nakanishi 2025). The factor is 1 up to `length` tokens, and
then grows by the logarithm of the number of such lengths before a token.
"""

from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.architecture.rope_scaling import SCALING_BETA, rope_object
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.families.family import Family

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class QueryScale:
    """The factor 1 + strength * log(1 + (position + offset) // length)."""

    strength: float
    length: int
    offset: int = 0

    def table(self, positions: int) -> "Tensor":
        """Returns the factors of the first `positions` positions, in float32."""
        import torch

        lengths = torch.arange(positions) + self.offset
        passed = (lengths // self.length).float()
        return 1 + self.strength * torch.log1p(passed)


def read_query_scale(
    reader: ConfigReader, family: Family, *, rotated: bool = True
) -> QueryScale | None:
    """Returns the factors of queries of layers that are rotated, or are not. Raises
    `ModelConfigError`.
    """
    if family.positions.query_scale == "none":
        return None
    if family.positions.query_scale == "unrotated":
        return None if rotated else _read_temperature(reader)
    rope = rope_object(reader)
    strength = _strength(rope, SCALING_BETA)
    if not strength:
        return None
    key = "original_max_position_embeddings"
    kind = rope.config.get("rope_type", rope.config.get("type"))
    if kind not in ("llama3", "yarn"):
        return QueryScale(strength, rope.size(key))
    # As in transformers: the outer one has priority, for these types alone.
    lengths = rope if reader.is_absent(key) else reader
    return QueryScale(strength, lengths.size(key, reader.size("max_position_embeddings")))


def _read_temperature(reader: ConfigReader) -> QueryScale | None:
    """Returns the factors of Llama 4, whose flag is a number in published configs."""
    key = "attn_temperature_tuning"
    if not isinstance(reader.config.get(key), int | None):
        raise reader.error(key, "true or false")
    strength = _strength(reader, "attn_scale")
    length = reader.size("floor_scale")
    if not reader.config.get(key) or not strength:
        return None
    return QueryScale(strength, length, offset=1)


def _strength(reader: ConfigReader, key: str) -> float:
    """Returns a number of at least 0; 0 when absent."""
    return 0.0 if reader.config.get(key) in (None, 0) else reader.positive(key)
