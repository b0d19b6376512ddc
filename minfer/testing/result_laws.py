"""The specification of results: which an executor may return for a plan.

The engine discards any other, and the step counts as failed.
"""

from typing import Any

from minfer.records.config import EngineConfig
from minfer.records.messages import Executed
from minfer.records.plan import Plan


def good(config: EngineConfig, plan: Plan, done: Executed) -> bool:
    """Whether a step of this plan can yield these results; else it counts as failed."""
    if done.step != plan.step or type(done.yields) is not tuple:
        return False
    if len(done.yields) != len(plan.run_ids):
        return False
    for tokens, most in zip(done.yields, plan.max_sampled_tokens, strict=True):
        if type(tokens) is not tuple or not min(1, most) <= len(tokens) <= most:
            return False
        for token in tokens:  # booleans are not token ids, though they equal some
            if type(token) is not int or not 0 <= token < config.vocab_size:
                return False
    return _beside(done)


def _beside(done: Executed) -> bool:
    """Whether the columns beside the tokens are empty, or fit each row."""
    sizes = [len(tokens) for tokens in done.yields]
    columns: list[Any] = [done.logprobs, done.pooled]
    if any(type(column) is not tuple for column in columns):
        return False
    if any(column and len(column) != len(sizes) for column in columns):
        return False
    for some, size in zip(done.logprobs, sizes, strict=False):
        # for each token, or for none of a row
        if type(some) is not tuple or len(some) not in (0, size):
            return False
    return all(type(vector) is bytes for vector in done.pooled)
