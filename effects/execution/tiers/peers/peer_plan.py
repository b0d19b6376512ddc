"""Which other engines an engine sends KV blocks to, and where it receives them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, field, frozen

from minfer.effects.net.addresses import Address
from minfer.effects.net.framing import Socket

# Roles of engines.
PREFILL: Final = "prefill"  # computes prompts, and sends their KV
DECODE: Final = "decode"  # receives that KV, and decodes


@frozen(kw_only=True)
class PeerPlan:
    """An engine's part in a deployment where prefill and decode are apart."""

    name: str  # of this engine
    role: str  # PREFILL or DECODE
    listens: tuple[Address, ...] = ()  # where its rank 0 receives blocks
    # A TCP socket where it receives blocks, too, and which listens already.
    sock: Socket | None = field(default=None, repr=False)
    # To these engines, by name: where their rank 0 receives.
    sends: Mapping[str, Address] = field(factory=dict)
    prefill_ranks: int = 1  # tensor parallel size of engines that compute prompts
    decode_ranks: int = 1  # and of those that decode
    # Whether it also sends to addresses that requests name: only where all requests come
    # from API servers that have proven that they know the secret.
    dials: bool = False
    nixl: bool = False  # other machines write to this one's memory through NIXL
    secret: bytes = field(default=b"", repr=False)  # of the deployment

    @property
    def is_local(self) -> bool:
        """Whether all engines that exchange blocks are on this machine."""
        addresses = (*self.listens, *self.sends.values())
        outside = self.dials or self.sock is not None
        return not outside and all(isinstance(address, Path) for address in addresses)


def of_rank(address: Address, rank: int) -> Address:
    """Returns where a rank of an engine receives, whose rank 0 does at `address`, a local
    socket if there are several.
    """
    if rank == 0 or not isinstance(address, Path):
        return address
    return address.with_name(f"{address.name}{rank}")


def plan_to(plan: PeerPlan) -> dict[str, Any]:
    """Returns a plan, whose addresses are local sockets, as JSON has it."""
    sends = {name: str(address) for name, address in plan.sends.items()}
    listens = [str(address) for address in plan.listens]
    return asdict(plan) | {
        "secret": plan.secret.hex(),
        "sends": sends,
        "listens": listens,
    }


def plan_from(data: Mapping[str, Any]) -> PeerPlan:
    """Returns the plan that `plan_to` wrote."""
    read = {
        "secret": bytes.fromhex(data["secret"]),
        "sends": {name: Path(path) for name, path in data["sends"].items()},
        "listens": tuple(map(Path, data["listens"])),
    }
    return PeerPlan(**{**data, **read})
