"""The engine's configuration, which does not change while it runs."""

from typing import Final

from attrs import field, frozen

from minfer.records.policy import FirstCome, Policy
from minfer.records.speculation import Speculation
from minfer.values.checks import ConfigError, flag, number

# The fields to compare sizes by: in forks, simulations and headings of pages.
SIZES: Final = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


@frozen(kw_only=True)
class EngineConfig:
    """Sizes and limits. Names are vLLM's where it has one."""

    num_blocks: int = field(validator=number(1))  # KV blocks in the pool
    block_size: int = field(default=64, validator=number(1))  # tokens per block
    max_model_len: int = field(default=2048, validator=number(2))  # prompt plus output
    max_num_seqs: int = field(default=256, validator=number(1))  # device rows
    # a forward's budget
    max_num_batched_tokens: int = field(default=2048, validator=number(1))
    vocab_size: int = field(default=2**31, validator=number(1))
    depth: int = field(default=2, validator=number(1))  # steps in flight
    max_failures: int = field(default=3, validator=number(1))  # of one sequence's steps
    max_waiting: int = field(default=2**20, validator=number(1))  # samples that may wait
    # keys a query reads, itself included
    window: int = field(default=0, validator=number(0))
    # blocks that admission leaves free
    watermark: int = field(default=0, validator=number(0))
    # A row with deferred sampling may be planned one token ahead of its known tokens: its
    # mask is made while the forward runs that it is for.
    late_masks: bool = field(default=False, validator=flag)
    # What a prefill token of a request with `prompt_logprobs` takes of the token budget:
    # its logits are computed too, so that a step of such tokens takes longer.
    scored_cost: int = field(default=1, validator=number(1))
    policy: Policy = FirstCome()
    speculation: Speculation | None = None  # no drafts
    # Freed blocks in `spare`, before they become a run: the order of allocation depends
    # on it.
    freed_run: int = field(default=64, validator=number(1))

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
        if self.window == 1:
            raise ConfigError(
                "window must be 0 (none) or at least 2: a query reads itself"
            )
        if self.watermark >= self.num_blocks:
            what = (
                f"watermark ({self.watermark}) must be below num_blocks "
                f"({self.num_blocks})"
            )
            raise ConfigError(what)
