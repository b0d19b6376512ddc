"""minfer: an LLM inference engine whose whole control plane is a pure function.

`from minfer import LLM, SamplingParams` is the library; `minfer.engine.step` is the engine. The
core loads no torch: what executes is in `minfer.effects` and is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from minfer.config import ConfigError, EngineConfig
from minfer.request import ParameterError, Request, SamplingParams

if TYPE_CHECKING:
    from minfer.effects.async_llm import AsyncLLM
    from minfer.effects.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "ConfigError",
    "EngineConfig",
    "ParameterError",
    "Request",
    "SamplingParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minfer.effects.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from minfer.effects.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'minfer' has no attribute {name!r}")
