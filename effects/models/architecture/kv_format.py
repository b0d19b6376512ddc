"""How the cache stores what layers keep of a token: part of the memory plan and of the
fingerprint, so that caches of other types or layouts never share keys.
"""

from collections.abc import Mapping
from math import prod
from typing import Final, Literal

from attrs import frozen

from minfer.effects.models.dtypes import FP8, INT8, kv_dtype_bytes
from minfer.values.texts import counted

KvLayout = Literal["keys and values", "latents"]
UNSCALED: Final = "none"
PER_HEAD: Final = "token and head"
SCALE_BYTES: Final = 4  # float32
# Values of --kv-cache-dtype, which are vLLM's, and the dtype of the cache's elements;
# auto is the model's.
AUTO: Final = "auto"
KV_CACHE_DTYPES: Final[Mapping[str, str]] = {
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "int8_per_token_head": INT8,
}


@frozen
class KvFormat:
    """The format of one layer group."""

    layers: int  # of the group
    token: tuple[int, ...]  # the shape of what one of them keeps of a token
    dtype: str
    layout: KvLayout
    scales: str = UNSCALED  # what has a scale of its own

    @classmethod
    def of(
        cls, layers: int, token: tuple[int, ...], dtype: str, layout: KvLayout
    ) -> "KvFormat":
        """Returns the format of a cache of this dtype; INT8 has scales."""
        scales = PER_HEAD if dtype == INT8 else UNSCALED
        return cls(layers, token, dtype, layout, scales)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales in one layer."""
        return 0 if self.scales == UNSCALED else prod(self.token[:-1]) * SCALE_BYTES

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token in one layer, scales included."""
        return prod(self.token) * kv_dtype_bytes(self.dtype) + self.scale_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers of the group."""
        return self.layers * self.layer_bytes

    @property
    def text(self) -> str:
        """The format as people read it: "bfloat16 latents (576) in 27 layers"."""
        token = " x ".join(map(str, self.token))
        scales = "" if self.scales == UNSCALED else f", a scale per {self.scales}"
        layers = counted(self.layers, "layer")
        return f"{self.dtype} {self.layout} ({token}) in {layers}{scales}"
