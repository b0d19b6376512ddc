"""Answers of a policy that cannot be used are counted in every result, and warned of."""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

import json
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from minfer.analysis.explain import explain
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.journal.codec import RECORDS
from minfer.journal.overrides import OverrideCounts, PolicyOverrideError
from minfer.policies.builtin import POLICIES
from minfer.policies.mistakes import PolicyWarning
from minfer.records.config import EngineConfig
from minfer.records.messages import PolicyOverride
from minfer.records.policy import FirstCome, Load
from minfer.records.state import Turn
from minfer.routing.policies import LeastLoaded
from minfer.routing.state import RouterConfig
from minfer.simulation.cost import CostModel
from minfer.simulation.fork import Change, fork
from minfer.simulation.replicas import ReplicaSimulation, ReplicaTurn
from minfer.simulation.simulate import Simulated, Simulation
from tests.core.simulation.clocked import request

COST = CostModel(name="even", decode=((1, 1.0),), mixed=1.0, token=0.0, sequence=0.0)
SMALL = "poisson:rate=200,requests=40,prompt=60,output=12,spread=0.7,seed=2"
SIZES = ("--num-blocks", "12", "--block-size", "16", "--max-num-seqs", "6")


class RaisesAlways(FirstCome):
    def rank(self, state: Any, request: Any, time: float) -> Any:
        raise ZeroDivisionError("by nothing")


class RaisesAtTimes(FirstCome):
    def budget(self, state: Any, load: Load) -> int:
        return load.budget * 3 // (3 - load.running % 4)


class ChoosesTheFirst(FirstCome):
    def victim(self, state: Any, ranks: Any) -> int:
        return 0


FAULTY = (RaisesAlways, RaisesAtTimes, ChoosesTheFirst)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in FAULTY:
        monkeypatch.setitem(POLICIES, kind.__name__, kind)
        monkeypatch.setitem(RECORDS, kind.__name__, kind)


def simulated(path: Path, kind: type) -> list[str]:
    """The arguments of a simulation that is recorded."""
    return [
        "simulate",
        SMALL,
        "--scheduling-policy",
        kind.__name__,
        *SIZES,
        "--journal",
        str(path),
    ]


def overrides_of(turns: list[Turn]) -> list[PolicyOverride]:
    reasons = [reason for turn in turns for reason in turn.transition.reasons]
    return [reason for reason in reasons if isinstance(reason, PolicyOverride)]


