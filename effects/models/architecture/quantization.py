"""Which matrices of a model are quantized, and how a checkpoint stores them.

A value in the `ModelSpec`, so that the memory plan, the loader and the fingerprint agree.
Only matrices of layers are quantized: embeddings, the output head, norms and routers
never are, nor MLA's expansion of latents, which is dequantized as it is loaded.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from minfer.effects.models.architecture.quantization_files import described_in
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats import Format, format_of
from minfer.effects.models.formats.on_load import OnLoad
from minfer.kernels.leaves import (
    FP8,
    FP8_BLOCKS,
    INT4_GROUPS,
    INT8,
    MXFP4,
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
}


@frozen
class Quantization:
    """How the matrices of a model's layers are stored."""

    format: Format  # of the checkpoint
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
        kept = f"; {len(self.plain)} matrices are not" if self.plain else ""
        return f"{self.format.scheme.name}, {self.format.text}{kept}"


@frozen
class Files:
    """How the files of a checkpoint store matrices."""

    format: Format | None = None  # of quantized ones
    stacked: bool = False  # the matrices of all experts of a layer are one tensor

    def format_of(self, matrix: str) -> Format:
        """Returns the format of a quantized matrix. Raises ValueError if there is
        none.
        """
        if self.format is None:
            raise ValueError(f"how {matrix} is quantized is not known")
        return self.format


PLAIN_FILES: Final = Files()


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


def warn_of_cache_scheme(config: Mapping[str, Any], where: str, dtype: str) -> None:
    """Warn if a config says how a KV cache is quantized, which is not read: `dtype` is
    the cache's.
    """
    how = config.get("quantization_config")
    if isinstance(how, dict) and how.get("kv_cache_scheme"):
        what = "quantization_config: kv_cache_scheme is not used"
        file = described_in(config, where)
        _log.warning("%s: %s; the KV cache is in %s", file, what, dtype)


def read_quantization(read: ConfigReader) -> Quantization | None:
    """Returns how a checkpoint is quantized, from its config or the file beside it; None:
    it is not. Raises `UnsupportedModelError`, `ModelConfigError`.
    """
    file = described_in(read.config, read.where)
    found = format_of(ConfigReader(read.config, file))
    if found is None:
        return None
    return Quantization(found, file="" if file == read.where else Path(file).name)
