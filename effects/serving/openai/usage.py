"""The usage of an answer: tokens, and the times of each prompt."""

from collections.abc import Sequence

from minfer.effects.serving.protocol import PromptUsage


def usage_of(
    served: Sequence[PromptUsage], reasoning_tokens: int | None = None
) -> dict[str, object]:
    """Tokens of all prompts together, in OpenAI's format; of completions, no reasoning is
    known.
    """
    prompt = sum(prompt_usage.prompt_tokens for prompt_usage in served)
    output = sum(prompt_usage.metrics.output_tokens for prompt_usage in served)
    cached = sum(prompt_usage.cached_tokens for prompt_usage in served)
    details: dict[str, object] = {"prompt_tokens_details": {"cached_tokens": cached}}
    if reasoning_tokens is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return {**usage_so_far(prompt, output), **details}


def usage_so_far(prompt: int, output: int) -> dict[str, object]:
    """Tokens of a prompt and of an output that has not ended."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def timing_of(served: PromptUsage) -> dict[str, object]:
    """The times of a prompt, in seconds; null where there is none.

    The format is minfer's own: OpenAI's API has none.
    """
    metrics = served.metrics
    return {
        "queue_times": metrics.queue_times,
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
        "latency": metrics.latency,
        "preemptions": metrics.preemptions,
        "cached_tokens": served.cached_tokens,
    }
