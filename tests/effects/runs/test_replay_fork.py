"""Forks as a user has them, and what they refuse."""

from pathlib import Path

import pytest
from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.effects.live.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import write_cost
from minfer.messages import Preempted
from minfer.request import Request
from minfer.runs.simulate import Simulated, Simulation
from tests.core.runs.test_fork import CONFIG, COST, recorded
from tests.effects.runs.replays import found, said
from tests.effects.runs.replays import run as run


def test_forks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, saved = tmp_path / "cost.json", tmp_path / "fork.journal"
    write_cost(cost, COST, {})
    figures = found(capsys, run, "--num-blocks", 60, "--cost", cost, "--save", saved)
    assert figures["unchanged"] == figures["recorded"]
    assert figures["changed"]["preemptions"] < figures["recorded"]["preemptions"]
    assert list(read_journal(saved).turns())
    _, turns = recorded(1)
    at, who = next(
        (turn.number, reason.id)
        for turn in turns
        for reason in turn.transition.reasons
        if isinstance(reason, Preempted)
        and len(turn.before.running) > 2
        and (reason.id, reason.sample) in turn.before.running.ids
    )
    saved.unlink()
    text = said(capsys, run, "--at", at, "--spare", who, "--cost", cost, "--save", saved)
    assert "Exact: turns before the fork" in text
    assert "Modelled: durations of steps (a test's)" in text
    assert next(read_journal(saved).turns()).number == at + 1
    half = len(turns) // 2
    text = said(
        capsys, run, "--at", half, "--policy", "shortest:pace=0.1", "--cost", cost
    )
    assert "Handed over to a new engine" in text
    assert "fit" in said(capsys, run, "--policy", "fair")


def test_who_is_resumed_with_tokens_has_had_its_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a` writes as the run is forked, `b` waits for it, and `c` comes, who then is too
    large.
    """
    come = [
        (0.0, Request(id="a", prompt=(1,) * 4, max_tokens=40)),
        (0.0, Request(id="b", prompt=(2,) * 4, max_tokens=1)),
        (0.4, Request(id="c", prompt=(3,) * 60, max_tokens=1)),
    ]
    config, path, cost = (
        evolve(CONFIG, max_num_seqs=1),
        tmp_path / "run",
        tmp_path / "cost.json",
    )
    turns = list(Simulation(config, Simulated(), COST, come).turns())
    write_journal(path, config, turns)
    write_cost(cost, COST, {})
    at = next(turn.number for turn in turns if turn.transition.state.time > 0.2)
    options = "--at", at, "--num-blocks", 12, "--cost", cost
    changed = found(capsys, path, *options)["changed"]
    assert changed["ended"] == {"length": 2, "rejected": 1}
    assert changed["ttft"]["p50"] == changed["ttft"]["p99"] > 0.4  # of b, who came at 0
    assert 0.01 < changed["itl"]["p99"] < 0.1  # of a: its KV is computed anew
    assert changed["tpot"]["p99"] is None
    assert changed["e2e"]["p99"] == changed["ttft"]["p99"]
    lines = said(capsys, path, *options).splitlines()
    assert next(line.split() for line in lines if "refused" in line) == [
        "refused",
        "0",
        "0",
        "1",
    ]


def test_of_fewer_blocks_as_large_a_share_is_left_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(
        executor="dry", num_gpu_blocks_override=300, journal=tmp_path / "runs"
    ) as llm:
        assert llm.setup.config.watermark == 3
        llm.generate(["a b"] * 8, SamplingParams(max_tokens=60), use_tqdm=False)
    cost, saved = tmp_path / "cost.json", tmp_path / "few.journal"
    write_cost(cost, COST, {})
    found(capsys, tmp_path / "runs", "--num-blocks", 3, "--cost", cost, "--save", saved)
    assert read_journal(saved).config.watermark == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--policy", "mine"), "scheduling_policy must be one of"),
        (("--num-blocks", "0"), "num_blocks must be"),
        (("--without", "x"), "no request 'x' arrives"),
        (("--spare", "x", "--at", "3"), "not preempted in turn 3"),
        (("--policy", "fair", "--cost", "none.json"), "none.json"),
        (("--at", "3", "--spare", "x", "--policy", "fair"), "--spare changes one turn"),
        (("--save", "x"), "--save is of a fork; leave it out"),
        (("--cost", "x", "--at", "3"), "--cost is of a fork"),
        (("--until", "9", "--at", "3"), "--until is of a replay of all turns before it"),
        (("--until", "9", "--policy", "fair"), "--until is of a replay"),
    ],
)
def test_what_cannot_be_changed_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], why: str
) -> None:
    assert why in said(capsys, run, *options, code=2)


def test_a_run_too_short_to_fit_is_forked_with_the_built_in_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(executor="dry", journal=tmp_path, max_num_seqs=4) as llm:
        llm.generate(["a"], SamplingParams(max_tokens=9))
    assert "(built in)" in said(capsys, tmp_path, "--num-blocks", "10")
