"""The engine's configuration, which does not change while it runs."""

from typing import Final

from attrs import field, frozen

from minfer.records.adapters import MAX_ADAPTER_SLOTS
from minfer.records.policy import FirstCome, Policy
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state_keeping import StateKeeping
from minfer.records.tiers import ExternalStore, HostTier
from minfer.values.checks import ConfigError, flag, number

MOST_GROUPS: Final = 16
MAX_NUM_SEQS: Final = 1 << 20  # a state has a number for each of its device rows

# The fields to compare sizes by: in forks, simulations and headings of pages.
SIZES: Final = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


@frozen
class CacheGroup:
    """Layers that read the same keys: a sequence has a block table for each group.

    The pool has pages of equal size. A block of a group is a bundle of `pages` pages,
    which are taken, published, fenced and evicted together.

    The recurrent layers, if there are any, are one group, the *state group*. They keep no
    keys of each position but one state per sequence: a bundle has the state of all of
    them at one position.
    """

    window: int = field(default=0, validator=number(0))  # keys a query reads, with its
    # own; 0: all (full attention)
    pages: int = field(default=1, validator=number(1))  # of a block
    # Tokens at the beginning of a sequence that every query reads beside its window
    # (StreamingLLM, Xiao et al. 2023).
    sink_tokens: int = field(default=0, validator=number(0))
    state: bool = field(default=False, validator=flag)  # whether it is the state group

    def __attrs_post_init__(self) -> None:
        if self.window == 1:
            raise ConfigError(
                "window must be 0 (none) or at least 2: a query reads itself"
            )
        if self.sink_tokens > self.window:
            raise ConfigError(
                f"sink_tokens ({self.sink_tokens}) must be at most window ({self.window})"
            )
        if self.state and self.window:
            raise ConfigError(f"window must be 0 in a state group, not {self.window}")

    def sink_blocks(self, block_size: int) -> int:
        """The blocks at the beginning of a sequence that have sink tokens: they are never
        given back behind the window.
        """
        return -(-self.sink_tokens // block_size)

    def most_blocks(self, blocks: int, block_size: int) -> int:
        """The most of its first `blocks` blocks that a sequence must hold at once: with a
        window those that a query reads, with its own, and those of sink tokens.
        """
        if not self.window:
            return blocks
        span = -(-(self.window - 1) // block_size) + 1
        return min(blocks, span + self.sink_blocks(block_size))


@frozen(kw_only=True)
class EngineConfig:
    """Sizes and limits. Names are vLLM's where it has one."""

    num_blocks: int = field(validator=number(1))  # pages of KV in the pool
    block_size: int = field(default=64, validator=number(1))  # tokens per block
    max_model_len: int = field(default=2048, validator=number(2))  # prompt plus output
    # device rows
    max_num_seqs: int = field(default=256, validator=number(1, MAX_NUM_SEQS))
    # a forward's budget
    max_num_batched_tokens: int = field(default=2048, validator=number(1))
    vocab_size: int = field(default=2**31, validator=number(1))
    depth: int = field(default=2, validator=number(1))  # steps in flight
    max_failures: int = field(default=3, validator=number(1))  # of one sequence's steps
    max_waiting: int = field(default=2**20, validator=number(1))  # samples that may wait
    # Of layers; the state group is the last, behind at least one other.
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    # pages that admission leaves free
    watermark: int = field(default=0, validator=number(0))
    # A row with deferred sampling may be planned one token ahead of its known tokens: its
    # mask is made while the forward runs that it is for.
    late_masks: bool = field(default=False, validator=flag)
    # What a prefill token of a request with `prompt_logprobs` takes of the token budget:
    # its logits are computed too, so that a step of such tokens takes longer.
    scored_cost: int = field(default=1, validator=number(1))
    policy: Policy = FirstCome()
    speculation: Speculation | None = None  # no drafts
    # Tiers for KV blocks under the device's pool (`minfer.tiers`).
    host: HostTier | None = None
    external_store: ExternalStore | None = None
    states: StateKeeping = StateKeeping()  # which are kept, if there is a state group
    # Freed blocks in `spare`, before they become a run: the order of allocation depends
    # on it.
    freed_run: int = field(default=64, validator=number(1))
    # How many adapters are on the device at once; 0: requests with one are rejected.
    adapter_slots: int = field(default=0, validator=number(0, MAX_ADAPTER_SLOTS))
    # Target for the time between tokens (inter-token latency), in seconds: the duration
    # of a step that has decode rows and prefill. 0: depends on the load; None: no target
    # (`prefill_budget.py`). However long that takes, such a step has room for
    # `min_prefill_tokens`.
    itl_target: float | None = field(default=None, validator=number(0))
    min_prefill_tokens: int = field(default=64, validator=number(1))
    # whether blocks of a window are taken chunk by chunk: computed once, on creation
    by_chunk: bool = field(init=False, eq=False, repr=False)
    # Computed, too: the index of the state group, and the pages of a state; None and 0
    # without such a group.
    state_group: int | None = field(init=False, eq=False, repr=False)
    state_pages: int = field(init=False, eq=False, repr=False)
    # Computed, too: the other groups, and the pages of one block of each of them.
    block_groups: tuple[CacheGroup, ...] = field(init=False, eq=False, repr=False)
    block_pages: int = field(init=False, eq=False, repr=False)
    full_group: int | None = field(init=False, eq=False, repr=False)  # without a window

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.speculation, Speculation | None):
            raise ConfigError(
                f"speculation must be Speculation or none, not {self.speculation!r:.80}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at "
                f"least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence gets a "
                f"token a step"
            )
        self._check_groups()
        self._check_state_group()
        self._check_tiers()
        if self.watermark >= self.num_blocks:
            message = (
                f"watermark ({self.watermark}) must be below num_blocks "
                f"({self.num_blocks})"
            )
            raise ConfigError(message)

    def most_pages(self, blocks: int) -> int:
        """The most pages that a sequence of `blocks` blocks must hold at once, with its
        working state.
        """
        if not self.by_chunk:
            return blocks * self.block_pages + self.state_pages
        size = self.block_size
        bundles = (
            (group.most_blocks(blocks, size), group.pages) for group in self.block_groups
        )
        pages = sum(max_blocks * pages for max_blocks, pages in bundles)
        return pages + self.state_pages

    @property
    def has_tiers(self) -> bool:
        """Whether KV blocks are kept elsewhere than on the device, too."""
        return self.host is not None or self.external_store is not None

    def _check_tiers(self) -> None:
        """Check that the host tier holds a block at least."""
        store = self.external_store
        if not isinstance(store, ExternalStore | None):
            raise ConfigError(
                f"external_store must be ExternalStore or none, not {store!r:.80}"
            )
        if store is not None and store.max_known_keys < 2 * self.num_blocks:
            raise ConfigError(
                f"external_store: max_known_keys ({store.max_known_keys}) must be at "
                f"least twice num_blocks ({self.num_blocks}), or blocks would be stored "
                f"again and again"
            )
        host = self.host
        if not isinstance(host, HostTier | None):
            raise ConfigError(f"host must be HostTier or none, not {host!r:.80}")
        block = max(group.pages for group in self.groups)
        if host is not None and host.pages < block:
            raise ConfigError(
                f"host has {host.pages} pages, and a block has {block}: none would fit"
            )
        for name, tier in (("host", host), ("external_store", store)):
            if tier is not None and tier.storing < self.state_pages:
                raise ConfigError(
                    f"{name}: storing ({tier.storing}) must be at least the "
                    f"{self.state_pages} pages of a state of recurrent layers"
                )

    def _check_groups(self) -> None:
        """Check the groups, and note what they come to."""
        groups = self.groups
        if type(groups) is not tuple or set(map(type, groups)) != {CacheGroup}:
            raise ConfigError("groups must be a tuple of at least one CacheGroup")
        if len(groups) > MOST_GROUPS:
            raise ConfigError(f"groups must be at most {MOST_GROUPS}, not {len(groups)}")
        kinds = [group.state for group in groups]
        if any(kinds[:-1]) or kinds == [True]:
            raise ConfigError(
                "groups must have at most one state group: the last, behind at least one "
                "other"
            )
        block_groups = groups[:-1] if kinds[-1] else groups
        windows = [group.window for group in block_groups]
        if len({(g.window, g.sink_tokens) for g in block_groups}) < len(windows):
            raise ConfigError(
                f"groups must have different windows, not {windows}: layers of equal "
                f"windows are one group"
            )
        several = len(windows) > 1
        spec_config = self.speculation
        if several and spec_config is not None and spec_config.drafter == DEVICE:
            raise ConfigError(
                "speculation: a draft model or head cannot draft for a model whose "
                "layers are of several cache groups; use lookups or none"
            )
        object.__setattr__(self, "by_chunk", any(windows))
        object.__setattr__(self, "block_groups", block_groups)
        pages = sum(group.pages for group in block_groups)
        object.__setattr__(self, "block_pages", pages)
        full_group = windows.index(0) if 0 in windows else None
        object.__setattr__(self, "full_group", full_group)
        object.__setattr__(self, "state_group", len(windows) if kinds[-1] else None)
        object.__setattr__(self, "state_pages", groups[-1].pages if kinds[-1] else 0)

    def _check_state_group(self) -> None:
        """Check that the pool has room for the working state of a row, and a block."""
        if not isinstance(self.states, StateKeeping):
            raise ConfigError(f"states must be StateKeeping, not {self.states!r:.80}")
        needed = self.most_pages(1)
        if self.state_group is not None and self.num_blocks < needed:
            raise ConfigError(
                f"num_blocks ({self.num_blocks}) must be at least {needed}: the "
                f"recurrent layers' state of a sequence takes {self.state_pages} pages, "
                f"and a block of the other layers {needed - self.state_pages}; give the "
                f"cache more memory (--kv-cache-memory-bytes)"
            )
