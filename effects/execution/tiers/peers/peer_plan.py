"""What an engine is to others, as its settings say."""

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from minfer.effects.execution.tiers.peers.addresses import Address

PREFILL: Final = "prefill"  # roles of engines: one computes prompts, and sends their KV;
DECODE: Final = "decode"  # one gets that, and goes on


@frozen(kw_only=True)
class PeerPlan:
    """What an engine is to others."""

    name: str
    role: str  # PREFILL or DECODE
    listens: tuple[Address, ...] = ()  # where it gets blocks
    sends: Mapping[str, Address] = field(factory=dict)  # to these engines, by name
    # Whether it sends to whatever address a request names: only who has proven the
    # secret may have it serve requests.
    dials: bool = False
    nixl: bool = False  # other machines write to this one's memory through NIXL
    secret: bytes = field(default=b"", repr=False)  # of all of them
