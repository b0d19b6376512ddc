"""`minfer simulate`: side by side, what a service level needs, fitted costs,
bad input.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import frozen

import minfer
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import Report
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.records.policy import FirstCome, Rank
from minfer.records.request import Request
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
from tests.circles import claimed
from tests.effects.promises import POLICIES, replay

SMALL = "poisson:rate=12,requests=150,prompt=700,output=30,spread=0.7,seed=2"
COST = CostModel(
    name="known",
    decode=((1, 0.004), (2, 0.005), (4, 0.006), (8, 0.009), (16, 0.012)),
    mixed=0.007,
    token=2e-5,
    sequence=1e-4,
    chunk=3e-4,
    context=1e-6,
    attention=2e-9,
)


def reported(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """What the command prints as JSON."""
    assert main(["simulate", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


OWN = """
from __future__ import annotations
from attrs import frozen
from minfer.policies.builtin import Priority
from minfer.records.policy import FirstCome

@frozen
class Longest(FirstCome):
    least: int = 0

    def rank(self, state, request, time):
        return (float(-max(self.least, len(request.prompt))),), state
"""

# --- side by side -----------------------------------------------------------------------


@pytest.mark.long
def test_every_combination_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    results = reported(
        capsys,
        SMALL,
        "--scheduling-policy",
        "fcfs",
        "--scheduling-policy",
        "static:size=4",
        "--max-num-seqs",
        "4,16",
        "--speed",
        "1,3",
    )
    settings = [
        (run["policy"], run["max_num_seqs"], run["speed"]) for run in results["runs"]
    ]
    assert settings == [
        (policy, seqs, speed)
        for policy in ("fcfs", "static:size=4")
        for seqs in (4, 16)
        for speed in (1.0, 3.0)
    ]
    assert {run["samples"] for run in results["runs"]} == {150}
    assert {run["ended"]["length"] for run in results["runs"]} == {150}
    slow, quick = results["runs"][4]["ttft"]["p99"], results["runs"][0]["ttft"]["p99"]
    assert slow > quick  # static batches make others wait


def test_a_run_is_the_engines_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the command are those of the same turns, taken here."""
    result = reported(
        capsys,
        SMALL,
        "--block-size",
        "16",
        "--num-blocks",
        "400",
        "--max-num-seqs",
        "8",
        "--slo-ttft",
        "0.03",
        "--slo-tpot",
        "0.02",
    )["runs"][0]
    trace = read_trace(SMALL)
    config = EngineConfig(
        num_blocks=400,
        block_size=16,
        watermark=4,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        max_model_len=max(trace.sizes),
    )
    report = Report(config, 0.03, 0.02)
    for turn in Simulation(
        config, Simulated(), H200, report.note_arrivals(trace.arrivals(16))
    ).turns():
        report.fold(turn)
    assert result == result | json.loads(json.dumps(report.figures()))
    assert 0 < result["good"] < 1


def test_the_table_shows_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", SMALL, "--num-blocks", "200,4000", "--slo-ttft", "0.1"]) == 0
    *intro, head, first, second, alike = capsys.readouterr().out.splitlines()
    rows = (first, second)
    assert alike.startswith("fcfs num_blocks=200 and fcfs num_blocks=4000 decided alike")
    assert (
        main(["simulate", SMALL, "--scheduling-policy", "fair", "--requests", "9"]) == 0
    )
    assert (
        "no request has a client" in capsys.readouterr().out
    )  # which fair shares are about
    assert intro[:2] == [
        f"150 requests of {SMALL}",
        "what steps cost: a 7B model on one H200, roughly (built in)",
    ]
    assert intro[2].startswith("  the trace does not say; --fit JOURNAL")
    assert intro[3] == (
        "sizes: 200 or 4,000 blocks of 64 tokens, 256 sequences at once, 8,192 tokens a "
        "step; those that no option gives suit a 7B model on one H200"
    )
    assert intro[-1] == (
        "good: the share of answers whose first token came within 0.1 s; "
        "good/s: as many of them a second (goodput)"
    )
    assert head.split()[:3] == ["policy", "blocks", "tok/s"]
    assert [row.split()[:2] for row in rows] == [["fcfs", "200"], ["fcfs", "4000"]]
    assert len({len(row) for row in (head, *rows)}) <= 2


