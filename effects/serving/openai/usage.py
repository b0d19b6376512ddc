"""The usage of an answer: tokens, and the times of each prompt."""

from collections.abc import Sequence

from minfer.effects.serving.protocol import PromptUsage


def usage_of(served: Sequence[PromptUsage]) -> dict[str, object]:
    """Tokens of all prompts together, in OpenAI's format."""
    prompt = sum(one.prompt_tokens for one in served)
    output = sum(one.metrics.output_tokens for one in served)
    cached = sum(one.cached_tokens for one in served)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
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
