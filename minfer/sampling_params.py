"""The parameters of requests, in the module where vLLM's users import them from."""

from minfer.sampling.params import RequestOutputKind as RequestOutputKind
from minfer.sampling.params import SamplingParams as SamplingParams
from minfer.sampling.structured import StructuredOutputs as StructuredOutputs
from minfer.sampling.structured import StructuredOutputs as StructuredOutputsParams

__all__ = [
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]