def test_who_is_refused_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", SMALL, "--max-model-len", "200"]) == 0
    head, row = capsys.readouterr().out.splitlines()[-2:]
    longer = sum(size > 200 for size in read_trace(SMALL).sizes)
    assert (
        0 < int(row.split()[head.replace(" p", "_p").split().index("refused")]) <= longer
    )


@pytest.mark.long
def test_policies_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In options, and in journals that name them; the engine's own are not replaced."""
    (tmp_path / "own_policies.py").write_text(OWN, "utf-8")
    monkeypatch.chdir(tmp_path)
    command = [
        "--policies",
        "own_policies",
        "simulate",
        SMALL,
        "--scheduling-policy",
        "Longest:least=3",
    ]
    code = (
        "from minfer.effects.cli.main import main; import sys; "
        "sys.exit(main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", code]
    monkeypatch.setenv("PYTHONPATH", str(Path(minfer.__file__).parents[1]))
    completed = subprocess.run(
        [*run, *command, "--journal", "runs", "--json"], capture_output=True
    )
    assert completed.returncode == 0, completed.stderr
    (simulated,) = json.loads(completed.stdout)["runs"]
    assert simulated["policy"] == "Longest:least=3"
    refused = subprocess.run([*run, "replay", "runs"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert (
        "no record 'Longest' here; if it is of a policy of your own, name"
        in refused.stderr
    )
    replay_options = ["--policies", "own_policies", "replay", "runs", "--json"]
    replayed = subprocess.run([*run, *replay_options], capture_output=True, check=True)
    assert json.loads(replayed.stdout)["divergence"] is None
    clash = OWN.replace("Longest", "Fair")
    (tmp_path / "clash.py").write_text(clash, "utf-8")
    same = subprocess.run(
        [*run, "--policies", "clash", "plan"], capture_output=True, text=True
    )
    assert same.returncode == 2
    assert "minfer has a class Fair of its own; give yours another name" in same.stderr
    with pytest.raises(SystemExit):
        main(["--policies", "no.such.module", "plan"])
    assert "no.such.module cannot be imported" in capsys.readouterr().err


def test_options_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    full = reported(capsys, SMALL)["runs"][0]
    shortened = reported(capsys, SMALL, "--requests", "40", "--divide", "10")["runs"][0]
    assert shortened["samples"] == 40
    assert shortened["prompt_tokens"] < full["prompt_tokens"] / 20
    fair = reported(
        capsys,
        SMALL,
        "--mix",
        "1",
        "--speed",
        "30",
        "--max-num-seqs",
        "16",
        "--scheduling-policy",
        "fcfs",
        "--scheduling-policy",
        "fair",
    )
    first, second = fair["runs"]
    assert first["ttft"] != second["ttft"]  # there are clients now


def test_prefixes_hit_as_far_as_the_pool_goes(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "poisson:rate=2,requests=120,prompt=900,shared=1,prefix=640,prefixes=3,output=4"
    )
    small, large = reported(capsys, text, "--num-blocks", "20,4000")["runs"]
    assert large["hit_share"] == pytest.approx(640 / 900 * 117 / 120, rel=0.02)
    assert small["hit_share"] < 0.5 * large["hit_share"]


# --- what a service level needs ---------------------------------------------------------

LEVEL = ("--slo-ttft", "0.15", "--slo-tpot", "0.012", "--slo-share", "0.95")


@pytest.mark.long
@pytest.mark.parametrize(
    "option", ["num-blocks", "speed", *claimed(["max-num-seqs", "block-size"])]
)
def test_find(capsys: pytest.CaptureFixture[str], option: str) -> None:
    results = reported(capsys, SMALL, *LEVEL, "--find", option, "--num-blocks", "2000")
    name = option.replace("-", "_")
    tried = {run[name]: run["good"] for run in results["runs"]}
    good = [value for value, share in tried.items() if share >= 0.95]
    bad = [value for value, share in tried.items() if share < 0.95]
    assert results["found"] == (max(good) if option == "speed" else min(good))
    if option == "speed":
        assert min(bad) == pytest.approx(1.02 * results["found"])
    elif option == "num-blocks":
        assert max(bad) < results["found"] <= 1.03 * max(bad)
    else:
        assert len(tried) == (11 if option == "max-num-seqs" else 8)


def test_nothing_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    level = ["--requests", "15", "--slo-ttft", "0.001", "--find"]
    results = reported(capsys, SMALL, *level, "num-blocks", code=1)
    assert results["found"] is None
    assert main(["simulate", SMALL, *level, "max-num-seqs"]) == 1
    message = capsys.readouterr().out.splitlines()[-1]
    assert message == "max-num-seqs with which 99.0% are good: nothing that was tried"


# --- journals, and without torch --------------------------------------------------------


@pytest.mark.long
def test_runs_can_be_kept_as_journals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    results = reported(
        capsys, SMALL, "--num-blocks", "300,3000", "--journal", str(folder)
    )
    paths = sorted(folder.iterdir())
    assert len(paths) == 2
    for path in paths:
        journal = read_journal(path)
        report = Report(journal.config)
        for turn in journal.turns():  # which verifies every decision
            report.fold(turn)
        twin = next(
            r for r in results["runs"] if r["num_blocks"] == journal.config.num_blocks
        )
        assert report.figures()["turns"] == twin["turns"]
        assert report.figures()["tpot"] == twin["tpot"]
        assert journal.config.watermark == journal.config.num_blocks // 100
        assert journal.about["simulated"] == SMALL
        # Its settings are the journal's.
        repeated = reported(capsys, str(path), "--cost", "h200")["runs"][0]
        assert repeated["num_blocks"] == twin["num_blocks"]
        assert repeated["tpot"]["p50"] == pytest.approx(twin["tpot"]["p50"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.csv"], "nowhere.csv: No such file"),
        (
            [SMALL, "--num-blocks", "0"],
            "argument --num-blocks: '0' is not a whole number from 1",
        ),
        (
            [SMALL, "--num-blocks", "9,x"],
            "argument --num-blocks: '9,x' is not a whole number",
        ),
        (
            [SMALL, "--requests", "3,4"],
            "argument --requests: '3,4' is not a whole number from 1",
        ),
        ([SMALL, "--speed", "nan"], "argument --speed: 'nan' is not a number above 0"),
        (
            [SMALL, "--scheduling-policy", "best"],
            "scheduling_policy must be one of fcfs, priority",
        ),
        (
            [SMALL, "--max-num-seqs", "9000"],
            "max_num_batched_tokens (8192) must be at least",
        ),
        (
            [SMALL, "--find", "speed"],
            "--find needs one value of each setting, and a service level",
        ),
        (
            [SMALL, "--find", "speed", "--slo-ttft", "1", "--speed", "1,2"],
            "--find needs one value",
        ),
        ([SMALL, "--cost", "nowhere.json"], "nowhere.json: this is no cost model"),
        (
            [SMALL, "--cost", "x", "--fit", "x"],
            "--cost and --fit both say what steps cost",
        ),
        ([SMALL, "--slo-share", "99"], "--slo-share is a share, from 0 to 1, not 99"),
        (
            [SMALL, "--fit", "nowhere.journal"],
            "nowhere.journal: there is no such file or folder",
        ),
        (
            [SMALL, "--save-cost", "no/where.json"],
            "no/where.json: its folder is not there",
        ),
        ([SMALL, "--journal", "/dev/null/x"], "/dev/null/x: Not a directory"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # argparse's way
        assert main(["simulate", *arguments]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1


# --- promises ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace in Azure's format that keeps the engine busy."""
    rng, path, time = Random(5), tmp_path_factory.mktemp("trace") / "azure.csv", 0.0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(400):
        time += rng.expovariate(25)
        stamp = f"2023-11-16 18:{int(time // 60):02}:{time % 60:010.7f}"
        lines.append(f"{stamp},{rng.randint(100, 4000)},{rng.randint(1, 60)}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "promise"), POLICIES, ids=lambda policy: type(policy).__name__
)
def test_policies_keep_their_promises(policy: Any, promise: str, azure: str) -> None:
    figures = replay(policy, promise, read_trace(azure), 1.0, 0)
    assert figures["broken"] == 0
    assert figures["busy"] > 0.9
    assert figures["ttft"]["p99"] > 1.0  # there is a line to overtake in


@frozen
class LastCome(FirstCome):
    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (-time, len(request.prompt)), state


def test_a_broken_promise_is_noticed(azure: str) -> None:
    assert (
        replay(LastCome(), "no request overtakes", read_trace(azure), 1.0, 0)["broken"]
        > 100
    )
