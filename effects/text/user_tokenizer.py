"""The tokenizer that `LLM.get_tokenizer()` returns, with the names of transformers'."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minfer.effects.text.chat_templates import (
    ChatOptions,
    Conversation,
    Tools,
    render_chat,
)
from minfer.effects.text.tokenizer import Tokenizer

# Arguments of transformers' method which would change what it returns.
_REFUSED: Final = (
    "chat_template",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


class UserTokenizer:
    """A model's tokenizer. Methods, arguments and defaults are those of transformers, and
    so are the results; token ids are plain lists.

    Unlike a prompt, a text may be longer than the context.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer.max_chars = None
        self.chat_template = tokenizer.chat_template
        self.bos_token = tokenizer.special_tokens.get("bos_token")
        self.eos_token = tokenizer.special_tokens.get("eos_token")
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.added_token_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises TextError if it is not valid Unicode."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Token ids of a text, or of each of several, under `input_ids`; their
        `attention_mask` is of ones, as nothing is padded.
        """
        _check_arguments(options, "tokenizer")
        for name, value in options.items():
            if value not in (None, False):
                raise TypeError(f"tokenizer: {name} is not supported; leave it out")
        ids: Any
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = [self.encode(part, add_special_tokens) for part in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

    def decode(
        self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False
    ) -> str:
        """Text of token ids, or of one."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Tokens in the vocabulary's spelling; empty for ids without a token."""
        return self._tokenizer.token_names(ids)

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> str | list[int]:
        """The text of a conversation, or its token ids with `tokenize`.

        Other arguments are variables of the template. Raises ChatTemplateError.
        """
        _check_arguments(chat_template_kwargs, "apply_chat_template")
        options: ChatOptions = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        text = render_chat(self._tokenizer, conversation, options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _check_arguments(arguments: Mapping[str, Any], method: str) -> None:
    """Raise TypeError for arguments that would change what is returned; false and None
    ask for nothing.
    """
    for name in _REFUSED:
        if arguments.get(name) not in (None, False):
            reason = f"{method}: {name} is not supported"
            raise TypeError(f"{reason}; it returns a text, or a list of token ids")
