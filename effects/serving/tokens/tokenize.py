"""POST /tokenize: the token ids of a text, or of a conversation; vLLM's."""

from functools import partial
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from minfer.effects.live.input_processing.prompts import encode_text
from minfer.effects.serving.openai.chat_messages import ChatMessage
from minfer.effects.serving.openai.fields import ItemLimit
from minfer.effects.serving.openai.template_fields import RequestTemplate, render
from minfer.effects.serving.openai.tools import ChatTool
from minfer.effects.serving.protocol import ModelInfo, QueryEndpoint
from minfer.effects.serving.request_parsing.bodies import (
    StrictObject,
    invalid_value,
    read_body,
)
from minfer.effects.serving.wire.error_form import failure


class TokenizeBody(StrictObject):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], ItemLimit, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # None: to a text; templates add them
    return_token_strs: bool = False
    # Of a conversation, as POST /v1/chat/completions has them:
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: RequestTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ChatTool], ItemLimit] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid_value("send either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            message = "is not supported with messages: the chat template writes its own"
            raise invalid_value(message, "add_special_tokens")
        return self

    def answer(self, llm: ModelInfo) -> dict[str, object]:
        """The ids. Raises ChatTemplateError and RequestError."""
        ids = self._ids(llm)
        tokenizer = llm.tokenizer if self.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": llm.setup.config.max_model_len,
            "tokens": ids,
            "token_strs": None if tokenizer is None else tokenizer.token_names(ids),
        }

    def _ids(self, llm: ModelInfo) -> list[int]:
        if self.messages is None:
            special = self.add_special_tokens is not False
            return encode_text(self.prompt or "", llm.tokenizer, special)
        continues = self.continue_final_message
        adds_prompt = self.add_generation_prompt
        return render(
            llm,
            self.chat_template,
            [message.to_turn() for message in self.messages],
            tools=[tool.to_json() for tool in self.tools or ()] or None,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            chat_template_kwargs=self.chat_template_kwargs,
        )


QUERY_ENDPOINT: Final = QueryEndpoint(
    path="/tokenize",
    summary="The token ids of a text, or of a conversation.",
    prompt_field="prompt",
    body=TokenizeBody,
    read=partial(read_body, TokenizeBody),
    failure=failure,
)
