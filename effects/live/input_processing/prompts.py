"""Prompts: turns user input into token ids, or an error that names the fault."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen

from minfer.effects.live.errors import REQUEST_TEMPLATE_OPTION, RequestError, TooLongError
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.text.tokenizer import TextError, TextTooLongError, Tokenizer

if TYPE_CHECKING:
    from minfer.effects.text.chat_templates import ChatOptions, Conversation, Tools

Prompt = str | Sequence[int] | Mapping[str, Any]


@frozen
class TokenizedPrompt:
    """A prompt from the user: its text, if it had one, token ids, and the salt that
    decides who shares its cached blocks.
    """

    text: str | None
    ids: Sequence[int]
    salt: bytes = b""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or several, as a list. Token ids, not in a list of their own,
    are one prompt.
    """
    if not isinstance(prompts, str | Mapping | Sequence):
        raise wrong_type_error(
            "prompts", "a string, token ids, or a list of these", prompts
        )
    is_ids = prompts and all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompts
    )
    if is_ids or isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # by now it is one prompt
    return list(prompts)  # type: ignore[arg-type]  # and here several


def read_prompt(
    prompt: object,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    salt: bytes = b"",
    add_special_tokens: bool = True,
) -> TokenizedPrompt:
    """Returns the token ids of a prompt: a string, token ids, or vLLM's mapping of
    either. A string gets the model's special tokens. Raises RequestError.
    """
    if isinstance(prompt, TokenizedPrompt):  # a conversation that was rendered already
        return prompt
    if isinstance(prompt, Mapping):
        prompt, salt = _from_mapping(prompt)
    text = prompt if isinstance(prompt, str) else None
    tokens = prompt if text is None else encode_text(text, tokenizer, add_special_tokens)
    if not isinstance(tokens, Iterable):
        raise wrong_type_error("a prompt", "a string or token ids", prompt)
    ids = tuple(tokens)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size:
        ids = _checked_token_ids(ids, vocab_size)
    return TokenizedPrompt(text, ids, salt)


def encode_text(
    text: str, tokenizer: Tokenizer | None, add_special_tokens: bool = True
) -> list[int]:
    """Returns the token ids of a text. Raises RequestError if it cannot be encoded, and
    TooLongError if it cannot fit.
    """
    if tokenizer is None:
        reason = (
            "a text prompt needs a tokenizer, which was left out (skip_tokenizer_init)"
        )
        raise RequestError(f"{reason}; give token ids")
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TextTooLongError as error:
        raise TooLongError(str(error)) from None
    except TextError as error:
        raise RequestError(str(error)) from None


def render_conversation(
    tokenizer: Tokenizer | None, messages: "Conversation", options: "ChatOptions"
) -> TokenizedPrompt:
    """Renders a conversation through its chat template. Raises as `encode_text`, and
    ChatTemplateError.
    """
    from minfer.effects.text.chat_templates import render_chat  # it imports jinja2

    text = render_chat(tokenizer, messages, options)
    # Templates write begin and end tokens themselves.
    return TokenizedPrompt(text, encode_text(text, tokenizer, add_special_tokens=False))


class ChatRenderer:
    """Renders conversations for the model of its tokenizer, which has the chat template
    in force.
    """

    __slots__ = ()
    tokenizer: Tokenizer | None
    template_settings: TemplateSettings

    def render(
        self,
        messages: "Conversation",
        *,
        tools: "Tools | None" = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, through the model's chat template; see
        `LLM.chat`.

        Raises ChatTemplateError, and RequestError for text that cannot be encoded.
        """
        options: ChatOptions = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return list(self._render_prompt(messages, options).ids)

    def with_request_template(self, template: str) -> Self:
        """Returns this model with the chat template of a request. Raises RequestError:
        only workers that are bounded for it take one.
        """
        del template
        raise RequestError(
            f"chat_template: this server takes no templates from requests; leave it out, "
            f"or have the server started with {REQUEST_TEMPLATE_OPTION}",
            param="chat_template",
        )

    def _render_prompt(
        self,
        messages: "Conversation",
        options: "ChatOptions",
        template: str | None = None,
    ) -> TokenizedPrompt:
        """Renders a conversation, with another `template` than the model's if given."""
        variables = options.get("chat_template_kwargs") or {}
        defaults = self.template_settings.defaults
        options = {**options, "chat_template_kwargs": {**defaults, **variables}}
        tokenizer = self.tokenizer
        if template is not None and tokenizer is not None:
            tokenizer = tokenizer.with_template(template)
        return render_conversation(tokenizer, messages, options)


def wrong_type_error(
    name: str, expected: str, value: object, index: int = 0
) -> RequestError:
    """Returns the error about a value of a wrong type, in the request at `index`."""
    return RequestError(f"{name} must be {expected}, not a {type(value).__name__}", index)


def _checked_token_ids(ids: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Returns token ids that are not all plain integers of the vocabulary: numpy's are
    good.

    Raises RequestError, which names the first invalid one.
    """
    token_ids = []
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise RequestError(
                f"token ids must be whole numbers, not {token!r} (at {position})"
            )
        if not 0 <= token < vocab_size:
            reason = f"token id {token} at position {position} is outside the vocabulary"
            raise RequestError(f"{reason}; ids are from 0 to {vocab_size - 1}")
        token_ids.append(operator.index(token))
    return tuple(token_ids)


def _from_mapping(prompt: Mapping[Any, Any]) -> tuple[object, bytes]:
    """Returns a mapping's prompt and its cache salt."""
    if unknown := set(map(str, prompt)) - {"prompt", "prompt_token_ids", "cache_salt"}:
        raise RequestError(
            f"a prompt has no field {min(unknown)!r}; use prompt or prompt_token_ids"
        )
    names = ("prompt", "prompt_token_ids")
    fields = [name for name in names if prompt.get(name) is not None]
    if len(fields) != 1:
        raise RequestError("a prompt needs one of the fields prompt and prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise wrong_type_error("cache_salt", "a string", salt)
    return prompt[fields[0]], salt.encode("utf-8", "surrogatepass")
