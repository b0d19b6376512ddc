"""Prompts: of the lengths that were asked for, the same for the same number, or those of
a file.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.runs.load.load_prompts import (
    FIRST_ID,
    Prompts,
    RandomPrompts,
    read_prompts,
)
from minfer.effects.runs.load.request_record import LoadError


def fields(prompts: Prompts, number: int) -> Any:
    return json.loads(b"{" + prompts.prompt(number).field + b"}")


def test_random_prompts_have_their_lengths_and_ids() -> None:
    made = RandomPrompts(200, 50, vocab_size=300)
    first, second = (fields(made, number)["prompt"] for number in range(2))
    assert len(first) == len(second) == 200
    assert first[:10] != second[:10]
    assert min(first) >= FIRST_ID
    assert max(first) < 300
    assert len(set(first)) > 100
    assert made.prompt(0).max_tokens == 50


def test_a_prompt_is_a_function_of_seed_and_number() -> None:
    made = RandomPrompts(20, 5, seed="3")
    assert made.prompt(7) == RandomPrompts(20, 5, seed="3").prompt(7)
    others = [made.prompt(-1), made.prompt(8), RandomPrompts(20, 5, seed="4").prompt(7)]
    assert made.prompt(7) not in others


def test_lengths_vary_within_their_ratio() -> None:
    made = RandomPrompts(100, 10, range_ratio=0.5)
    lengths = {len(fields(made, number)["prompt"]) for number in range(300)}
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert {made.prompt(number).max_tokens for number in range(300)} == set(range(5, 16))


def test_a_chats_prompt_is_words() -> None:
    (message,) = fields(RandomPrompts(30, 5, chat=True), 0)["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 30


@pytest.mark.parametrize("size", [17, 20])
def test_small_vocabularies_are_kept_to(size: int) -> None:
    drawn = set(fields(RandomPrompts(500, 1, vocab_size=size), 0)["prompt"])
    assert drawn == set(range(FIRST_ID, size))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts"
    path.write_text(text, "utf-8")
    return path


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    text = '{"prompt": "hé"}\n\n{"prompt": [1, 2], "output_tokens": 3}\n'
    made = read_prompts(written(tmp_path, text), 9, chat=False)
    assert len(made.prompts) == 2
    assert [fields(made, number)["prompt"] for number in range(3)] == ["hé", [1, 2], "hé"]
    assert [made.prompt(number).max_tokens for number in range(2)] == [9, 3]


def test_a_file_of_chats(tmp_path: Path) -> None:
    message = {"role": "user", "content": "x"}
    lines = [{"messages": [message, message]}, {"prompt": "x", "max_tokens": 4}]
    text = "\n".join(map(json.dumps, lines))
    made = read_prompts(written(tmp_path, text), 9, chat=True)
    assert fields(made, 0) == {"messages": [message, message]}
    assert fields(made, 1) == {"messages": [message]}
    assert made.prompt(1).max_tokens == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no prompts in it"),
        ('{"prompt": "a"}\n{no', "line 2: "),
        ("[1]", "line 1: it must be an object with a prompt"),
        ('{"text": "a"}', "line 1: it must be an object with a prompt"),
        ('{"prompt": ""}', "line 1: it must be"),
        ('{"prompt": [true]}', "line 1: it must be"),
        ('{"messages": [{}]}', "line 1: it must be an object with a prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens must be"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        read_prompts(written(tmp_path, text), 9, chat=False)


def test_what_no_chat_can_send_and_what_cannot_be_read(tmp_path: Path) -> None:
    for text in ('{"prompt": [1]}', '{"messages": [1]}', '{"messages": []}'):
        with pytest.raises(LoadError, match="or messages"):
            read_prompts(written(tmp_path, text), 9, chat=True)
    with pytest.raises(LoadError, match=r"--dataset-path .*: No such file"):
        read_prompts(tmp_path / "nowhere", 9, chat=False)
    (tmp_path / "prompts").write_bytes(b"\xff")
    with pytest.raises(LoadError, match="not UTF-8"):
        read_prompts(tmp_path / "prompts", 9, chat=False)
