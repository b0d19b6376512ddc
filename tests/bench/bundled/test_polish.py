"""What a model gets wrong is found, and it learns from that."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench.bundled import checkpoint, evaluate, polish, shards
from bench.bundled.export import export
from bench.bundled.feed import Python, read_python
from bench.bundled.model import SHAPES, WEIGHTS, Model
from bench.bundled.packing import END_ID, HEAVY, LEARNT
from bench.bundled.tasks.tasks import Stage, any_problem


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        (range(100), None),
        ([1, 2, *[7] * 12], None),
        ([1, 2, *[7] * 13, 3], 15),
        ([9, *[*range(20, 30)] * 3, 4], 31),
        ([9, *[*range(20, 30)] * 2, *range(20, 29), 4], None),
        ([*[*range(evaluate.PERIOD + 1)] * 3], None),
    ],
)
def test_a_circle_ends_when_it_has_been_said_often_enough(
    tokens: Sequence[int], end: int | None
) -> None:
    assert polish.circle_ends(list(tokens)) == end


def test_what_ends_there_is_no_circle_to_who_judges() -> None:
    rng = Random(3)
    for period in range(1, evaluate.PERIOD + 1):
        loop = [rng.randrange(4096) for _ in range(period)]
        endless = [*(rng.randrange(4096) for _ in range(30)), *loop * 40]
        assert evaluate.circles(endless)
        end = polish.circle_ends(endless)
        assert end is not None
        assert not evaluate.circles(endless[:end])


def test_of_a_circle_only_its_end_is_learnt() -> None:
    (tokens,) = polish._ended([[5, 6, 5, 6]])
    assert tokens.tolist() == [5, 6, 5, 6, END_ID | LEARNT | HEAVY]


def test_answers_are_corrected(tokenizer: Tokenizer) -> None:
    del tokenizer
    rng = Random(1)
    problems = [any_problem(rng, Stage.LAST) for _ in range(60)]
    made = polish._corrected(problems, rng)
    assert len(made) == 60
    assert sum("<think>" in one.text() for one in made) > 3
    for problem, dialogue in zip(problems, made, strict=True):
        assert dialogue.messages[-1]["content"] == problem.answer
        assert list(dialogue.tools) == list(problem.tools)


@pytest.fixture(scope="module")
def python(data: Path) -> Python:
    return read_python(data, "cpu", limit=8)


def test_openings_are_none_that_are_judged(python: Python, tokenizer: Tokenizer) -> None:
    found = polish.openings(python, tokenizer, Random(0))
    judged = set(evaluate.OPENINGS)
    assert len(found) == polish.OPENINGS
    assert all(polish.SHORTEST <= len(one) <= polish.LONGEST for one in found)
    assert not judged & {tokenizer.decode(one) for one in found}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("PROBLEMS", 6),
        ("OPENINGS", 4),
        ("WRITTEN", 40),
        ("TALK", 1500),
        ("LENGTH", 64),
    ):
        monkeypatch.setattr(polish, name, value)
    monkeypatch.setattr(shards, "BATCH", 20)


@pytest.mark.usefixtures("small")
def test_rounds_change_weights_and_nothing_else(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": Model(SHAPES["tiny"]).begin(0).state_dict()}
    checkpoint.save(state, tmp_path, "tiny")
    export(tmp_path, "tiny", data, tmp_path / "models" / "tiny")
    how: dict[str, Any] = {"role": "tiny", "data": data, "rounds": 2, "rate": 0.5}
    polish.polish(
        Namespace(
            models=tmp_path / "models",
            out=tmp_path / "out",
            minutes=0.01,
            seed=3,
            documents=8,
            each=1,
            device="cpu",
            share=0.3,
            shards=1,
            compiled=False,
            **how,
        )
    )
    before, after = tmp_path / "models" / "tiny", tmp_path / "out" / "tiny"
    for path in before.iterdir():
        same = path.read_bytes() == (after / path.name).read_bytes()
        assert same == (path.name != WEIGHTS)
    first, last = (load_file(folder / WEIGHTS) for folder in (before, after))
    assert {name: one.dtype for name, one in first.items()} == {
        name: one.dtype for name, one in last.items()
    }
    changed = [name for name in first if not torch.equal(first[name], last[name])]
    assert len(changed) > len(first) / 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["round"] for line in lines[1:]] == [0, 1]
    assert lines[1]["wrong"]["answers"] > 3  # it never learnt anything
    assert lines[1]["steps"] > 0
