"""POST /v1/messages/count_tokens: the number of tokens of a conversation."""

from functools import partial
from typing import Annotated, Final

from pydantic import Field

from minfer.effects.serving.anthropic.create_message import MessagesBody
from minfer.effects.serving.anthropic.error_format import failure
from minfer.effects.serving.protocol import ModelInfo, QueryEndpoint
from minfer.effects.serving.request_parsing.bodies import read_body


class CountBody(MessagesBody):
    """A conversation that is counted, and not answered: the body of POST /v1/messages, in
    which the parameters of the answer are optional.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 1

    def answer(self, llm: ModelInfo) -> dict[str, object]:
        """The number of its tokens. Raises ChatTemplateError and RequestError."""
        edited = self.render_edited(llm)
        count: dict[str, object] = {"input_tokens": len(edited.ids)}
        if self.context_management is not None:
            original = {"original_input_tokens": edited.original_tokens}
            count["context_management"] = original
        return count


QUERY_ENDPOINT: Final = QueryEndpoint(
    path="/v1/messages/count_tokens",
    summary="How many tokens a conversation would be, as Anthropic's API counts.",
    prompt_field="messages",
    body=CountBody,
    read=partial(read_body, CountBody),
    failure=failure,
)
