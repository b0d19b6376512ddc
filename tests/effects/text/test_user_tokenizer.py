"""The tokenizer that users get, against transformers'."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from minfer import LLM, AsyncLLM, ConfigError
from minfer.effects.text.tokenizer import TextTooLongError, Tokenizer
from minfer.effects.text.user_tokenizer import UserTokenizer
from tests.effects.text.test_chat_templates import CHAT, TEMPLATE
from tests.effects.text.trained import TEXTS, save

TOOLS = [{"type": "function", "function": {"name": "f"}}]
ATTRIBUTES = (
    "chat_template",
    "bos_token",
    "bos_token_id",
    "eos_token",
    "eos_token_id",
)


def both(folder: Path) -> tuple[UserTokenizer, Any]:
    save(folder, chat_template=TEMPLATE)
    return UserTokenizer(Tokenizer(folder)), AutoTokenizer.from_pretrained(folder)


def test_texts_and_attributes_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer, reference = both(tmp_path)
    for name in ATTRIBUTES:
        assert getattr(tokenizer, name) == getattr(reference, name)
    for text in TEXTS:
        ids = reference.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, False) == reference.encode(
            text, add_special_tokens=False
        )
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )
        assert tokenizer.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(
            ids
        )
    assert tokenizer.decode(reference.eos_token_id) == "<|end|>"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tools": TOOLS, "add_generation_prompt": True, "flavour": "sweet"},
        {"padding": False, "return_tensors": None, "return_dict": False},
    ],
)
def test_conversations_are_those_of_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    tokenizer, reference = both(tmp_path)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, **options)
    assert text == reference.apply_chat_template(CHAT, tokenize=False, **options)
    ids = tokenizer.apply_chat_template(CHAT, **options)
    assert ids == reference.apply_chat_template(CHAT, **{**options, "return_dict": False})


def test_arguments_that_it_lacks_are_named(tmp_path: Path) -> None:
    tokenizer, _ = both(tmp_path)
    arguments: dict[str, Any]
    for arguments in (
        {"return_tensors": "pt"},
        {"return_dict": True},
        {"chat_template": "x"},
    ):
        with pytest.raises(TypeError, match=f"{min(arguments)} is not supported"):
            tokenizer.apply_chat_template(CHAT, **arguments)


def test_a_text_may_be_longer_than_the_context() -> None:
    with LLM(executor="oracle", max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        long = "word " * 1_000
        assert llm.tokenizer is not None
        with pytest.raises(TextTooLongError):
            llm.tokenizer.encode(long)
        assert tokenizer.decode(tokenizer.encode(long)) == long
        messages = [{"role": "user", "content": "hi"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert ids == llm.render(messages)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_both_have_one_unless_they_run_without(kind: type[LLM | AsyncLLM]) -> None:
    llm = kind(executor="oracle")
    try:
        assert llm.get_tokenizer().encode("x")
        llm.tokenizer = None
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
    finally:
        llm.close()
