"""Which matrices of a model are quantized, and how a checkpoint stores them.

A value in the `ModelSpec`, so that the memory plan, the loader and the fingerprint agree.
Only matrices of layers are quantized: embeddings, the output head, norms and routers
never are, nor MLA's expansion of latents and the matrices of AltUp and LAuReL, which are
dequantized as they are loaded.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from minfer.effects.models.architecture.quantization_files import described_in
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats import WeightFormat, format_of
from minfer.effects.models.formats.on_load import OnLoad
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT4_GROUPS,
    INT8,
    MXFP4,
    NVFP4,
    PLAIN,
    Scheme,
    int4,
)
from minfer.values.checks import ConfigError

_log = logging.getLogger("minfer.model")
# What --quantization makes of an unquantized checkpoint as it is loaded.
LEVELS: Final[Mapping[str, Scheme]] = {
    "fp8": FP8,
    "fp8_per_block": FP8_BLOCKS,
    "int8": INT8,
    "int4": int4(128),
    **{f"int4-g{group}": int4(group) for group in INT4_GROUPS},
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


@frozen
class Quantization:
    """How the matrices of a model's layers are stored."""

    format: WeightFormat  # of the checkpoint
    # Those that are not quantized, by their names in a checkpoint, without ".weight".
    plain: frozenset[str] = field(factory=frozenset)
    file: str = ""  # beside config.json, that says so; empty: config.json does

    def scheme_of(self, matrix: str) -> Scheme:
        """Returns the scheme of a matrix of a checkpoint."""
        return PLAIN if matrix in self.plain else self.format.scheme

    @property
    def at_load(self) -> bool:
        """Whether the checkpoint is not quantized."""
        return isinstance(self.format, OnLoad)

    @property
    def text(self) -> str:
        """What `minfer plan` prints."""
        exceptions = f"; {len(self.plain)} matrices are not" if self.plain else ""
        if len(self.plain) == 1:
            exceptions = "; one matrix is not"
        return f"{self.format.scheme.name}, {self.format.text}{exceptions}"


@frozen
class CheckpointForm:
    """How the files of a checkpoint store matrices."""

    format: WeightFormat | None = None  # of quantized ones
    # Whether the matrices of all experts of a layer are one tensor; None: as the family
    # is published.
    stacked: bool | None = None
    transposed: bool = False  # which is [experts, in, out], if the family has both forms

    def format_of(self, matrix: str) -> WeightFormat:
        """Returns the format of a quantized matrix. Raises ValueError if there is
        none.
        """
        if self.format is None:
            raise ValueError(f"how {matrix} is quantized is not known")
        return self.format


PLAIN_FORM: Final = CheckpointForm()


def requested(level: str | None, stored: Quantization | None) -> Quantization | None:
    """Returns how matrices are stored by the setting `quantization` and a checkpoint's
    config. Raises ConfigError where they differ.
    """
    if level is None or (stored is not None and level == stored.format.method):
        return stored
    if stored is not None:
        raise ConfigError(
            f"quantization {level!r}: the checkpoint is quantized already "
            f"({stored.format.text}); leave the setting out, or use an unquantized "
            f"checkpoint"
        )
    if level not in LEVELS:
        raise ConfigError(
            f"quantization {level!r}: the checkpoint is not quantized, and as it is "
            f"loaded it can be to {', '.join(LEVELS)}"
        )
    return Quantization(OnLoad(LEVELS[level]))


def warn_of_cache_scheme(config: Mapping[str, Any], source: str, dtype: str) -> None:
    """Warn if a config says how a KV cache is quantized, which is not read: `dtype` is
    the cache's.
    """
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        fault = "quantization_config: kv_cache_scheme is not used"
        file = described_in(config, source)
        _log.warning("%s: %s; the KV cache is in %s", file, fault, dtype)


def read_quantization(reader: ConfigReader) -> Quantization | None:
    """Returns how a checkpoint is quantized, from its config or the file beside it; None:
    it is not. Raises `UnsupportedModelError`, `ModelConfigError`.
    """
    file = described_in(reader.config, reader.source)
    weight_format = format_of(ConfigReader(reader.config, file))
    if weight_format is None:
        return None
    return Quantization(
        weight_format, file="" if file == reader.source else Path(file).name
    )
