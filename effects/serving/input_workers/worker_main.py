"""The program of workers that prepare requests (`worker_loop` has what runs it).

python -m minfer.effects.serving.input_workers.worker_main DESCRIPTOR
"""

import sys

import msgspec

from minfer.effects.live.errors import check_prompt
from minfer.effects.serving.endpoints import ENDPOINTS, QUERY_ENDPOINTS
from minfer.effects.serving.input_workers.task import (
    ModelFacts,
    PreparedRequest,
    WorkerModel,
    work,
)
from minfer.effects.serving.input_workers.worker_limits import DEFAULT_LIMITS
from minfer.effects.serving.input_workers.worker_loop import refusal_reply, run_worker
from minfer.effects.serving.input_workers.worker_messages import (
    WorkerReply,
    WorkerRequest,
)
from minfer.effects.serving.protocol import Endpoint, QueryEndpoint
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.text.template_cache import templates_of


class InputWorker:
    """Prepares bodies for the model of `ModelFacts`."""

    def __init__(self, facts: ModelFacts) -> None:
        self._model_info = WorkerModel(facts)
        self._models = Models(
            facts.names, 0, facts.max_model_len, takes_adapters=facts.takes_adapters
        )
        endpoints: list[Endpoint | QueryEndpoint] = [*ENDPOINTS, *QUERY_ENDPOINTS]
        self.limits = facts.request_templates or DEFAULT_LIMITS
        self._targets = {endpoint.path: endpoint for endpoint in endpoints}

    def reply(self, request: WorkerRequest) -> WorkerReply:
        """The reply for a body; never raises."""
        if self._model_info.facts.request_templates is None:
            return self._reply(request)
        with templates_of(request.tenant):
            return self._reply(request)

    def _reply(self, request: WorkerRequest) -> WorkerReply:
        target = self._targets[request.path]
        try:
            result = work(target, request.data, self._model_info, self._models)
            if isinstance(result, PreparedRequest):
                supported = self._model_info.facts.max_position_embeddings
                _check_lengths(result, self._models.max_model_len, supported)
        except Exception as error:
            return refusal_reply(error, request.path, target.prompt_field)
        if isinstance(result, PreparedRequest):
            return WorkerReply(prepared=result)
        return WorkerReply(answer=result)


def _check_lengths(result: PreparedRequest, context: int, model_max_len: int) -> None:
    """Raise TooLongError already here: a request that cannot run is not sent."""
    request = result.request
    longest = max((len(prompt.ids) for prompt in request.prompts), default=0)
    has_output = request.pooled is None and request.params.max_tokens != 0
    check_prompt(longest, context, model_max_len, output=has_output)


def _make(facts: bytes) -> InputWorker:
    return InputWorker(msgspec.json.decode(facts, type=ModelFacts))


if __name__ == "__main__":
    sys.exit(run_worker(_make))
