"""`minfer replay` as a user has it: findings, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.setup.folders import bundled_folder
from minfer.policies import consult
from minfer.records.messages import Preempted
from tests.core.changed import CHANGES
from tests.core.simulation.test_fork import recorded
from tests.effects.runs.replays import printed, reported
from tests.effects.runs.replays import run as run


def test_a_replay_verifies_and_sums_up(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, turns = recorded(1)
    list(journal.turns())
    figures = reported(capsys, run)
    assert figures["turns"] == len(turns)
    assert figures["digest"] == journal.digest.hex()
    assert figures["divergence"] is None
    assert figures["state_digests"] == 1
    assert figures["closed"]
    text = printed(capsys, run)
    assert "none on paper" in text
    assert f"{len(turns)} turns" in text
    assert f"digest {journal.digest.hex()}" in text
    assert "the engine was closed" in text
    assert reported(capsys, run, "--until", 10)["turns"] == 10


def test_of_a_folder_every_run_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, turns = recorded(1)
    names = ["20260101T000000Z-1.0", "20260102T000000Z-1.0"]
    for name, count in zip(names, (len(turns), 9), strict=True):
        path = tmp_path / f"{name}-000001.journal"
        write_journal(path, journal.config, turns[:count])
    figures = reported(capsys, tmp_path)
    (earlier,) = figures["others"]
    assert [result["run"] for result in (earlier, figures)] == names
    assert [result["turns"] for result in (earlier, figures)] == [len(turns), 9]
    text = printed(capsys, tmp_path)
    assert [f"run        {name}: " in text for name in names] == [True, True]
    assert text.count("verified   every decision") == 2
    CHANGES["another victim"](monkeypatch)
    figures = reported(capsys, tmp_path, code=1)  # in the first alone
    assert figures["divergence"] is None
    assert figures["others"][0]["divergence"] is not None


def test_another_process_needs_no_torch_and_finds_the_same(run: Path) -> None:
    code = (
        "import sys; from minfer.effects.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "replay", str(run), "--json"]
    digests = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        completed = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        )
        digests.add(json.loads(completed.stdout)["digest"])
    journal, _ = recorded(1)
    list(journal.turns())
    assert digests == {journal.digest.hex()}


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
    divergence = reported(capsys, run, code=1)["divergence"]
    assert words.strip() in [
        difference["words"] for difference in divergence["differences"]
    ]
    assert divergence["expected"] != divergence["found"]
    lines = printed(capsys, run, code=1).splitlines()
    begin = (
        f"DIVERGED   in turn {divergence['turn']} (step {divergence['step']}, "
        f"{divergence['time']:.6f} s); "
    )
    start = next(i for i, line in enumerate(lines) if line.startswith(begin))
    assert words in lines[start + 1 :]
    assert f"  field    {divergence['field']}" in lines
    assert f"  columns  {divergence['legend']}" in lines
    assert lines[-2] == f"  then     {json.dumps(divergence['expected'])}"
    assert lines[-1] == f"  now      {json.dumps(divergence['found'])}"
    assert reported(capsys, run, "--until", divergence["turn"])["divergence"] is None


class BrokenError(Exception):
    pass


def breaks(*_: object) -> NoReturn:
    """What a changed scheduler may do; it is asked when blocks run out."""
    raise BrokenError("no victim today")


def test_an_engine_that_raises_is_reported_with_its_turn_and_a_code_of_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, turns = recorded(1)
    number = next(
        turn.number
        for turn in turns
        if any(isinstance(reason, Preempted) for reason in turn.transition.reasons)
    )
    monkeypatch.setattr(consult, "victim", breaks)
    figures = reported(capsys, run, code=3)
    error = "BrokenError: no victim today"
    assert (figures["raised"]["turn"], figures["raised"]["error"]) == (number, error)
    assert figures["turns"] == number
    assert figures["divergence"] is None
    lines = printed(capsys, run, code=3).splitlines()
    assert lines[-2] == f"RAISED     turn {number}: the engine raised {error}"
    assert re.fullmatch(r"  in       test_replay_command\.py:\d+, in breaks", lines[-1])


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
def test_an_engine_that_raises_is_reported_in_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(consult, "victim", breaks)
    assert main([command[0], str(run), *command[1:]]) == 3
    (line,) = [
        printed_line
        for printed_line in capsys.readouterr().err.splitlines()
        if "minfer: " in printed_line
    ]
    assert re.search(
        r"minfer: (.*\.journal: )?turn \d+: the engine raised BrokenError: "
        r"no victim today \(",
        line,
    )


def test_the_help_says_what_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "0 every decision",
        "1 one is not",
        "2 the arguments",
        "3 the engine raised",
    ):
        assert words in text


def test_a_torn_or_broken_file_is_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = run.read_bytes(), tmp_path / "x.journal"
    path.write_bytes(data[:-70])
    figures = reported(capsys, path)
    assert figures["divergence"] is None
    assert "cut off" in figures["torn"][0]
    assert "stops while the engine ran" in printed(capsys, path)
    path.write_bytes(data[:2000] + b"????" + data[2004:])
    error = printed(capsys, path, code=2)
    assert "is damaged" in error
    num_turns = int(error.split()[-1])
    assert error.endswith(
        f"turns before it are whole: minfer replay --until {num_turns}\n"
    )
    assert reported(capsys, path, "--until", num_turns)["turns"] == num_turns > 0
    assert "no such file" in printed(capsys, tmp_path / "none", code=2)


@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "suffix"},
        {"method": "draft_model", "model": str(bundled_folder("draft"))},
    ],
)
@pytest.mark.parametrize("redact", [False, True])
def test_a_run_with_drafts_replays(
    drafter: dict[str, object],
    redact: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of both drafters; the host looks up what was answered before."""
    with LLM(
        executor="oracle",
        num_gpu_blocks_override=300,
        journal=tmp_path,
        journal_redact=redact,
        speculative_config={**drafter, "num_speculative_tokens": 3, "adaptive": False},
    ) as llm:
        greedy = SamplingParams(max_tokens=20, temperature=0)
        for _ in range(2):
            llm.generate(["a", "b", "c d"], greedy, use_tqdm=False)
    figures = reported(capsys, tmp_path)
    assert figures["divergence"] is None
    assert figures["state_digests"] == 1
    drafts = figures["drafted"]
    assert 0 < drafts["accepted"] <= drafts["proposed"]
    words = f"{drafts['accepted']:,} of {drafts['proposed']:,} accepted"
    assert words in printed(capsys, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "draft_model", "model": str(bundled_folder("draft"))},
    ],
)
def test_a_run_whose_drafts_stand_by_coins_replays(
    drafter: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By models, as only these throw coins; and a second run writes the same."""
    rule = {"rejection_sample_method": "standard", "adaptive": False}
    written = list[list[tuple[int, ...]]]()
    for name in ("a", "b"):
        with LLM(
            num_gpu_blocks_override=64,
            journal=tmp_path / name,
            speculative_config={**drafter, **rule, "num_speculative_tokens": 3},
        ) as llm:
            params = [
                SamplingParams(max_tokens=40, seed=seed, temperature=0.7)
                for seed in range(3)
            ]
            prompts = ["class A:\n    def __init__(self, a, b):\n"] * 3
            outputs = llm.generate(prompts, params, use_tqdm=False)
        figures = reported(capsys, tmp_path / name)
        assert figures["divergence"] is None
        assert figures["state_digests"] == 1
        drafts = figures["drafted"]
        assert 0 < drafts["accepted"] < drafts["proposed"]
        written.append([tuple(output.outputs[0].token_ids) for output in outputs])
    assert written[0] == written[1]
