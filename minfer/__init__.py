"""minfer: an LLM inference engine whose control plane is a pure function.

`from minfer import LLM, SamplingParams` is the library; `minfer.engine.step` is the
engine. The core does not import torch: executors are in `minfer.effects`, which is
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minfer.records.config import EngineConfig
from minfer.records.request import ParameterError, Request, SamplingParams
from minfer.sampling.structured import StructuredOutputs
from minfer.values.checks import ConfigError
from minfer.version import __version__ as __version__

if TYPE_CHECKING:
    from minfer.effects.live.async_llm import AsyncLLM as AsyncLLM
    from minfer.effects.live.beams.beam_search import BeamSearchOutput as BeamSearchOutput
    from minfer.effects.live.beams.beam_search import BeamSearchParams as BeamSearchParams
    from minfer.effects.live.errors import EngineDeadError as EngineDeadError
    from minfer.effects.live.errors import OverloadedError as OverloadedError
    from minfer.effects.live.errors import RequestError as RequestError
    from minfer.effects.live.llm import LLM as LLM
    from minfer.effects.models.config_reader import CheckpointError as CheckpointError
    from minfer.effects.text.chat_templates import ChatTemplateError as ChatTemplateError
    from minfer.effects.text.outputs import EmbeddingOutput as EmbeddingOutput
    from minfer.effects.text.outputs import RequestOutput as RequestOutput

_LAZY = {
    "AsyncLLM": "live.async_llm",
    "BeamSearchOutput": "live.beams.beam_search",
    "BeamSearchParams": "live.beams.beam_search",
    "ChatTemplateError": "text.chat_templates",
    "CheckpointError": "models.config_reader",
    "EngineDeadError": "live.errors",
    "LLM": "live.llm",
    "OverloadedError": "live.errors",
    "RequestError": "live.errors",
    "EmbeddingOutput": "text.outputs",
    "RequestOutput": "text.outputs",
}
__all__ = [
    "ConfigError",
    "EngineConfig",
    "ParameterError",
    "Request",
    "SamplingParams",
    "StructuredOutputs",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    return getattr(import_module(f"minfer.effects.{_LAZY[name]}"), name)