@pytest.mark.parametrize("kind", FAULTY)
def test_all_commands_count_and_warn(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*simulated(tmp_path, kind), "--json"]) == 0
    out, err = capsys.readouterr()
    (figures,) = json.loads(out)["runs"]
    (path,) = tmp_path.glob("*.journal")
    overrides = overrides_of([*read_journal(path).turns()])
    assert len(overrides) > 1
    (method,) = {override.question for override in overrides}
    counts = figures["overrides"]
    assert counts["count"] == len(overrides)
    assert counts["by_method"] == {method: len(overrides)}
    assert counts["first"]["method"] == method
    warning = f"scheduling policy {kind.__name__}: {len(overrides):,} answers could not"
    assert err.count(warning) == 1
    assert f"the first in turn {counts['first']['turn']} (" in err

    assert main(["replay", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["overrides"] == counts
    assert err.count(warning) == 1
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"overrides  {len(overrides):,} answers of the policy could not be used" in out

    assert main(["view", str(path), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.parametrize("kind", FAULTY)
def test_an_explanation_counts_them_until_the_end_of_the_request(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(simulated(tmp_path, kind)) == 0
    assert f"{'overrides':>8}" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.journal")
    journal = read_journal(path)
    turns = [*journal.turns()]
    ends = [
        (end.id, turn.number)
        for turn in turns
        for command in turn.transition.commands
        for end in getattr(command, "finished", ())
    ]
    name, last = ends[-1]
    expected = len(overrides_of(turns[: last + 1]))
    assert explain(journal.config, turns, name).overrides.count == expected
    assert journal.overrides.count == len(overrides_of(turns))
    assert main(["explain", str(path), name, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["overrides"]["count"] == expected
    assert f"{expected:,} answers could not be used" in err
    assert main(["explain", str(path), name]) == 0
    assert f"Until then {expected:,} answers of the " in capsys.readouterr().out
    assert main(["explain", str(path)]) == 0
    assert f"{len(overrides_of(turns)):,} answers could" in capsys.readouterr().err


def test_by_an_option_they_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = simulated(tmp_path, RaisesAlways)
    assert main([*arguments, "--strict-policy"]) == 2
    says = "the scheduling policy's answer cannot be used: turn "
    assert says in capsys.readouterr().err
    for file in tmp_path.glob("*"):
        file.unlink()
    assert main(arguments) == 0
    path = str(next(tmp_path.glob("*.journal")))
    capsys.readouterr()
    for command in (
        ["replay", path],
        ["replay", path, "--at", "3", "--max-num-seqs", "5"],
        ["explain", path],
        ["explain", path, "0"],
    ):
        assert main([*command, "--strict-policy"]) == 2, command
        assert says in capsys.readouterr().err


def test_a_fork_counts_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(simulated(tmp_path, RaisesAlways)) == 0
    (path,) = tmp_path.glob("*.journal")
    capsys.readouterr()
    arguments = ["replay", str(path), "--at", "3", "--scheduling-policy", "fcfs"]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)
    assert results["recorded"]["overrides"]["count"] > 0
    assert results["changed"]["overrides"]["count"] == 0
    assert err.count("minfer: recorded: scheduling policy RaisesAlways: ") == 1
    assert "minfer: changed" not in err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        forked = fork(read_journal(path), 3, Change(), COST)
        turns = [*forked.turns]
    assert forked.overrides.count == len(overrides_of(turns)) > 0


CONFIG = EngineConfig(num_blocks=40, block_size=4, policy=RaisesAlways())
ARRIVALS = [(float(number), request(f"r{number}", 3, 4)) for number in range(6)]


def test_a_simulation_in_python_warns_once_and_counts() -> None:
    simulation = Simulation(CONFIG, Simulated(), COST, ARRIVALS)
    with pytest.warns(PolicyWarning, match="turn 0 .*: rank raised ZeroDiv") as caught:
        turns = [*simulation.turns()]
    assert len(caught) == 1
    assert simulation.overrides.count == len(overrides_of(turns)) == len(ARRIVALS)
    strict = OverrideCounts(strict=True)
    simulation = Simulation(CONFIG, Simulated(), COST, ARRIVALS, overrides=strict)
    with pytest.raises(PolicyOverrideError, match="rank raised ZeroDivisionError: by "):
        next(simulation.turns())


def test_a_simulation_of_replicas_counts_those_of_all() -> None:
    router = RouterConfig(LeastLoaded(), 4)
    simulation = ReplicaSimulation(CONFIG, router, ("a", "b"), COST, ARRIVALS)
    with pytest.warns(PolicyWarning) as caught:
        steps = [*simulation.run()]
    turns = [step.turn for step in steps if isinstance(step, ReplicaTurn)]
    assert len(caught) == 1
    assert simulation.overrides.count == len(overrides_of(turns)) == len(ARRIVALS)


class Misnamed(FirstCome):
    def displace(self, state: Any, waiting: Any, running: Any) -> bool:
        return True


def test_a_simulation_names_methods_that_nobody_calls() -> None:
    config = EngineConfig(num_blocks=40, block_size=4, policy=Misnamed())
    simulation = Simulation(config, Simulated(), COST, ARRIVALS)
    with pytest.warns(PolicyWarning, match=r"never calls displace; .* may_preempt\("):
        turns = [*simulation.turns()]
    assert simulation.overrides == OverrideCounts()
    assert overrides_of(turns) == []
    strict = OverrideCounts(strict=True)
    simulation = Simulation(config, Simulated(), COST, ARRIVALS, overrides=strict)
    with pytest.raises(PolicyOverrideError, match="the engine never calls displace; "):
        next(simulation.turns())


def test_by_an_option_a_method_that_nobody_calls_is_an_error_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in (POLICIES, RECORDS):
        monkeypatch.setitem(names, "Misnamed", Misnamed)
    arguments = simulated(tmp_path, Misnamed)
    assert main([*arguments, "--strict-policy"]) == 2
    out, err = capsys.readouterr()
    assert "the engine never calls displace; the protocol has may_preempt(" in err
    assert out == ""
    assert not [*tmp_path.iterdir()]
    assert main(arguments) == 0
    path = str(next(tmp_path.glob("*.journal")))
    for command in (["replay", path], ["explain", path], ["explain", path, "0"]):
        assert main(command) == 0
        assert main([*command, "--strict-policy"]) == 2, command
        assert "never calls displace" in capsys.readouterr().err


class TooFewParameters(FirstCome):
    def rank(self, state: Any, request: Any) -> Any:  # type: ignore[override]  # the fault
        return (), state


def test_a_method_without_a_parameter_is_named_with_where_it_is() -> None:
    config = EngineConfig(num_blocks=40, block_size=4, policy=TooFewParameters())
    simulation = Simulation(config, Simulated(), COST, ARRIVALS)
    with pytest.warns(PolicyWarning, match="TooFewParameters.rank.. takes 3 posit"):
        deque(simulation.turns(), maxlen=0)
    first = simulation.overrides.first
    assert first is not None
    line = TooFewParameters.rank.__code__.co_firstlineno
    assert first.override.line == f"{__file__}, line {line}"


def test_a_run_without_overrides_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    config = EngineConfig(num_blocks=40, block_size=4)
    write_journal(path, config, Simulation(config, Simulated(), COST, ARRIVALS).turns())
    assert main(["replay", str(path), "--strict-policy"]) == 0
    out, err = capsys.readouterr()
    assert "overrides" not in out
    assert err == ""


def test_what_comes_after_an_option_is_still_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    config = EngineConfig(num_blocks=40, block_size=4)
    write_journal(path, config, Simulation(config, Simulated(), COST, ARRIVALS).turns())
    printed = set()
    for arguments in (
        [str(path), "r3", "--json"],
        [str(path), "--json", "r3"],
        ["--json", str(path), "r3"],
    ):
        assert main(["explain", *arguments]) == 0
        printed.add(capsys.readouterr().out)
    (text,) = printed
    assert json.loads(text)["id"] == "r3"
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(path), "r3", "--json", "r4"])
    assert "unrecognized arguments: r4" in capsys.readouterr().err
