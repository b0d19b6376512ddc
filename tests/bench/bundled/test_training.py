"""The model is transformers', steps learn, and an interrupted run goes on as it would
have.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.bundled import checkpoint, probe, shards
from bench.bundled import evaluate as evaluation
from bench.bundled.evaluate import circles
from bench.bundled.export import export
from bench.bundled.feed import Feed, Python, read_python
from bench.bundled.model import SHAPES, Model
from bench.bundled.muon import orthogonal
from bench.bundled.packing import LEARNT, Pack
from bench.bundled.prepare import TOKENIZER
from bench.bundled.tasks.tasks import TASKS, Stage
from bench.bundled.train import Run, arguments, losses, rate_at, train
from minfer import LLM, SamplingParams

TINY = SHAPES["tiny"]


class Written:
    """Shards that are made where they are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made = dict[int, Pack]()

    def get(self, number: int) -> Pack:
        if number % 4 not in self._made:
            self._made[number % 4] = shards.make(
                self._tokenizer, 0, number % 4, 1500, Stage.FIRST
            )
        return self._made[number % 4]


@pytest.fixture(scope="module")
def python(data: Path) -> Python:
    return read_python(data, "cpu", limit=8)


@pytest.fixture(scope="module")
def written(tokenizer: Tokenizer) -> Iterator[Written]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH", 20)
        yield Written(tokenizer)


def started(
    python: Python, written: Any, steps: int, teacher: Model | None = None
) -> Run:
    feed = Feed(python, written, 6, 32, "cpu", 0)
    return Run(
        Model(TINY).begin(0), feed, teacher, float(steps), by_steps=True, compiled=False
    )


