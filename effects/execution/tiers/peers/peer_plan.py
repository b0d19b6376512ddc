"""Which other engines an engine sends KV blocks to, and where it receives them."""

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from minfer.effects.execution.tiers.peers.addresses import Address

# Roles of engines.
PREFILL: Final = "prefill"  # computes prompts, and sends their KV
DECODE: Final = "decode"  # receives that KV, and decodes


@frozen(kw_only=True)
class PeerPlan:
    """An engine's part in a deployment where prefill and decode are apart."""

    name: str  # of this engine
    role: str  # PREFILL or DECODE
    listens: tuple[Address, ...] = ()  # where it receives blocks
    sends: Mapping[str, Address] = field(factory=dict)  # to these engines, by name
    # Whether it also sends to addresses that requests name: only where all requests come
    # from fronts that have proven that they know the secret.
    dials: bool = False
    nixl: bool = False  # other machines write to this one's memory through NIXL
    secret: bytes = field(default=b"", repr=False)  # of the deployment
