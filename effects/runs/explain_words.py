"""Causes of waits in words, each with its remedy: what `minfer explain` says of them.

The causes are those of `QueueBlocked` and of `queue_blocked_by`, and four more: others
went first (`ORDER`), what these made it compute again (`RECOMPUTED`), another preemption
(`PREEMPTED`), and a prefix that missed (`PREFIX`).
"""

from typing import Final

from attrs import frozen

from minfer.policies.builtin import POLICIES, Ageing, Priority
from minfer.records.config import EngineConfig
from minfer.records.policy import Policy

ORDER: Final = "order"
PREEMPTED: Final = "preempted"
RECOMPUTED: Final = "recomputed"
PREFIX: Final = "prefix"


@frozen
class Cause:
    """A cause of waits: what was waited for, why, and what to do."""

    waited_for: str
    because: str
    remedy: str = ""


MORE_CACHE: Final = (
    "enlarge the KV cache (--gpu-memory-utilization, --kv-cache-memory-bytes or "
    "--num-gpu-blocks-override), store it in fewer bytes (--kv-cache-dtype fp8), or add "
    "engines (--replicas)"
)
CAUSES: Final = {
    "blocks": Cause(
        "free KV blocks",
        "the KV cache was full: it has {blocks:,} blocks of {size} tokens",
        MORE_CACHE,
    ),
    "rows": Cause(
        "a free row of the batch",
        "all rows of the batch were taken (--max-num-seqs {rows})",
        "raise --max-num-seqs above {rows:,}, or add engines (--replicas)",
    ),
    "budget": Cause(
        "tokens of a step",
        "others took all tokens of the steps: {budget_words}",
        "{budget_remedy}, which makes steps longer",
    ),
    "share": Cause(
        "its client's share",
        "its client had its share of the rows while other clients waited or ran",
        "choose another --scheduling-policy than {policy}, or raise --max-num-seqs above "
        "{rows:,}",
    ),
    "sibling": Cause(
        "another sample of its request",
        "another sample of the same request computed the prompt that they share",
    ),
    "policy": Cause(
        "the scheduling policy",
        "the scheduling policy {policy} held admissions back, to gather a batch",
        "choose another --scheduling-policy, or give this one other options",
    ),
    "loading": Cause(
        "its cached blocks",
        "its cached blocks were on their way from host memory, a disk or another engine",
        "have them computed instead (--kv-host-choice recompute, --kv-disk-choice "
        "recompute)",
    ),
    "adapter": Cause(
        "its adapter",
        "its adapter was being loaded to the device",
        "if it had been there before, keep more adapters on the device (--max-loras "
        "above {slots})",
    ),
    "slot": Cause(
        "a slot for its adapter",
        "all {slots} slots for adapters were taken by others (--max-loras)",
        "keep more adapters on the device (--max-loras above {slots}), or add engines "
        "(--replicas)",
    ),
    "step": Cause(
        "the next step",
        "a step ran, and the next one was not planned yet",
        "lower --max-num-batched-tokens, which makes steps shorter",
    ),
    "fault": Cause(
        "a test of a suspect",
        "steps had failed, and a suspect ran alone, to find the request that makes them "
        "fail",
        "see the server's log for the error",
    ),
    ORDER: Cause(
        "others that went first",
        "{later:,} of {admitted:,} admissions meanwhile were of requests that came "
        "later: --scheduling-policy {policy} let them go first",
        "{order_remedy}",
    ),
    RECOMPUTED: Cause(
        "what a preemption took",
        "it was preempted {times}, and its KV was computed again",
        "{order_remedy}",
    ),
    PREEMPTED: Cause(
        "what a preemption took",
        "it was preempted {times}, as the KV cache was full: it has "
        "{blocks:,} blocks of {size} tokens. Its KV was computed again",
        f"{MORE_CACHE}; or run fewer sequences at once (--max-num-seqs below {{rows:,}})",
    ),
}
_UNKNOWN: Final = Cause("{cause}", "it waited for {cause}")


def cause_of(name: str) -> Cause:
    """The words for a cause; a later version may have others."""
    return CAUSES.get(name, _UNKNOWN)


def config_words(config: EngineConfig, whose: str = "its") -> dict[str, object]:
    """What the words say of an engine; `whose` waits they are, of one or of several."""
    return {
        "blocks": config.num_blocks,
        "size": config.block_size,
        "rows": config.max_num_seqs,
        "budget_words": _budget_words(config),
        "budget_remedy": _budget_remedy(config),
        "slots": config.adapter_slots,
        "policy": policy_name(config.policy),
        "by_priority": isinstance(config.policy, Priority | Ageing),
        "order_remedy": _order_remedy(config.policy, whose),
    }


def _budget_words(config: EngineConfig) -> str:
    """How many tokens a step takes."""
    budget = f"{config.max_num_batched_tokens:,}"
    if config.itl_target is None:
        return f"{budget} each"
    return f"at most {budget} each, and fewer beside sequences that decode (--itl-target)"


def _budget_remedy(config: EngineConfig) -> str:
    """What gives a step more tokens."""
    if config.itl_target is None:
        return f"raise --max-num-batched-tokens above {config.max_num_batched_tokens:,}"
    more = "more milliseconds, or to none" if config.itl_target else "none"
    return f"set --itl-target to {more}"


def _order_remedy(policy: Policy, whose: str) -> str:
    """What helps requests that a policy lets others overtake."""
    other = "choose a --scheduling-policy by which waiting helps: ageing, fair or fcfs"
    if isinstance(policy, Priority):
        return f"raise {whose} priority (a lower number), or {other}"
    if isinstance(policy, Ageing):
        return (
            f"raise {whose} priority (a lower number), or have waiting count sooner: "
            "--scheduling-policy ageing:seconds=, with fewer than now"
        )
    return (
        "choose another --scheduling-policy, such as fcfs, which keeps the order of "
        "arrival, or add engines (--replicas)"
    )


def policy_name(policy: Policy) -> str:
    """The name of a policy as an option has it; of others, their class."""
    names = {kind: name for name, kind in POLICIES.items()}
    return names.get(type(policy), type(policy).__name__)