@pytest.fixture(scope="module")
def trained(
    python: Python, written: Written, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = started(python, written, 6)
    for _ in range(6):
        run.advance()
    folder = tmp_path_factory.mktemp("state")
    checkpoint.save(run.state(), folder, "tiny")
    return folder


def test_a_finished_model_is_trained_once_more(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its weights, with its tokenizer, at the rate and stage that were asked for."""
    export(trained, "tiny", data, tmp_path / "model")
    given = "--role tiny --steps 3 --rows 6 --length 32 --workers 1 --shard 1500"
    more = "--documents 8 --each 1 --device cpu --told 0 --stage last --rate 0.1"
    paths = f"--data {data} --begin {tmp_path / 'model'} --state {tmp_path / 'state'}"
    run = train(arguments([*given.split(), *more.split(), *paths.split()]))
    before = Model(TINY).load(tmp_path / "model").state_dict()
    apart = [
        (one - before[name]).abs().max().item()
        for name, one in run.model.state_dict().items()
    ]
    assert 0 < max(apart) < 0.03
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["saved"]


def test_each_source_has_a_row(python: Python, written: Any) -> None:
    with pytest.raises(ValueError, match="5 rows, of 6 sources"):
        Feed(python, written, 5, 32, "cpu", 0)


def test_it_learns(python: Python, written: Written) -> None:
    run = started(python, written, 30)
    first = run.advance()
    for _ in range(9):
        last = run.advance()
    before, after = (float(text.sum() / count.sum()) for text, count in (first, last))
    assert after < before - 0.5


def test_an_interrupted_run_goes_on_as_it_would_have(
    python: Python, written: Written, tmp_path: Path
) -> None:
    whole = started(python, written, 8)
    for _ in range(8):
        whole.advance()
    first = started(python, written, 8)
    for _ in range(3):
        first.advance()
    checkpoint.save(first.state(), tmp_path, "tiny")
    state = checkpoint.load(tmp_path, "tiny")
    assert state is not None
    second = started(python, written, 8)
    second.restore(state)
    for _ in range(5):
        second.advance()
    assert second.step == 8
    for one, other in zip(
        whole.model.parameters(), second.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_checkpoint_comes_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART", 1000)
    state = {"x": torch.arange(3000)}
    assert len(checkpoint.save(state, tmp_path, "a")) > 20
    assert torch.equal((checkpoint.load(tmp_path, "a") or {})["x"], state["x"])
    assert checkpoint.load(tmp_path, "b") is None


def test_a_draft_comes_nearer_to_its_target(python: Python, written: Written) -> None:
    teacher = Model(TINY).begin(5).eval().requires_grad_(False)
    run = started(python, written, 30, teacher)
    batch = run.feed.batch(0)
    before = losses(run.model, teacher, batch)[0].item()
    for _ in range(8):
        run.advance()
    assert losses(run.model, teacher, batch)[0].item() < before


def test_what_is_not_learnt_has_no_loss() -> None:
    batch = torch.randint(0, 4096, (2, 9), dtype=torch.int32)
    batch[1, 4] |= LEARNT
    _, text, count = losses(Model(TINY).begin(0), None, batch)
    assert count.tolist() == [0, 1]
    assert text[0] == 0
    assert text[1] > 0


def test_it_can_be_compiled_whole() -> None:
    model, teacher = Model(TINY).begin(0), Model(TINY).begin(1)
    batch = torch.randint(0, 4096, (2, 9), dtype=torch.int32) | LEARNT
    compiled = torch.compile(losses, dynamic=False, backend="eager", fullgraph=True)
    assert torch.allclose(
        compiled(model, teacher, batch)[0], losses(model, teacher, batch)[0]
    )


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate_at(share) for share in (0, 0.005, 0.01, 0.5, 0.75, 1, 1.1)]
    assert rates == [0, 0.5, 1, 1, 0.5, 0, 0]


@pytest.mark.parametrize("shape", [(2, 64, 64), (1, 32, 128), (1, 128, 32)])
def test_matrices_become_orthogonal(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(
        orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    )
    assert values.max() < 1.3
    assert (values > 0.5).float().mean() > 0.95  # the smallest take more rounds


def test_a_folder_is_a_checkpoint_of_qwen3(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    export(trained, "tiny", data, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    own = Model(TINY)
    own.load_state_dict(
        {
            name: one
            for name, one in theirs.state_dict().items()
            if name != "lm_head.weight"
        }
    )
    ids = torch.randint(0, 4096, (2, 40))
    assert torch.allclose(own(ids), theirs(ids).logits, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode("12 + 3")) == "12 + 3"


def test_minfer_serves_it(trained: Path, data: Path, tmp_path: Path) -> None:
    export(trained, "tiny", data, tmp_path)
    with LLM(str(tmp_path)) as llm:
        (found,) = llm.chat(
            [{"role": "user", "content": "Hi"}],
            SamplingParams(temperature=0, max_tokens=4),
        )
    assert len(found.outputs[0].token_ids) <= 4


def test_it_is_evaluated(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: TASKS[name] for name in ("sum", "talk", "tool call")}
    for name, value in {
        "TASKS": few,
        "TOKENS": 3,
        "CIRCLES": 3,
        "OPENINGS": ("def ",),
    }.items():
        monkeypatch.setattr(evaluation, name, value)
    export(trained, "tiny", data, tmp_path)
    found = evaluation.evaluate(str(tmp_path), 2, 0)
    assert set(found["right"]) == set(few)
    assert set(found["right"].values()) <= {0.0, 0.5, 1.0}
    assert json.dumps(found)


def test_a_probe_knows_what_is_right(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LENGTH", 120)  # which leaves most calls of tools out
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    problems = probe.sheet(tokenizer, "cpu", each=1)

    class Knowing(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            follows = torch.nn.functional.pad(ids[:, 1:], (0, 1))
            return torch.nn.functional.one_hot(follows.long(), 4096).float()

    assert set(probe.exact(Knowing(), problems).values()) == {1.0}
    assert set(probe.exact(Model(TINY).begin(0), problems).values()) == {0.0}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([*range(100)], False),
        ([1, 2] * 30, True),
        ([*range(9), *[7] * 30], True),
        ([*range(40)] * 2, False),
        ([*range(30)] * 4, True),
        ([3] * 12, False),
    ],
)
def test_circles(tokens: list[int], expected: bool) -> None:
    assert circles(tokens) is expected
