"""Arguments and methods of vLLM's `LLM` and `AsyncLLM` that minfer does not have: what
would do instead.
"""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.live.errors import RequestError

_NO_LISTS: Final = "requests name their adapters themselves: lora_request"
_ARGUMENTS: Final[Mapping[str, str]] = {
    "tokenization_kwargs": "a text is tokenized in one way; give token ids instead, as "
    '{"prompt_token_ids": [...]}',
    "mm_processor_kwargs": "images, audio and video are not supported; leave it out",
    "trace_headers": "spans are of minfer serve (--otlp-traces-endpoint); leave it out",
    "data_parallel_rank": "one engine runs here; leave it out",
}
_NO_SLEEP: Final = "close it, and make another one when you need it"
_NO_RPC: Final = "no code of yours runs in the engine; --policies takes policies alone"
_NO_STEPS: Final = "the engine takes its own steps; use LLM.stream, or AsyncLLM.generate"
_NO_PROFILE: Final = "run the program under torch.profiler or Nsight Systems"
_NO_WEIGHTS: Final = "weights do not change while it runs; make another one"
METHODS: Final[Mapping[str, str]] = {
    "classify": "models with a classification head are not supported; use "
    "SamplingParams(structured_outputs=StructuredOutputsParams(choice=[...]))",
    "score": "models that score pairs are not supported; compare vectors of embed()",
    "reward": "reward models are not supported",
    "enqueue": _NO_STEPS,
    "enqueue_chat": _NO_STEPS,
    "wait_for_completion": _NO_STEPS,
    "add_request": _NO_STEPS,
    "step": _NO_STEPS,
    "sleep": _NO_SLEEP,
    "wake_up": _NO_SLEEP,
    "is_sleeping": _NO_SLEEP,
    "release_kv_cache_memory": _NO_SLEEP,
    "collective_rpc": _NO_RPC,
    "apply_model": _NO_RPC,
    "start_profile": _NO_PROFILE,
    "stop_profile": _NO_PROFILE,
    "add_lora": _NO_LISTS,
    "remove_lora": _NO_LISTS,
    "list_loras": _NO_LISTS,
    "pin_lora": _NO_LISTS,
    "update_weights": _NO_WEIGHTS,
    "start_weight_update": _NO_WEIGHTS,
    "finish_weight_update": _NO_WEIGHTS,
    "init_weight_transfer_engine": _NO_WEIGHTS,
    "pause_generation": "requests are not paused; abort them, and submit them again: "
    "their prefix is cached",
    "resume_generation": "requests are not paused",
}


def refuse_given(**arguments: Any) -> None:
    """Raise RequestError for an argument that asks for something: None and what is empty
    ask for nothing.
    """
    for name, value in arguments.items():
        if value is not None and value not in ({}, [], ()):
            raise RequestError(f"{name}: {_ARGUMENTS[name]}", param=name)


def absent_method(owner: str, name: str) -> AttributeError:
    """Returns the error about an attribute that a class does not have."""
    if name in METHODS:
        return AttributeError(f"{owner}.{name} is not supported: {METHODS[name]}")
    return AttributeError(f"{owner!r} object has no attribute {name!r}")
