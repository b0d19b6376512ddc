"""Generated checkpoints, flags x files x forms, against transformers on the same files:
token ids, prompts with and without tools, text, and greedy tokens.
"""

import json
from collections.abc import Container, Iterable
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minfer import LLM
from minfer.effects.cli.verify.passages import TOOLS
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.text.chat_templates import ChatTemplateError, render_chat
from minfer.effects.text.tokenizer import Tokenizer
from tests.circles import claimed, long
from tests.effects.checkpoints.models_made import TYPES, Made, make
from tests.effects.checkpoints.tokenizers_made import write_tokenizer

TEXTS: Final = (
    "",
    "ab a  b.c",
    "a <s>b </s> c",
    "x<|im_end|> y <think>z</think>",
    "cafe\u0301 日本 aé ▁b b",
    "<|im_start|>user\nhi 123 don't <tool>x",
    "  <unk> <image> <|endoftext|>",
)
TALK: Final = [{"role": "user", "content": "hi  aé"}]
LENGTH: Final = 8


KINDS: Final = (*TYPES, "gemma", "phi3", "olmo", "gpt2", "cohere")


@pytest.mark.parametrize("seed", [*range(8), *claimed(range(8, 1000))])
def test_a_tokenizer_is_read_as_by_transformers(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": draw.choice(KINDS)}))
    write_tokenizer(tmp_path, draw)
    check_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("seed", [*long(range(36)), *claimed(range(36, 640))])
def test_a_checkpoint_is_read_as_by_transformers(tmp_path: Path, seed: int) -> None:
    checkpoint = make(tmp_path, seed)
    check_tokenizer(checkpoint.folder, checkpoint.plain)
    if checkpoint.refused is None:
        check_model(checkpoint)
        return
    with pytest.raises(CheckpointError, match=checkpoint.refused):
        LLM(model=str(checkpoint.folder), dtype="float32")


def check_tokenizer(folder: Path, plain: Path) -> None:
    """Ids, texts, special tokens and prompts are transformers'."""
    tokenizer = Tokenizer(folder)
    try:
        reference = AutoTokenizer.from_pretrained(plain)
    except TypeError:  # null for a flag, which minfer takes for nothing
        return
    assert tokenizer.special_tokens == reference.special_tokens_map
    for text in TEXTS:
        for special in (True, False):
            ids = encoded(reference, text, special)
            if ids is None:
                continue
            assert tokenizer.encode(text, add_special_tokens=special) == ids, text
            text_again = tokenizer.decode(ids, skip_special_tokens=special)
            assert text_again == reference.decode(ids, skip_special_tokens=special)
    for tools in (None, list(TOOLS), []):
        assert rendered(tokenizer, tools) == their_prompt(reference, tools)


def encoded(reference: Any, text: str, special: bool) -> list[int] | None:
    """Their token ids; None for a text that they cannot encode."""
    try:
        ids: list[int] = reference.encode(text, add_special_tokens=special)
    except Exception as error:  # the library raises no other
        assert "not found in the vocabulary" in str(error)  # noqa: PT017
        return None
    return ids


def rendered(tokenizer: Tokenizer, tools: Any) -> str | None:
    try:
        return render_chat(tokenizer, TALK, {"tools": tools})
    except ChatTemplateError:
        return None


def their_prompt(reference: Any, tools: Any) -> str | None:
    try:
        text: str = reference.apply_chat_template(
            TALK, tokenize=False, tools=tools, add_generation_prompt=True
        )
    except ValueError:  # no template, or none that is the default
        return None
    return text


def check_model(checkpoint: Made) -> None:
    """Greedy tokens are those of transformers' `generate`."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.plain, dtype=torch.float32
    )
    prompts = [[5, 300, 12, 77, 300], [1, 2, 3]]
    with LLM(model=str(checkpoint.folder), dtype="float32", max_num_seqs=2) as llm:
        params = llm.setup.default_sampling_params(temperature=0, max_tokens=LENGTH)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        assert llm.tokenizer is not None
        ends = llm.tokenizer.eos_ids  # more than theirs: `compare.differences` says why
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            output_ids = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH
            )
        expected = output_ids[0, len(ids) :].tolist()
        assert set(listed(model.generation_config.eos_token_id)) <= set(ends)
        assert until(output.outputs[0].token_ids, ends) == until(expected, ends), (
            checkpoint.form
        )


def listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


def until(tokens: Iterable[int], ends: Container[int]) -> list[int]:
    """Tokens before the first that ends them."""
    return [*takewhile(lambda token: token not in ends, tokens)]
