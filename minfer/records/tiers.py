"""Tiers: where KV blocks are besides the device's pool, and what is on its way.

Theory. A published block is a value with a content key, so a tier is an index of keys
over pages of its own: `Blocks`, as of the device. Blocks move between the device and a
tier by *transfers*, beside the steps: a transfer reads pages whose content is committed,
and writes pages that nobody reads, so it needs no order among the plans, and no step
waits for it. Until the executor reports its end (`Moved`, or `Lost`), what it reads is
held, and what it writes belongs to it alone.

    store   a block of the device is copied to a page of the tier: once it is published,
            so that its eviction from the device costs nothing
    load    a block of the tier is copied to a page of the device, for a waiting sequence:
            the tier has the next blocks of its prefix. It is passed over until the end
            of the transfer; then it is admitted with a hit
"""

from collections.abc import Collection, Sequence
from typing import Final

from attrs import field, frozen

from minfer.blocks.keys import Key, Keys
from minfer.blocks.ownership import Blocks
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import Pages, PrefixIndex, flattened
from minfer.records.sequence import SampleId
from minfer.values.checks import MOST, ConfigError, is_number, number
from minfer.values.record import evolve

BY_COST: Final = "cost"  # load a prefix where that is expected to be faster,
LOAD: Final = "load"  # always,
RECOMPUTE: Final = "recompute"  # or never
CHOICES: Final = (BY_COST, LOAD, RECOMPUTE)


@frozen(kw_only=True)
class HostTier:
    """Host memory as a tier, and what its use costs, as measured."""

    pages: int = field(validator=number(1))  # each as large as one of the device
    # Pages that are on their way to it at once, at most.
    storing: int = field(default=512, validator=number(1))
    choice: str = BY_COST
    load_seconds: float = 0.0  # of a load of any size
    page_seconds: float = 0.0  # of each of its pages
    token_seconds: float = 0.0  # to compute the KV of a token instead

    def __attrs_post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ConfigError(
                f"the choice of a tier must be one of {', '.join(CHOICES)}, not "
                f"{self.choice!r:.80}"
            )
        for name in ("load_seconds", "page_seconds", "token_seconds"):
            cost = getattr(self, name)
            if not is_number(cost) or not 0 <= cost <= MOST:
                raise ConfigError(f"{name} must be 0 or more, not {cost!r:.80}")


@frozen
class ChainRun:
    """Consecutive blocks of a chain that a transfer writes; a block of a group with a
    window is a run of its own.
    """

    parent: Key  # the block before them, or ROOT
    keys: Keys
    pages: tuple[Pages, ...]  # that are written, block by block


@frozen
class Transfer:
    """Blocks on their way between the device and the host tier."""

    number: int
    loads: bool  # to the device; else to the host tier
    paths: tuple[ChainRun, ...]
    held_leaves: Keys  # in the index that it reads, the last of each run: likewise
    held_parents: Keys  # in the index that it writes to: held until its end
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


@frozen
class Tiers:
    """What is in the host tier, and what is on its way."""

    host: Blocks | None = None
    transfers: tuple[Transfer, ...] = ()  # in flight, in order of their numbers
    next_number: int = 0
    # Published blocks that are to be stored, in order: parents before their children.
    unstored: Keys = ()

    @classmethod
    def under(cls, tier: HostTier | None) -> "Tiers":
        """No blocks yet, in a tier of this size."""
        return cls() if tier is None else cls(Blocks(Pool(tier.pages), PrefixIndex()))

    @property
    def loading(self) -> frozenset[str]:
        """The requests whose blocks are on their way."""
        return frozenset().union(*[one.waiting for one in self.transfers])

    def with_transfer(
        self,
        host: Blocks,
        paths: Sequence[ChainRun],
        held_parents: Keys,
        *,
        loads: bool,
        sample: SampleId | None = None,
    ) -> "Tiers":
        """These tiers with one more transfer, the last, which takes the next number;
        `host` is the tier with what the transfer holds or has taken there.
        """
        transfer = Transfer(
            number=self.next_number,
            loads=loads,
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
        """These tiers, without the requests among those that wait."""
        if self.loading.isdisjoint(requests):
            return self
        return evolve(
            self,
            transfers=tuple(
                [
                    evolve(
                        one,
                        sample=None
                        if one.sample and one.sample[0] in requests
                        else one.sample,
                        waiting=one.waiting.difference(requests),
                    )
                    for one in self.transfers
                ]
            ),
        )


NO_TIERS: Final = Tiers()
