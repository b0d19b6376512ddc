"""How the cache stores what layers keep of a token: part of the memory plan and of the
fingerprint, so that caches of other types or layouts never share keys.
"""

from math import prod
from typing import Final, Literal

from attrs import frozen

from minfer.effects.models.dtypes import dtype_bytes

KvLayout = Literal["keys and values", "latents"]
UNSCALED: Final = "none"


@frozen
class KvFormat:
    """The format of one layer group."""

    layers: int  # of the group
    token: tuple[int, ...]  # the shape of what one of them keeps of a token
    dtype: str
    layout: KvLayout
    scales: str = UNSCALED  # what a scale belongs to

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers of the group."""
        return self.layers * prod(self.token) * dtype_bytes(self.dtype)

    @property
    def text(self) -> str:
        """The format as people read it: "bfloat16 latents (576) in 27 layers"."""
        token = " x ".join(map(str, self.token))
        scales = "" if self.scales == UNSCALED else f", scaled by {self.scales}"
        return f"{self.dtype} {self.layout} ({token}) in {self.layers} layers{scales}"
