"""minfer: an LLM inference engine whose control plane is a pure function.

`from minfer import LLM, SamplingParams` is the library; `minfer.engine.step` is the
engine. The core does not import torch: executors are in `minfer.effects`, which is
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minfer.records.config import EngineConfig
from minfer.records.request import ParameterError, Request, SamplingParams
from minfer.sampling.params import RequestOutputKind
from minfer.sampling.structured import StructuredOutputs
from minfer.sampling.structured import StructuredOutputs as StructuredOutputsParams
from minfer.values.checks import ConfigError
from minfer.version import __version__ as __version__

if TYPE_CHECKING:
    from minfer.effects.live.adapters.lora_request import LoRARequest as LoRARequest
    from minfer.effects.live.async_llm import AsyncLLM as AsyncLLM
    from minfer.effects.live.async_llm import AsyncLLM as AsyncLLMEngine
    from minfer.effects.live.beams.beam_search import BeamSearchOutput as BeamSearchOutput
    from minfer.effects.live.beams.beam_search import BeamSearchParams as BeamSearchParams
    from minfer.effects.live.errors import EngineDeadError as EngineDeadError
    from minfer.effects.live.errors import OverloadedError as OverloadedError
    from minfer.effects.live.errors import RequestError as RequestError
    from minfer.effects.live.llm import LLM as LLM
    from minfer.effects.live.pooling_params import PoolingParams as PoolingParams
    from minfer.effects.models.config_reader import CheckpointError as CheckpointError
    from minfer.effects.setup.engine_args import EngineArgs as AsyncEngineArgs
    from minfer.effects.setup.engine_args import EngineArgs as EngineArgs
    from minfer.effects.setup.flexible_parser import (
        FlexibleArgumentParser as FlexibleArgumentParser,
    )
    from minfer.effects.text.chat_templates import ChatTemplateError as ChatTemplateError
    from minfer.effects.text.outputs import CompletionOutput as CompletionOutput
    from minfer.effects.text.outputs import EmbeddingOutput as EmbeddingOutput
    from minfer.effects.text.outputs import (
        EmbeddingRequestOutput as EmbeddingRequestOutput,
    )
    from minfer.effects.text.outputs import RequestOutput as RequestOutput

# The modules of names that are imported on first use.
_LAZY = {
    "AsyncEngineArgs": "setup.engine_args",
    "AsyncLLM": "live.async_llm",
    "AsyncLLMEngine": "live.async_llm",
    "BeamSearchOutput": "live.beams.beam_search",
    "BeamSearchParams": "live.beams.beam_search",
    "ChatTemplateError": "text.chat_templates",
    "CheckpointError": "models.config_reader",
    "CompletionOutput": "text.outputs",
    "EmbeddingOutput": "text.outputs",
    "EmbeddingRequestOutput": "text.outputs",
    "EngineArgs": "setup.engine_args",
    "EngineDeadError": "live.errors",
    "FlexibleArgumentParser": "setup.flexible_parser",
    "LLM": "live.llm",
    "LoRARequest": "live.adapters.lora_request",
    "OverloadedError": "live.errors",
    "PoolingParams": "live.pooling_params",
    "RequestError": "live.errors",
    "RequestOutput": "text.outputs",
}
# Names of vLLM's for one thing that minfer has once.
_ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
# Names of vLLM's that minfer does not have, and what would do.
_ABSENT = {
    "LLMEngine": "the engine takes its own steps; use LLM.stream, which yields outputs "
    "as they come, or AsyncLLM",
    "ModelRegistry": "other architectures run through transformers' own models",
}
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ChatTemplateError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "FlexibleArgumentParser",
    "LoRARequest",
    "OverloadedError",
    "ParameterError",
    "PoolingParams",
    "Request",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        # Of an AttributeError, Python would replace the text where a name is imported.
        raise ImportError(f"minfer has no {name}: {_ABSENT[name]}")
    if name not in _LAZY:
        raise AttributeError(f"module 'minfer' has no attribute {name!r}")
    module = import_module(f"minfer.effects.{_LAZY[name]}")
    return getattr(module, _ALIASES.get(name, name))
