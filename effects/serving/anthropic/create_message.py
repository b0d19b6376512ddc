"""POST /v1/messages: answers a conversation, as Anthropic's API does."""

from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.anthropic.context_edits import EditedConversation
from minfer.effects.serving.anthropic.conversation import (
    ConversationBody,
    RequestMetadata,
)
from minfer.effects.serving.anthropic.error_format import failure
from minfer.effects.serving.anthropic.message_writing import writer
from minfer.effects.serving.protocol import (
    Endpoint,
    GenerationRequest,
    Include,
    ModelInfo,
)
from minfer.effects.serving.request_parsing.answer_parsing import parsing_of
from minfer.effects.serving.request_parsing.bodies import read_body
from minfer.effects.serving.request_parsing.tool_constraints import (
    CallRequirements,
    constrain_after_reasoning,
    constrain_calls,
    with_constraint,
)
from minfer.sampling.params import MAX_STOP_LENGTH, MAX_STOPS

StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]

StopLimit = Field(fail_fast=True, max_length=MAX_STOPS)


class MessagesBody(ConversationBody):
    """A conversation, and the parameters of its answer."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    metadata: RequestMetadata | None = None
    stop_sequences: Annotated[list[StopSequence], StopLimit] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: float | None = None

    def generation(self, llm: ModelInfo) -> GenerationRequest:
        """The conversation as one prompt. Raises ChatTemplateError, RequestError,
        ParameterError and ApiError.
        """
        names = {"max_tokens", "temperature", "top_k", "top_p"}
        sampling_args = self.model_dump(include=names, exclude_none=True)
        stops = tuple(self.stop_sequences or ())
        constraint = self.output_config.constraint() if self.output_config else None
        if constraint is not None:
            sampling_args["structured_outputs"] = constraint.build()
        params = llm.setup.default_sampling_params(**sampling_args, stop=stops)
        conversation = self.render_edited(llm)
        ids = conversation.ids
        offers = self.offers
        tools = {offer.name: offer.parameters for offer in offers}
        requirements = (
            CallRequirements()
            if self.tool_choice is None
            else self.tool_choice.requirements()
        )
        parsing = parsing_of(
            llm, ids, tools, parallel=requirements.parallel, prefix=self.prefix
        )
        request = GenerationRequest(
            prompts=(TokenizedPrompt(None, ids),),
            params=params,
            urgency=SchedulingHints(
                client=self.metadata.user_id if self.metadata else ""
            ),
            stream=self.stream,
            include=Include(repeat=self._repeated(conversation)),
            constraint_field="" if constraint is None else constraint.field,
            parsing=parsing,
            max_tokens_field="max_tokens",
        )
        added_constraint = constrain_calls(llm, offers, requirements, parsing, constraint)
        added_constraint = added_constraint or constrain_after_reasoning(
            llm, ids, parsing, constraint
        )
        return with_constraint(request, added_constraint)

    def _repeated(self, conversation: EditedConversation) -> dict[str, Any]:
        """The fields of the answer that follow from the request."""
        if self.context_management is None:
            return {}
        return {"context_management": {"applied_edits": conversation.applied}}


ENDPOINT: Final = Endpoint(
    name="messages",
    path="/v1/messages",
    summary="Answer a conversation, as Anthropic's API does.",
    body=MessagesBody,
    id_prefix="msg",
    prompt_field="messages",
    read=partial(read_body, MessagesBody),
    writer=writer,
    failure=failure,
)
