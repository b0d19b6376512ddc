"""The work on a body, in whichever process or thread it is done."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from attrs import evolve, field, frozen

from minfer.effects.live.input_processing.prompts import ChatRenderer
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.live.served_model import ServedModel
from minfer.effects.serving.input_workers.worker_limits import WorkerLimits
from minfer.effects.serving.protocol import (
    Endpoint,
    GenerationRequest,
    ModelInfo,
    QueryEndpoint,
)
from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from minfer.effects.serving.request_parsing.model_names import Models
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import NONE, Parsers
from minfer.records.request import SamplingParams


@frozen(kw_only=True)
class ModelFacts:
    """All that a worker needs of a model, as plain data."""

    folder: str | None  # of the tokenizer; None: only token ids are accepted
    vocab_size: int
    hidden_size: int  # elements of a pooled vector
    max_model_len: int  # tokens
    max_position_embeddings: int = 0  # tokens that the model supports, if known
    default_params: Mapping[str, int | float]  # of sampling, as the model recommends
    names: tuple[str, ...]  # of the model
    takes_adapters: bool = False  # other names may be adapters'
    # The formats of calls and reasoning: `Parsers`.
    tool_parser: str = NONE
    reasoning_parser: str = NONE
    response_template: str = ""
    call_form: str = ""  # in which calls are required
    reasoning_key: bytes = field(default=b"", repr=False)
    refuses_hosted_tools: bool = False
    template_settings: TemplateSettings = field(factory=TemplateSettings)
    # Of workers that take templates from requests; None: they take none.
    request_templates: WorkerLimits | None = None

    @classmethod
    def of(cls, llm: ServedModel, names: tuple[str, ...]) -> "ModelFacts":
        """The facts about a model that is served under these names."""
        setup = llm.setup
        return cls(
            folder=None if llm.tokenizer is None else str(setup.tokenizer_folder),
            vocab_size=setup.spec.vocab_size,
            hidden_size=setup.spec.hidden_size,
            max_model_len=setup.config.max_model_len,
            max_position_embeddings=setup.spec.max_position_embeddings,
            default_params=dict(setup.default_params),
            names=names,
            takes_adapters=llm.adapters is not None,
            tool_parser=llm.parsers.tools,
            reasoning_parser=llm.parsers.reasoning,
            response_template=llm.parsers.response,
            call_form=llm.parsers.written,
            reasoning_key=llm.reasoning_key,
            refuses_hosted_tools=llm.refuses_hosted_tools,
            template_settings=llm.template_settings,
        )


@frozen(kw_only=True)
class PreparedRequest:
    """A body that was read, checked, rendered and tokenized."""

    model: str  # the name under which it was requested
    request: GenerationRequest


@frozen(kw_only=True)
class QueryResult:
    """The answer to a question."""

    json: str
    model: str = ""  # the name under which it was requested
    ignored: tuple[str, ...] = ()  # fields without effect: `ignored_hints`


@frozen
class WorkerModel(ChatRenderer):
    """A `ModelInfo` made from `ModelFacts`: a model without its engine."""

    facts: ModelFacts
    tokenizer: Tokenizer | None = field()

    template_settings: TemplateSettings = field()

    @tokenizer.default
    def _load(self) -> Tokenizer | None:
        if self.facts.folder is None:
            return None
        tokenizer = Tokenizer(Path(self.facts.folder), self.facts.max_model_len)
        template = self.facts.template_settings.template
        return tokenizer if template is None else tokenizer.with_template(template)

    @template_settings.default
    def _settings(self) -> TemplateSettings:
        return self.facts.template_settings

    def with_request_template(self, template: str) -> Self:
        """This model with the chat template of a request. Raises RequestError."""
        if self.facts.request_templates is None or self.tokenizer is None:
            super().with_request_template(template)
        tokenizer = self.tokenizer
        return evolve(self, tokenizer=tokenizer and tokenizer.with_template(template))

    @property
    def setup(self) -> "WorkerModel":
        """Itself: it has the sizes, too."""
        return self

    @property
    def spec(self) -> ModelFacts:
        """The model's sizes."""
        return self.facts

    @property
    def config(self) -> ModelFacts:
        """The length of the context."""
        return self.facts

    @property
    def parsers(self) -> Parsers:
        """The model's formats of tool calls and reasoning."""
        facts = self.facts
        return Parsers(
            facts.tool_parser,
            facts.reasoning_parser,
            facts.response_template,
            facts.call_form,
        )

    @property
    def reasoning_key(self) -> bytes:
        """The key of reasoning that clients keep."""
        return self.facts.reasoning_key

    @property
    def refuses_hosted_tools(self) -> bool:
        """Whether tools that run on OpenAI's servers are refused, and not left out."""
        return self.facts.refuses_hosted_tools

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """As `Setup` does."""
        return SamplingParams(**{**self.facts.default_params, **overrides})


def prepare(
    endpoint: Endpoint, data: bytes, model_info: ModelInfo, models: Models
) -> PreparedRequest:
    """Read a body and make its request. Raises ApiError, and the errors of
    `to_api_error`.
    """
    with collect_ignored() as hints:
        parsed = endpoint.read(data)
        model = models.resolve(parsed.model)
        request = parsed.generation(model_info)
    if hints.names:
        request = evolve(request, ignored=hints.names)
    return PreparedRequest(model=model, request=request)


def answer(
    query: QueryEndpoint, data: bytes, model_info: ModelInfo, models: Models
) -> QueryResult:
    """Read a question, and answer it in JSON. Raises as `prepare` does."""
    with collect_ignored() as hints:
        parsed = query.read(data)
        model = models.resolve(parsed.model)
        text = json.dumps(parsed.answer(model_info))
    return QueryResult(json=text, model=model, ignored=hints.names)


def work(
    target: Endpoint | QueryEndpoint, data: bytes, model_info: ModelInfo, models: Models
) -> PreparedRequest | QueryResult:
    """Prepare or answer a body."""
    if isinstance(target, Endpoint):
        return prepare(target, data, model_info, models)
    return answer(target, data, model_info, models)
