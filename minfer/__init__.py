"""minfer: an LLM inference engine whose whole control plane is a pure function.

`from minfer import LLM, SamplingParams` is the library; `minfer.engine.step` is the engine. The
core loads no torch: what executes is in `minfer.effects` and is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minfer.config import ConfigError, EngineConfig
from minfer.request import ParameterError, Request, SamplingParams

if TYPE_CHECKING:
    from minfer.effects.async_llm import AsyncLLM as AsyncLLM
    from minfer.effects.chat import ChatTemplateError as ChatTemplateError
    from minfer.effects.edge import OverloadedError as OverloadedError
    from minfer.effects.edge import RequestError as RequestError
    from minfer.effects.llm import LLM as LLM
    from minfer.effects.outputs import RequestOutput as RequestOutput
    from minfer.effects.spec import CheckpointError as CheckpointError
    from minfer.effects.worker import EngineDeadError as EngineDeadError

_LAZY = {
    "AsyncLLM": "async_llm", "ChatTemplateError": "chat", "CheckpointError": "spec",
    "EngineDeadError": "worker", "LLM": "llm", "OverloadedError": "edge", "RequestError": "edge",
    "RequestOutput": "outputs"}  # fmt: skip
__all__ = [
    "ConfigError", "EngineConfig", "ParameterError", "Request", "SamplingParams", *_LAZY,
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    return getattr(import_module(f"minfer.effects.{_LAZY[name]}"), name)
