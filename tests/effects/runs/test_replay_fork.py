"""Forks as a user has them, and what they refuse."""

from pathlib import Path

import pytest
from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import write_cost
from minfer.records.messages import Preempted
from minfer.records.request import Request
from minfer.simulation.simulate import Simulated, Simulation
from tests.core.simulation.drafted import by_device, by_host
from tests.core.simulation.test_fork import CONFIG, COST, recorded
from tests.effects.runs.replays import printed, reported
from tests.effects.runs.replays import run as run


def test_forks(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, saved = tmp_path / "cost.json", tmp_path / "fork.journal"
    write_cost(cost, COST, {})
    figures = reported(capsys, run, "--num-blocks", 60, "--cost", cost, "--save", saved)
    assert figures["unchanged"] == figures["recorded"]
    assert figures["changed"]["preemptions"] < figures["recorded"]["preemptions"]
    assert list(read_journal(saved).turns())
    _, turns = recorded(1)
    number, name = next(
        (turn.number, reason.id)
        for turn in turns
        for reason in turn.transition.reasons
        if isinstance(reason, Preempted)
        and len(turn.before.running) > 2
        and (reason.id, reason.sample) in turn.before.running.ids
    )
    saved.unlink()
    text = printed(
        capsys, run, "--at", number, "--spare", name, "--cost", cost, "--save", saved
    )
    assert "Exact: turns before the fork" in text
    assert "Modelled: durations of steps (a test's)" in text
    assert next(read_journal(saved).turns()).number == number + 1
    half = len(turns) // 2
    text = printed(
        *(capsys, run, "--at", half, "--cost", cost),
        *("--scheduling-policy", "shortest:pace=0.1"),
    )
    assert "Handed over to a new engine" in text
    assert "fit" in printed(capsys, run, "--scheduling-policy", "fair")


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
    number = next(turn.number for turn in turns if turn.transition.state.time > 0.2)
    options = "--at", number, "--num-blocks", 12, "--cost", cost
    changed = reported(capsys, path, *options)["changed"]
    assert changed["ended"] == {"length": 2, "rejected": 1}
    assert changed["ttft"]["p50"] == changed["ttft"]["p99"] > 0.4  # of b, who came at 0
    assert 0.01 < changed["itl"]["p99"] < 0.1  # of a: its KV is computed anew
    assert changed["tpot"]["p99"] is None
    assert changed["e2e"]["p99"] == changed["ttft"]["p99"]
    lines = printed(capsys, path, *options).splitlines()
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
    reported(
        capsys, tmp_path / "runs", "--num-blocks", 3, "--cost", cost, "--save", saved
    )
    assert read_journal(saved).config.watermark == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheduling-policy", "mine"), "scheduling_policy must be one of"),
        (("--num-blocks", "0"), "num_blocks must be"),
        (("--without", "x"), "no request 'x' arrives"),
        (("--spare", "x", "--at", "3"), "not preempted in turn 3"),
        (("--scheduling-policy", "fair", "--cost", "none.json"), "none.json"),
        (
            ("--at", "3", "--spare", "x", "--scheduling-policy", "fair"),
            "--spare changes one turn",
        ),
        (("--speculative-method", "ngram"), "needs --num-speculative-tokens"),
        (("--num-speculative-tokens", "65"), "drafts must be at most 64"),
        (("--draft-cost", "1"), "--draft-cost is of a fork; leave it out"),
        (("--at", "3", "--spare", "x", "--acceptance-rate", "1"), "--spare changes one"),
        (("--save", "x"), "--save is of a fork; leave it out"),
        (("--cost", "x", "--at", "3"), "--cost is of a fork"),
        (("--until", "9", "--at", "3"), "--until is of a replay of all turns before it"),
        (("--until", "9", "--scheduling-policy", "fair"), "--until is of a replay"),
    ],
)
def test_what_cannot_be_changed_is_reported(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert message in printed(capsys, run, *options, code=2)


def test_a_run_too_short_to_fit_is_forked_with_the_built_in_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(executor="dry", journal=tmp_path, max_num_seqs=4) as llm:
        llm.generate(["a"], SamplingParams(max_tokens=9))
    assert "(built in)" in printed(capsys, tmp_path, "--num-blocks", "10")


@pytest.fixture(params=[by_device, by_host], ids=["device", "host"])
def drafted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A run with drafts, and what its steps cost."""
    run, path, cost = request.param(), tmp_path / "a.journal", tmp_path / "cost.json"
    write_journal(path, run.config, run.turns)
    write_cost(cost, evolve(COST, decode=((1, 1.0),), mixed=1.0, token=0.0), {})
    return path, cost


def test_forks_with_other_drafts(
    drafted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, cost = drafted
    none, single = (
        reported(capsys, path, "--num-speculative-tokens", n, "--cost", cost)
        for n in (0, 1)
    )
    assert none["unchanged"]["drafted"] == none["recorded"]["drafted"]
    assert none["unchanged"]["tpot"] == none["recorded"]["tpot"]
    assert none["changed"]["drafted"]["rows"] == 0
    assert len(single["changed"]["drafted"]["by_place"]) == 1
    for figures in (none, single):
        assert figures["changed"]["output_tokens"] == none["recorded"]["output_tokens"]
        assert figures["changed"]["tpot"]["p50"] > none["recorded"]["tpot"]["p50"]
    text = printed(capsys, path, "--num-speculative-tokens", 1, "--cost", cost)
    assert "Drafts: exact: those at positions with a recorded result" in text
    sure = reported(capsys, path, "--acceptance-rate", 1, "--cost", cost)
    assert sure["changed"]["drafted"]["rate"] == 1.0


@pytest.mark.long
def test_speculation_is_turned_on_in_a_fork(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--num-speculative-tokens", 3, "--speculative-method", "draft_model")
    cheap = reported(capsys, run, *options, "--acceptance-rate", 0.9)
    dear = reported(capsys, run, *options, "--draft-cost", 9)
    assert cheap["changed"]["drafted"]["accepted"] > 0
    assert cheap["recorded"]["drafted"]["rate"] is None
    assert dear["changed"]["drafted"]["rows"] == 0, "none pays"
    text = printed(capsys, run, *options, "--acceptance-rate", 0.9)
    assert "exact: nothing, as the run had none; modelled" in text
    assert "accepted" in text
    assert "accepted" not in printed(capsys, run, "--scheduling-policy", "fair")
