"""The specification of results: which an executor may return for a plan.

The engine discards any other, and the step counts as failed.
"""

from typing import Any

from minfer.records.config import EngineConfig
from minfer.records.messages import Executed
from minfer.records.plan import Plan


def is_valid_result(config: EngineConfig, plan: Plan, results: Executed) -> bool:
    """Whether a step of this plan can yield these results; else it counts as failed."""
    if results.step != plan.step or type(results.yields) is not tuple:
        return False
    if len(results.yields) != len(plan.run_ids):
        return False
    for tokens, max_tokens in zip(results.yields, plan.max_sampled_tokens, strict=True):
        if (
            type(tokens) is not tuple
            or not min(1, max_tokens) <= len(tokens) <= max_tokens
        ):
            return False
        for token in tokens:  # booleans are not token ids, though they equal some
            if type(token) is not int or not 0 <= token < config.vocab_size:
                return False
    return _are_columns_valid(results)


def _are_columns_valid(results: Executed) -> bool:
    """Whether the columns beside the tokens are empty, or fit each row."""
    sizes = [len(tokens) for tokens in results.yields]
    columns: list[Any] = [results.logprobs, results.pooled]
    if any(type(column) is not tuple for column in columns):
        return False
    if any(column and len(column) != len(sizes) for column in columns):
        return False
    for logprobs, size in zip(results.logprobs, sizes, strict=False):
        # for each token, or for none of a row
        if type(logprobs) is not tuple or len(logprobs) not in (0, size):
            return False
    return all(type(vector) is bytes for vector in results.pooled)
