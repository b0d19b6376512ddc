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
    made = make(tmp_path, seed)
    check_tokenizer(made.folder, made.plain)
    if made.refused is None:
        check_model(made)
        return
    with pytest.raises(CheckpointError, match=made.refused):
        LLM(model=str(made.folder), dtype="float32")


def check_tokenizer(folder: Path, plain: Path) -> None:
    """Ids, texts, special tokens and prompts are transformers'."""
    ours = Tokenizer(folder)
    try:
        theirs = AutoTokenizer.from_pretrained(plain)
    except TypeError:  # null for a flag, which minfer takes for nothing
        return
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        for special in (True, False):
            ids = encoded(theirs, text, special)
            if ids is None:
                continue
            assert ours.encode(text, add_special_tokens=special) == ids, text
            found = ours.decode(ids, skip_special_tokens=special)
            assert found == theirs.decode(ids, skip_special_tokens=special)
    for tools in (None, list(TOOLS), []):
        assert rendered(ours, tools) == their_prompt(theirs, tools)


def encoded(theirs: Any, text: str, special: bool) -> list[int] | None:
    """Their token ids; None for a text that they cannot encode."""
    try:
        ids: list[int] = theirs.encode(text, add_special_tokens=special)
    except Exception as error:  # the library raises no other
        assert "not found in the vocabulary" in str(error)  # noqa: PT017
        return None
    return ids


def rendered(ours: Tokenizer, tools: Any) -> str | None:
    try:
        return render_chat(ours, TALK, {"tools": tools})
    except ChatTemplateError:
        return None


def their_prompt(theirs: Any, tools: Any) -> str | None:
    try:
        text: str = theirs.apply_chat_template(
            TALK, tokenize=False, tools=tools, add_generation_prompt=True
        )
    except ValueError:  # no template, or none that is the default
        return None
    return text


def check_model(made: Made) -> None:
    """Greedy tokens are those of transformers' `generate`."""
    theirs: Any = AutoModelForCausalLM.from_pretrained(made.plain, dtype=torch.float32)
    prompts = [[5, 300, 12, 77, 300], [1, 2, 3]]
    with LLM(model=str(made.folder), dtype="float32", max_num_seqs=2) as llm:
        params = llm.setup.default_sampling_params(temperature=0, max_tokens=LENGTH)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        assert llm.tokenizer is not None
        ends = llm.tokenizer.eos_ids  # more than theirs: `compare.differences` says why
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            found = theirs.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH
            )
        wanted = found[0, len(ids) :].tolist()
        assert set(listed(theirs.generation_config.eos_token_id)) <= set(ends)
        assert until(output.outputs[0].token_ids, ends) == until(wanted, ends), made.form


def listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


def until(tokens: Iterable[int], ends: Container[int]) -> list[int]:
    """Tokens before the first that ends them."""
    return [*takewhile(lambda token: token not in ends, tokens)]
