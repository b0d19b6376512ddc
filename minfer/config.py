"""The engine's configuration: what does not change while it runs."""

from typing import Any

from attrs import Attribute, field, frozen

from minfer.policy import FirstCome, Policy


class ConfigError(ValueError):
    """A setting is out of range or contradicts another one."""


def _at_least(low: int) -> Any:
    def check(_: object, attribute: "Attribute[int]", value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{attribute.name} must be a whole number >= {low}, not {value!r}")

    return check


@frozen(kw_only=True)
class EngineConfig:
    """Sizes and limits. Names are vLLM's where it has one."""

    num_blocks: int = field(validator=_at_least(1))  # KV blocks in the pool
    block_size: int = field(default=64, validator=_at_least(1))  # tokens per block
    max_model_len: int = field(default=2048, validator=_at_least(2))  # prompt plus output
    max_num_seqs: int = field(default=256, validator=_at_least(1))  # device rows
    max_num_batched_tokens: int = field(default=2048, validator=_at_least(1))  # a forward's budget
    vocab_size: int = field(default=2**31, validator=_at_least(1))
    depth: int = field(default=2, validator=_at_least(1))  # steps in flight
    max_repeat: int = field(default=1, validator=_at_least(1))  # decode steps in one plan, at most
    max_failures: int = field(default=3, validator=_at_least(1))  # of one sequence's steps
    max_waiting: int = field(default=2**20, validator=_at_least(1))  # samples that may wait
    window: int = field(default=0, validator=_at_least(0))  # keys a query reads, itself included
    watermark: int = field(default=0, validator=_at_least(0))  # blocks that admission leaves free
    policy: Policy = FirstCome()

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence gets a token a step"
            )
        if self.window == 1:
            raise ConfigError("window must be 0 (none) or at least 2: a query reads itself")
        if self.watermark >= self.num_blocks:
            raise ConfigError(
                f"watermark ({self.watermark}) must be below num_blocks ({self.num_blocks})"
            )
