"""POST /detokenize: the text of token ids; vLLM's."""

from functools import partial
from typing import Annotated, Final

from pydantic import Field

from minfer.effects.live.input_processing.prompts import read_prompt
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.protocol import ModelInfo, QueryEndpoint
from minfer.effects.serving.request_parsing.bodies import StrictObject, read_body
from minfer.effects.serving.wire.error_form import failure


class DetokenizeBody(StrictObject):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]

    def answer(self, llm: ModelInfo) -> dict[str, object]:
        """Their text, special tokens included. Raises RequestError and ApiError."""
        if llm.tokenizer is None:
            message = (
                "token ids need a tokenizer, which was left out (skip_tokenizer_init)"
            )
            raise ApiError(message, "tokens")
        if self.tokens:  # else there is nothing to check
            read_prompt(self.tokens, llm.tokenizer, llm.setup.spec.vocab_size)
        text = llm.tokenizer.decode(self.tokens, skip_special_tokens=False)
        return {"prompt": text}


QUERY_ENDPOINT: Final = QueryEndpoint(
    path="/detokenize",
    summary="The text that token ids spell.",
    prompt_field="tokens",
    body=DetokenizeBody,
    read=partial(read_body, DetokenizeBody),
    failure=failure,
)
