"""`minfer replay` as a user has it: findings, states, forks, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from attrs import evolve

from minfer import LLM, SamplingParams, consult
from minfer.effects.cli.main import main
from minfer.effects.live.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import write_cost
from minfer.messages import Preempted
from minfer.request import Request
from minfer.runs.simulate import Simulated, Simulation
from tests.core.changed import CHANGES
from tests.core.runs.test_fork import CONFIG, COST, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    journal, _ = recorded(1)
    path = tmp_path_factory.mktemp("runs") / "run.journal"
    write_journal(
        path, journal.config, journal.turns(), {"model": "none", "device": "paper"}
    )
    return path


def found(capsys: pytest.CaptureFixture[str], *options: object, code: int = 0) -> Any:
    assert main(["replay", *map(str, options), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *options: object, code: int = 0) -> str:
    assert main(["replay", *map(str, options)]) == code
    out = capsys.readouterr()
    return out.err if code == 2 else out.out


def test_a_replay_verifies_and_sums_up(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, turns = recorded(1)
    list(journal.turns())
    figures = found(capsys, run)
    assert figures["turns"] == len(turns)
    assert figures["digest"] == journal.digest.hex()
    assert figures["divergence"] is None
    assert figures["state_digests"] == 1
    assert figures["closed"]
    text = said(capsys, run)
    assert "none on paper" in text
    assert f"{len(turns)} turns" in text
    assert f"digest {journal.digest.hex()}" in text
    assert "the engine was closed" in text
    assert found(capsys, run, "--until", 10)["turns"] == 10


def test_another_process_needs_no_torch_and_finds_the_same(run: Path) -> None:
    code = (
        "import sys; from minfer.effects.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "replay", str(run), "--json"]
    seen = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        )
        seen.add(json.loads(done.stdout)["digest"])
    journal, _ = recorded(1)
    list(journal.turns())
    assert seen == {journal.digest.hex()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "newest first among equals",
            "  then admitted '0' sample 1, '1', now '1', '0' sample 1",
        ),
        ("budget one less", "  step 29: input tokens: then 14 for '3', now 13 for '3'"),
        ("another victim", "  then preempted '14' for itself, now '13' for '14'"),
    ],
)
def test_a_changed_scheduler_is_found_out_in_words(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
    words: str,
) -> None:
    """Who, what then and what now; the turn, the field, and what its columns are."""
    CHANGES[change](monkeypatch)
    where = found(capsys, run, code=1)["divergence"]
    assert words.strip() in [one["words"] for one in where["differences"]]
    assert where["expected"] != where["found"]
    lines = said(capsys, run, code=1).splitlines()
    begin = (
        f"DIVERGED   in turn {where['turn']} (step {where['step']}, "
        f"{where['time']:.6f} s); "
    )
    at = next(i for i, line in enumerate(lines) if line.startswith(begin))
    assert words in lines[at + 1 :]
    assert f"  field    {where['field']}" in lines
    assert f"  columns  {where['legend']}" in lines
    assert lines[-2] == f"  then     {json.dumps(where['expected'])}"
    assert lines[-1] == f"  now      {json.dumps(where['found'])}"
    assert found(capsys, run, "--until", where["turn"])["divergence"] is None


class BrokenError(Exception):
    pass


def breaks(*_: object) -> NoReturn:
    """What a changed scheduler may do; it is asked when blocks run out."""
    raise BrokenError("no victim today")


def test_an_engine_that_raises_is_told_with_its_turn_and_a_code_of_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, turns = recorded(1)
    at = next(
        turn.number
        for turn in turns
        if any(isinstance(why, Preempted) for why in turn.transition.reasons)
    )
    monkeypatch.setattr(consult, "victim", breaks)
    figures = found(capsys, run, code=3)
    told = "BrokenError: no victim today"
    assert (figures["raised"]["turn"], figures["raised"]["error"]) == (at, told)
    assert figures["turns"] == at
    assert figures["divergence"] is None
    lines = said(capsys, run, code=3).splitlines()
    assert lines[-2] == f"RAISED     turn {at}: the engine raised {told}"
    assert re.fullmatch(r"  in       test_replay\.py:\d+, in breaks", lines[-1])


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "14"),
        ("view", "-o", "page.html"),
        ("simulate",),
        ("replay", "--at", "160"),
        ("replay", "--num-blocks", "20"),
    ],
)
def test_whoever_runs_an_engine_that_raises_is_told_in_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(consult, "victim", breaks)
    assert main([command[0], str(run), *command[1:]]) == 3
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "minfer: " in one]
    assert re.search(
        r"minfer: turn \d+: the engine raised BrokenError: no victim today \(", line
    )


def test_the_help_says_what_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for said_of in (
        "0 every decision",
        "1 one is not",
        "2 the arguments",
        "3 the engine raised",
    ):
        assert said_of in text


def test_a_state_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, turns = recorded(1)
    state = turns[40].before
    text = said(capsys, run, "--at", 40)
    assert f"{len(state.running)} sequences, in rank order" in text
    assert f"before turn 40, at {state.time:.6f} s" in text
    whole = found(capsys, run, "--at", 40)
    assert whole["is"] == "EngineState"
    assert whole["next_step"] == state.next_step
    assert "there is no turn 9999" in said(capsys, run, "--at", 9999, code=2)
    assert journal.config


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


def test_a_torn_or_broken_file_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = run.read_bytes(), tmp_path / "x.journal"
    path.write_bytes(data[:-70])
    figures = found(capsys, path)
    assert figures["divergence"] is None
    assert "cut off" in figures["torn"][0]
    assert "stops while the engine ran" in said(capsys, path)
    path.write_bytes(data[:2000] + b"????" + data[2004:])
    error = said(capsys, path, code=2)
    assert "is damaged" in error
    whole = int(error.split()[-1])
    assert error.endswith(f"turns before it are whole: minfer replay --until {whole}\n")
    assert found(capsys, path, "--until", whole)["turns"] == whole > 0
    assert "no such file" in said(capsys, tmp_path / "none", code=2)
