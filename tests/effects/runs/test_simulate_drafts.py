"""`minfer simulate` with drafts: what is asked for, what comes of it, what it says."""

from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import Report, draft_figures
from minfer.effects.runs.simulate_drafts import DRAFTERS, with_drafts
from minfer.effects.setup.speculation_settings import METHODS
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, HOST, Speculation
from tests.core.simulation.drafted import by_device
from tests.effects.runs.test_simulate_command import reported

LOAD = "poisson:rate=4,requests=40,prompt=100,output=30"
NUMBER = "--num-speculative-tokens"
RATE = "--acceptance-rate"


def test_drafts_that_stand_make_a_run_quicker(capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("ngram", "draft_model"):
        requested = (NUMBER, "0,4", "--speculative-method", method, RATE, "0.8")
        none, four = reported(capsys, LOAD, *requested)["runs"]
        assert (none["drafts"], four["drafts"]) == (0, 4)
        assert none["drafted"]["rate"] is None
        drafted = four["drafted"]
        # 0.8 + 0.64 + 0.512 + 0.41 of four, less what cannot be at an end.
        assert drafted["rate"] == pytest.approx(0.59, abs=0.05)
        assert drafted["by_place"][0] == pytest.approx(0.8, abs=0.05)
        assert 2.5 < drafted["length"] < 3.5
        assert four["tpot"]["p50"] < 0.6 * none["tpot"]["p50"]
        assert none["output_tokens"] == four["output_tokens"]


def test_what_is_looked_up_is_looked_up_anywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There are no texts to look in: the methods of the host differ by their rate."""
    ngram, same, better = [
        reported(capsys, LOAD, NUMBER, "4", "--speculative-method", method, RATE, rate)[
            "runs"
        ]
        for method, rate in (("ngram", "0.7"), ("suffix", "0.7"), ("suffix", "0.8"))
    ]
    for (run,) in (ngram, same):
        del run["simulated_in"]  # the machine's seconds
    assert ngram == same
    assert better[0]["drafted"]["rate"] > same[0]["drafted"]["rate"]
    assert set(DRAFTERS) == set(METHODS)


def test_a_draft_model_costs_what_it_is_reported_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requested = (NUMBER, "4", "--speculative-method", "draft_model", RATE, "0.8")
    cheap, dear = (
        reported(capsys, LOAD, *requested, "--draft-cost", seconds)["runs"][0]
        for seconds in ("0.0001", "0.5")
    )
    assert cheap["drafted"]["proposed"] > 0
    assert dear["drafted"]["proposed"] == 0, "none pays at that price"
    for options, says in (((), True), (("--draft-cost", "0.001"), False)):
        assert main(["simulate", LOAD, *requested, *options]) == 0
        assert ("takes no time" in capsys.readouterr().out) == says


def test_the_table_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", LOAD, NUMBER, "0,2", RATE, "0.7"]) == 0
    out = capsys.readouterr().out
    assert "probability 0.7 if those before it are (as --acceptance-rate says)" in out
    *_, head, none, two = out.splitlines()
    column = head.split().index("drafts")
    assert [none.split()[column], two.split()[column]] == ["0", "2"]
    assert "accepted" in head
    assert main(["simulate", LOAD]) == 0
    out = capsys.readouterr().out
    assert "drafts" not in out
    assert "accepted" not in out


def test_a_recorded_run_says_how_it_speculated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = by_device()
    write_journal(tmp_path / "a.journal", run.config, run.turns)
    (same,) = reported(capsys, str(tmp_path))["runs"]
    assert same["drafts"] == 3
    assert same["drafted"]["proposed"] > 0
    recorded = Report(run.config)
    for turn in run.turns:
        recorded.fold(turn)
    reported_ranks = draft_figures(recorded.drafts)
    assert same["drafted"] == reported_ranks, "each stands as it did"
    assert main(["simulate", str(tmp_path)]) == 0
    assert "those with a recorded result keep it" in capsys.readouterr().out
    (sure,) = reported(capsys, str(tmp_path), RATE, "1")["runs"]
    assert sure["drafted"]["rate"] == 1.0
    none, five = reported(capsys, str(tmp_path), NUMBER, "0,5")["runs"]
    assert (none["drafts"], five["drafts"]) == (0, 5)
    assert len(five["drafted"]["by_place"]) == 5


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ((NUMBER, "-1"), "is not a whole number from 0"),
        ((NUMBER, "65"), "drafts must be at most 64, not 65"),
        ((RATE, "1.5"), "is not a rate from 0 to 1"),
        ((RATE, "x"), "is not a rate from 0 to 1"),
        (("--draft-cost", "-2"), "is not a number of seconds"),
        (("--speculative-method", "ngram"), "needs --num-speculative-tokens"),
        (("--speculative-method", "eagle"), "invalid choice"),
    ],
)
def test_what_is_impossible_is_reported(
    requested: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: object = None
    try:
        code = main(["simulate", LOAD, *requested])
    except SystemExit as error:  # argparse's
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_what_a_run_says_of_speculation_stays() -> None:
    recorded = Speculation(drafter=DEVICE, drafts=2, adaptive=False, rows=7)
    config = evolve(EngineConfig(num_blocks=9), speculation=recorded)
    changed = with_drafts(config, 5, None, H200).speculation
    assert changed == evolve(recorded, drafts=5)
    by_host = with_drafts(config, 5, "ngram", H200).speculation
    assert by_host == evolve(recorded, drafts=5, drafter=HOST)
    assert with_drafts(config, 0, None, H200).speculation is None
    new = with_drafts(EngineConfig(num_blocks=9), 3, None, H200).speculation
    assert new is not None
    assert (new.drafter, new.adaptive) == (HOST, True)
