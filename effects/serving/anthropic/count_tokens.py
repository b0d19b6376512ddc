"""POST /v1/messages/count_tokens: the number of tokens of a conversation."""

from functools import partial
from typing import Final

from minfer.effects.serving.anthropic.conversation import ConversationBody
from minfer.effects.serving.anthropic.error_format import failure
from minfer.effects.serving.protocol import ModelInfo, QueryEndpoint
from minfer.effects.serving.request_parsing.bodies import read_body


class CountBody(ConversationBody):
    """A conversation that is counted, and not answered."""

    def answer(self, llm: ModelInfo) -> dict[str, object]:
        """The number of its tokens. Raises ChatTemplateError and RequestError."""
        return {"input_tokens": len(self.ids(llm))}


QUERY_ENDPOINT: Final = QueryEndpoint(
    path="/v1/messages/count_tokens",
    summary="How many tokens a conversation would be, as Anthropic's API counts.",
    prompt_field="messages",
    body=CountBody,
    read=partial(read_body, CountBody),
    failure=failure,
)
