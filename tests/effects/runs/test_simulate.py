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
from attrs import evolve, frozen

import minfer
from minfer.config import ConfigError, EngineConfig
from minfer.effects.cli.main import main
from minfer.effects.live.journal_files import read_journal, write_journal
from minfer.effects.runs.costs import H200, fit, read_cost, steps, write_cost
from minfer.effects.runs.report import Report
from minfer.effects.runs.traces import read_trace
from minfer.policy import FirstCome, Rank
from minfer.request import Request
from minfer.runs.simulate import CostModel, Simulated, Simulation
from tests.circles import long
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


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """What the command prints as JSON."""
    assert main(["simulate", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


OWN = """
from __future__ import annotations
from attrs import frozen
from minfer.policies import Priority
from minfer.policy import FirstCome

@frozen
class Longest(FirstCome):
    least: int = 0

    def rank(self, state, request, time):
        return (float(-max(self.least, len(request.prompt))),), state
"""

# --- side by side -----------------------------------------------------------------------


def test_every_combination_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(
        capsys,
        SMALL,
        "--policy",
        "fcfs",
        "--policy",
        "static:size=4",
        "--max-num-seqs",
        "4,16",
        "--speed",
        "1,3",
    )
    settings = [
        (run["policy"], run["max_num_seqs"], run["speed"]) for run in found["runs"]
    ]
    assert settings == [
        (policy, seqs, speed)
        for policy in ("fcfs", "static:size=4")
        for seqs in (4, 16)
        for speed in (1.0, 3.0)
    ]
    assert {run["samples"] for run in found["runs"]} == {150}
    assert {run["ended"]["length"] for run in found["runs"]} == {150}
    slow, quick = found["runs"][4]["ttft"]["p99"], found["runs"][0]["ttft"]["p99"]
    assert slow > quick  # static batches make others wait


def test_a_run_is_the_engines_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the command are those of the same turns, taken here."""
    found = told(
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
        config, Simulated(), H200, report.note(trace.arrivals(16))
    ).turns():
        report.see(turn)
    assert found == found | json.loads(json.dumps(report.figures()))
    assert 0 < found["good"] < 1


def test_the_table_shows_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", SMALL, "--num-blocks", "200,4000", "--slo-ttft", "0.1"]) == 0
    first, second, head, *rows = capsys.readouterr().out.splitlines()
    assert main(["simulate", SMALL, "--policy", "fair", "--requests", "9"]) == 0
    assert "nobody has a client" in capsys.readouterr().out  # which fair shares are about
    assert first.startswith(
        f"150 requests of {SMALL}; what steps cost: a 7B model on one H200"
    )
    assert (
        second
        == "times in seconds; good: first token within 0.1 s, then any time per token"
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
        "--policy",
        "Longest:least=3",
    ]
    code = (
        "from minfer.effects.cli.main import main; import sys; "
        "sys.exit(main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", code]
    monkeypatch.setenv("PYTHONPATH", str(Path(minfer.__file__).parents[1]))
    done = subprocess.run(
        [*run, *command, "--journal", "runs", "--json"], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout)["runs"]
    assert made["policy"] == "Longest:least=3"
    refused = subprocess.run([*run, "replay", "runs"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert (
        "no record 'Longest' here; if it is of a policy of your own, name"
        in refused.stderr
    )
    own = ["--policies", "own_policies", "replay", "runs", "--json"]
    again = subprocess.run([*run, *own], capture_output=True, check=True)
    assert json.loads(again.stdout)["divergence"] is None
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
    whole = told(capsys, SMALL)["runs"][0]
    part = told(capsys, SMALL, "--requests", "40", "--divide", "10")["runs"][0]
    assert part["samples"] == 40
    assert part["prompt_tokens"] < whole["prompt_tokens"] / 20
    fair = told(
        capsys,
        SMALL,
        "--mix",
        "1",
        "--speed",
        "30",
        "--max-num-seqs",
        "16",
        "--policy",
        "fcfs",
        "--policy",
        "fair",
    )
    first, second = fair["runs"]
    assert first["ttft"] != second["ttft"]  # there are clients now


def test_prefixes_hit_as_far_as_the_pool_goes(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "poisson:rate=2,requests=120,prompt=900,shared=1,prefix=640,prefixes=3,output=4"
    )
    small, large = told(capsys, text, "--num-blocks", "20,4000")["runs"]
    assert large["hit_share"] == pytest.approx(640 / 900 * 117 / 120, rel=0.02)
    assert small["hit_share"] < 0.5 * large["hit_share"]


# --- what a service level needs ---------------------------------------------------------

LEVEL = ("--slo-ttft", "0.15", "--slo-tpot", "0.012", "--slo-share", "0.95")


@pytest.mark.parametrize(
    "what", ["num-blocks", "speed", *long(["max-num-seqs", "block-size"])]
)
def test_find(capsys: pytest.CaptureFixture[str], what: str) -> None:
    found = told(capsys, SMALL, *LEVEL, "--find", what, "--num-blocks", "2000")
    name = what.replace("-", "_")
    tried = {run[name]: run["good"] for run in found["runs"]}
    good = [value for value, share in tried.items() if share >= 0.95]
    bad = [value for value, share in tried.items() if share < 0.95]
    assert found["found"] == (max(good) if what == "speed" else min(good))
    if what == "speed":
        assert min(bad) == pytest.approx(1.02 * found["found"])
    elif what == "num-blocks":
        assert max(bad) < found["found"] <= 1.03 * max(bad)
    else:
        assert len(tried) == (11 if what == "max-num-seqs" else 8)


def test_nothing_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, SMALL, "--slo-ttft", "0.001", "--find", "num-blocks", code=1)
    assert found["found"] is None
    assert main(["simulate", SMALL, "--slo-ttft", "0.001", "--find", "max-num-seqs"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "max-num-seqs with which 99.0% are good: nothing that was tried"


# --- what steps cost --------------------------------------------------------------------


def measured(
    seed: int, repeat: int = 1, cost: CostModel = COST
) -> list[tuple[float, ...]]:
    config = EngineConfig(
        num_blocks=2000, max_num_seqs=16, max_model_len=20_000, max_repeat=repeat
    )
    rows = read_trace(
        f"poisson:rate=8,requests=250,prompt=400,output=40,spread=1,seed={seed}"
    )
    return [*steps(Simulation(config, Simulated(), cost, rows.arrivals(64)).turns())]


@pytest.mark.parametrize("repeat", [1, 4])
def test_a_fit_finds_what_steps_cost(repeat: int) -> None:
    found, about = fit(measured(1, repeat), "x")
    assert abs(about["held_out_error"]["total"]) < 1e-3
    assert about["held_out_error"]["step"] < 1e-2
    for other in (measured(2, repeat), measured(3, repeat)):
        top = found.decode[-1][0]  # of the rows that there were often enough
        said = [_seconds(found, step) / step[0] for step in other if step[1] <= top]
        assert len(said) > 0.98 * len(other)
        assert min(said) > 0.98
        assert max(said) < 1.02


def test_a_fit_finds_what_launches_take_the_host() -> None:
    """Whose steps before them seem longer, and they themselves shorter."""
    known = evolve(COST, launch=0.03, captured=600, eager=0.002, eager_token=3e-5)
    found, about = fit(measured(1, cost=known), "x")
    assert abs(about["held_out_error"]["total"]) < 1e-2
    assert found.launch == pytest.approx(known.launch, rel=0.02)
    assert 540 <= found.captured <= 620
    assert found.eager + 1000 * found.eager_token == pytest.approx(0.032, rel=0.03)
    assert found.mixed + 300 * found.token == pytest.approx(0.013, rel=0.03)
    for limit in (0, 20_000):  # all launches take long, or none
        fitted, _ = fit(measured(1, cost=evolve(known, captured=limit)), "x")
        assert fitted.launch == (pytest.approx(0.03, rel=0.02) if limit == 0 else 0)
        assert fitted.captured == 0


def _seconds(cost: CostModel, step: tuple[float, ...]) -> float:
    _, rows, forwards, *each = step
    base = next((b for top, b in cost.decode if rows <= top), cost.decode[-1][1])
    base = cost.mixed if rows == 0 else base
    rates = (cost.token, cost.sequence, cost.chunk, cost.context, cost.attention)
    return forwards * base + sum(a * b for a, b in zip(rates, each, strict=True))


def test_interruptions_do_not_spoil_a_fit() -> None:
    rng = Random(0)
    noisy = [
        (took * rng.lognormvariate(0, 0.1) * (30 if rng.random() < 0.02 else 1), *rest)
        for took, *rest in measured(1)
    ]
    found, about = fit(noisy, "x")
    clean = measured(2)
    said = sum(_seconds(found, step) for step in clean) / sum(step[0] for step in clean)
    assert said == pytest.approx(1, abs=0.03)
    assert about["held_out_error"]["step"] == pytest.approx(0.067, abs=0.02)


def test_steps_that_take_longer_now_and_then_are_in_the_total() -> None:
    rng = Random(0)
    noisy = [
        (took * (1.4 if rng.random() < 0.05 else 1), *rest) for took, *rest in measured(1)
    ]
    found, _ = fit(noisy, "x")
    said, took = (
        sum(_seconds(found, step) for step in noisy),
        sum(step[0] for step in noisy),
    )
    assert said == pytest.approx(took, rel=0.005)


def test_nothing_is_below_zero_and_too_few_steps_are_refused() -> None:
    rng = Random(1)
    noise = [(0.01 * rng.random() + 1e-4, *rest) for _, *rest in measured(1)]
    found, _ = fit(noise, "x")
    assert min(found.token, found.sequence, found.chunk, found.context, found.mixed) >= 0
    with pytest.raises(
        ConfigError, match="x: 255 steps are too few to fit; 256 are needed"
    ):
        fit(noise[:255], "x")
    with pytest.raises(ConfigError, match="x: 0 steps are too few"):
        fit([], "x")


def test_a_fitted_journal_predicts_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_model_len=20_000)
    text = "poisson:rate=8,requests=150,prompt=400,output=40,spread=1,seed={}"
    real = {}
    for seed in (1, 2):
        report, trace = Report(config), read_trace(text.format(seed))
        turns = Simulation(
            config, Simulated(), COST, report.note(trace.arrivals(64))
        ).turns()
        write_journal(
            tmp_path / f"{seed}.journal", config, report.seen(turns), {"model": "m"}
        )
        real[seed] = report.figures()
    cost = tmp_path / "cost.json"
    other = (
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "2048",
        "--num-blocks",
        "2000",
    )
    found = told(
        capsys,
        text.format(2),
        "--fit",
        str(tmp_path / "1.journal"),
        "--save-cost",
        str(cost),
        "--max-model-len",
        "20000",
        *other,
    )
    assert found["ran"] == {"model": "m"}
    assert abs(found["held_out_error"]["total"]) < 1e-3
    run = found["runs"][0]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for share in ("p50", "p99"):
            assert run[name][share] == pytest.approx(real[2][name][share], rel=0.02)
    again = told(
        capsys, text.format(2), "--cost", str(cost), "--max-model-len", "20000", *other
    )
    assert again["runs"][0]["ttft"] == run["ttft"]
    assert "on steps held out" in again["cost"]["name"]


def test_a_kept_cost_model_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    write_cost(path, COST, {"why": "test"})
    assert read_cost(path) == COST
    assert json.loads(path.read_text())["about"] == {"why": "test"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        '{"model": 3}',
        '{"model": {}}',
        '{"model": {"name": "x"}}',
        "\xff",
        '{"model": {"name": "x", "decode": [[1, 1]], "mixed": -1, "token": 0}}',
        '{"model": {"name": "x", "decode": [[1, 1]], "mixed": 1, "token": 0, "hue": 1}}',
        '{"model": {"name": "x", "decode": [], "mixed": 1, "token": 0}}',
        '{"model": {"name": "x", "decode": [1], "mixed": 1, "token": 0}}',
        '{"model": {"name": "x", "decode": [[1, "1"]], "mixed": 1, "token": 0}}',
    ],
)
def test_a_file_that_is_no_cost_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, "latin-1")
    with pytest.raises(ConfigError, match=f"{path}: this is no cost model"):
        read_cost(path)


# --- journals, and without torch --------------------------------------------------------


def test_runs_can_be_kept_as_journals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    found = told(capsys, SMALL, "--num-blocks", "300,3000", "--journal", str(folder))
    paths = sorted(folder.iterdir())
    assert len(paths) == 2
    for path in paths:
        journal = read_journal(path)
        report = Report(journal.config)
        for turn in journal.turns():  # which verifies every decision
            report.see(turn)
        twin = next(
            r for r in found["runs"] if r["num_blocks"] == journal.config.num_blocks
        )
        assert report.figures()["turns"] == twin["turns"]
        assert report.figures()["tpot"] == twin["tpot"]
        assert journal.config.watermark == journal.config.num_blocks // 100
        assert journal.about["simulated"] == SMALL
        again = told(capsys, str(path))["runs"][0]  # its settings are the journal's
        assert again["num_blocks"] == twin["num_blocks"]
        assert again["tpot"]["p50"] == pytest.approx(twin["tpot"]["p50"], rel=0.05)


def test_it_needs_no_torch() -> None:
    code = f"""
import sys
from minfer.effects.cli.main import main
main(["simulate", {SMALL!r}, "--requests", "20"])
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "why"),
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
        ([SMALL, "--policy", "best"], "scheduling_policy must be one of fcfs, priority"),
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
            "no/where.json: No such file or directory",
        ),
        ([SMALL, "--journal", "/dev/null/x"], "/dev/null/x: Not a directory"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):  # argparse's way
        assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


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


@pytest.mark.parametrize(
    ("policy", "promise"), POLICIES, ids=lambda one: type(one).__name__
)
def test_policies_keep_their_promises(policy: Any, promise: str, azure: str) -> None:
    found = replay(policy, promise, read_trace(azure), 1.0, 0)
    assert found["broken"] == 0
    assert found["busy"] > 0.9
    assert found["ttft"]["p99"] > 1.0  # there is a line to overtake in


@frozen
class LastCome(FirstCome):
    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        return (-time, len(request.prompt)), state


def test_a_broken_promise_is_noticed(azure: str) -> None:
    assert (
        replay(LastCome(), "nobody overtakes", read_trace(azure), 1.0, 0)["broken"] > 100
    )
