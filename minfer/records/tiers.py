"""The records of tiers, where KV blocks are besides the device's pool, and of transfers.
`minfer.tiers` has the theory.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Final

from attrs import field, frozen

from minfer.blocks.keys import Key, Keys
from minfer.blocks.ownership import Blocks
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import Pages, PrefixIndex, flattened
from minfer.records.sequence import SampleId
from minfer.values.checks import MAX_INT64, ConfigError, flag, is_number, number
from minfer.values.pmap import Map
from minfer.values.queue import Queue
from minfer.values.record import evolve

BY_COST: Final = "cost"  # load a prefix where that is expected to be faster,
LOAD: Final = "load"  # always,
RECOMPUTE: Final = "recompute"  # or never
CHOICES: Final = (BY_COST, LOAD, RECOMPUTE)


@frozen(kw_only=True)
class Tier:
    """What is common to tiers: when they are loaded from, and what that costs."""

    # Pages that are stored there at once, at most.
    storing: int = field(default=512, validator=number(1))
    choice: str = BY_COST
    # As measured; 0: not known, and a load counts as fast.
    load_seconds: float = 0.0  # of a load of any size
    page_seconds: float = 0.0  # of each of its pages, in addition
    token_seconds: float = 0.0  # to compute the KV of a token instead

    def __attrs_post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ConfigError(
                f"the choice of a tier must be one of {', '.join(CHOICES)}, not "
                f"{self.choice!r:.80}"
            )
        for name in ("load_seconds", "page_seconds", "token_seconds"):
            cost = getattr(self, name)
            if not is_number(cost) or not 0 <= cost <= MAX_INT64:
                raise ConfigError(f"{name} must be 0 or more, not {cost!r:.80}")


@frozen(kw_only=True)
class HostTier(Tier):
    """Host memory."""

    pages: int = field(validator=number(1))  # each as large as one of the device


@frozen(kw_only=True)
class ExternalStore(Tier):
    """Storage outside the engine, which is asked by content key."""

    # Keys that `Tiers.external_keys` has, at most: more than the device has blocks.
    max_known_keys: int = field(validator=number(2))
    # Whether only blocks of requests with `KvTransfer.push_to` are stored: they are for
    # another engine, and cannot be fetched again.
    push_only: bool = field(default=False, validator=flag)


@frozen
class RecentKeys:
    """The keys added last: a set of bounded size, in two generations.

    Once the younger generation has half of the keys that may be remembered, it becomes
    the older one, which is forgotten.
    """

    young: Map[Key, None] = Map()
    old: Map[Key, None] = Map()

    def __contains__(self, key: object) -> bool:
        return key in self.young or key in self.old

    def __bool__(self) -> bool:
        return bool(self.young or self.old)

    def add(self, keys: Iterable[Key], max_keys: int) -> "RecentKeys":
        """These keys and `keys`, of which at most the last `max_keys` are remembered."""
        young, old = self.young.mutate(), self.old
        for key in keys:
            if len(young) >= max_keys // 2:
                young, old = Map[Key, None]().mutate(), young.finish()
            young[key] = None
        return RecentKeys(young.finish(), old)

    def discard(self, keys: Iterable[Key]) -> "RecentKeys":
        """These keys without `keys`."""
        young, old = self.young.mutate(), self.old.mutate()
        for key in keys:
            young.pop(key, None)
            old.pop(key, None)
        return RecentKeys(young.finish(), old.finish())


class TransferKind(StrEnum):
    """What a transfer does with blocks of the device."""

    STORE_TO_HOST = "store to host"
    LOAD_FROM_HOST = "load from host"
    STORE_TO_EXTERNAL = "store to external"
    FETCH_FROM_EXTERNAL = "fetch from external"

    @property
    def to_device(self) -> bool:
        """Whether it writes to pages of the device, and reads from a tier."""
        return self in (self.LOAD_FROM_HOST, self.FETCH_FROM_EXTERNAL)


@frozen
class ChainRun:
    """Consecutive blocks of a chain that a transfer moves; a block of a group with a
    window is a run of its own.
    """

    parent: Key  # the block before them, or ROOT
    keys: Keys
    # That are written, block by block; empty if the external store is written to.
    pages: tuple[Pages, ...]


@frozen(slots=False)
class Transfer:
    """A transfer of blocks between the device and a tier, in flight."""

    number: int
    kind: TransferKind = field(converter=TransferKind)
    paths: tuple[ChainRun, ...]
    # Held until its end: in the index that it reads, the last block of each run; in the
    # index that it writes to, the blocks before the runs, and of a load all others of its
    # hit, the last ones first. The external store has no index.
    held_leaves: Keys
    held_parents: Keys
    sample: SampleId | None = None  # the waiting one that the blocks are for
    # Waiting requests that are passed over until its end: that sample's, and others that
    # want some of the same blocks.
    waiting: frozenset[str] = frozenset()

    @property
    def keys(self) -> Keys:
        """All blocks that it moves."""
        return tuple([key for path in self.paths for key in path.keys])

    @property
    def targets(self) -> Pages:
        """All pages that it writes."""
        return flattened([pages for path in self.paths for pages in path.pages])


@frozen(slots=False)  # changed a few times a turn, as the state is
class Tiers:
    """What is in the tiers, and the transfers in flight."""

    host: Blocks | None = None
    host_queue: Queue[Key] = Queue()  # to be stored in host memory, parents first
    external_keys: RecentKeys = RecentKeys()  # believed to be in the external store
    external_queue: Queue[Key] = Queue()  # to be stored there, parents first
    push_keys: RecentKeys = RecentKeys()  # to be pushed, if it is `push_only`
    transfers: tuple[Transfer, ...] = ()  # in flight, in order of their numbers
    next_number: int = 0

    @classmethod
    def under(cls, tier: HostTier | None) -> "Tiers":
        """No blocks yet, in a tier of this size."""
        if tier is None:
            return cls()
        return cls(Blocks(Pool(tier.pages), PrefixIndex(held=Map())))

    def transfers_of(self, kind: TransferKind) -> list[Transfer]:
        """The transfers of a kind in flight."""
        return [transfer for transfer in self.transfers if transfer.kind is kind]

    @property
    def loading(self) -> frozenset[str]:
        """The requests that wait for transfers in flight."""
        return frozenset().union(*[transfer.waiting for transfer in self.transfers])

    def with_transfer(
        self,
        host: Blocks | None,
        paths: Sequence[ChainRun],
        held_parents: Keys,
        kind: TransferKind,
        sample: SampleId | None = None,
    ) -> "Tiers":
        """These tiers with one more transfer, the last, which takes the next number;
        `host` is host memory with what the transfer holds or has taken there.
        """
        transfer = Transfer(
            number=self.next_number,
            kind=kind,
            paths=tuple(paths),
            held_leaves=tuple([path.keys[-1] for path in paths]),
            held_parents=held_parents,
            sample=sample,
            waiting=frozenset() if sample is None else frozenset((sample[0],)),
        )
        return evolve(
            self,
            host=host,
            transfers=(*self.transfers, transfer),
            next_number=self.next_number + 1,
        )

    def without(self, requests: Collection[str]) -> "Tiers":
        """These tiers, where the requests wait for no transfer any more."""
        if self.loading.isdisjoint(requests):
            return self
        return evolve(
            self,
            transfers=tuple(
                [
                    evolve(
                        transfer,
                        sample=None
                        if transfer.sample and transfer.sample[0] in requests
                        else transfer.sample,
                        waiting=transfer.waiting.difference(requests),
                    )
                    for transfer in self.transfers
                ]
            ),
        )


NO_TIERS: Final = Tiers()
