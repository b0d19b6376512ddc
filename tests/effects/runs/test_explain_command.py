"""`minfer explain` as a user has it: words and figures that agree, and what
it refuses.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, SamplingParams
from minfer.analysis.explain import explain
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.effects.runs.explain_command import SIZES, figures
from minfer.journal.redact import redacted, redacted_config
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Submit
from minfer.records.state import Turn
from minfer.values.texts import counted
from tests.circles import claimed
from tests.core.recorded import recorded
from tests.core.simulation.clocked import Run, config, request
from tests.core.simulation.drafted import by_device
from tests.effects.tiny_model import write_checkpoint

HOSTILE = (
    10  # the seed of a world with preemptions, failures, and requests of several samples
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run.journal"
    write_journal(path, *recorded(HOSTILE))
    return path


def reported(capsys: pytest.CaptureFixture[str], path: Path, name: str) -> Any:
    assert main(["explain", str(path), name, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], path: Path, name: str) -> str:
    assert main(["explain", str(path), name]) == 0
    return capsys.readouterr().out


def saved(path: Path, run: Run) -> Path:
    write_journal(path / "a.journal", run.config, run.turns)
    return path / "a.journal"


@pytest.mark.long
@pytest.mark.parametrize("offset", [0, *claimed([1, 2])])
def test_words_and_figures_agree(
    hostile: Path, capsys: pytest.CaptureFixture[str], offset: int
) -> None:
    """Of every third request."""
    journal = read_journal(hostile)
    events = [event for turn in journal.turns() for event in turn.events]
    names = {event.request.id for event in events if isinstance(event, Submit)}
    for name in sorted(names)[offset::3]:
        explained, text = reported(capsys, hostile, name), printed(capsys, hostile, name)
        times = [
            float(ms.replace(",", ""))
            for ms in re.findall(r"^ +([\d,.]+) ms", text, re.M)
        ]
        spans = [span for sample in explained["samples"] for span in sample["parts"]]
        assert times == pytest.approx(
            [1000 * span["seconds"] for span in spans], abs=0.051
        )
        has_several = len(explained["samples"]) > 1
        for sample in explained["samples"]:
            seconds = math.fsum(span["seconds"] for span in sample["parts"])
            assert seconds == pytest.approx(sample["upto"] - sample["arrived"], abs=1e-9)
            heading = (
                f"n all {1000 * seconds:,.1f} ms, until turn {sample['turn']}: "
                f"{sample['end']['reason']!r}, "
                f"{counted(sample['end']['length'], 'token')}"
            )
            assert heading in text
            assert (f"Sample {sample['id'][1]}: in" in text) == has_several
            for reason in sample["reasons"]:
                by = reason.get("by")
                if by and by != [reason["id"], reason["sample"]]:
                    whom = f"sample {by[1]} of {by[0]!r}" if by[1] else repr(by[0])
                    assert f"preempted for {whom}: " in text
                if reason["is"] == "Discarded":
                    assert f"step {reason['step']} failed with it" in text
        title = "Prefix of sample 0: " if has_several else "Prefix: "
        assert (title in text) == (explained["prefix"] is not None)
        if explained["prefix"] is not None:
            assert explained["prefix"]["sample"] == 0


def test_the_order_of_the_parts_is_always_the_same(hostile: Path) -> None:
    code = (
        "import sys; from minfer.effects.cli.main import main; main(sys.argv[1:]); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "explain", str(hostile), "r9"]
    outputs = {
        subprocess.run(
            command,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    (text,) = outputs
    assert text.startswith("Request 'r9': ")


def test_a_wait_behind_others_in_plain_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(max_num_seqs=1))
    run.turn(*(Submit(request(name, 3, tokens=3)) for name in "abc"))
    run.drain()
    text = printed(capsys, saved(tmp_path, run), "c")
    assert text.splitlines()[:7] == [
        "Request 'c': 3 prompt tokens, at most 3 output tokens",
        (
            "Verdict: 6,000.0 ms of 9,000.0 ms: all rows of the batch were taken "
            "(--max-num-seqs 1)"
        ),
        "  remedy: raise --max-num-seqs above 1, or add engines (--replicas)",
        "In all 9,000.0 ms, until turn 9: 'length', 3 tokens, the first at 7,000.0 ms",
        (
            "      3,000.0 ms       3 turns  behind others in the queue, whose head "
            "waited for a free row of the batch"
        ),
        (
            "      3,000.0 ms       3 turns  head of the queue, waiting for a free row "
            "of the batch"
        ),
        (
            "      1,000.0 ms       1 turn   prefill: 1 step with 3 of its tokens and 0 "
            "of others"
        ),
    ]


def test_a_sample_that_has_not_ended_has_no_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config())
    run.turn(Submit(request("a", 3, tokens=9)))
    run.turn()
    run.turn()
    line = printed(capsys, saved(tmp_path, run), "a").splitlines()[2]
    assert line == "In all 2,000.0 ms, until turn 2: goes on, the first at 1,000.0 ms"


def test_of_a_first_token_before_the_journal_no_time_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config())
    run.turn(Submit(request("a", 3, tokens=5)))
    run.drain()
    assert ", the first at 1,000.0 ms" in printed(capsys, saved(tmp_path, run), "a")
    run.turns = run.turns[3:]
    path = saved(tmp_path, run)
    assert reported(capsys, path, "a")["samples"][0]["first"] is None
    line = printed(capsys, path, "a").splitlines()[2]
    assert line == "In all 5,000.0 ms, until turn 5: 'length', 5 tokens"


def test_the_longest_gap_names_the_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(max_num_batched_tokens=16))
    run.turn(Submit(request("a", 2, tokens=8)))
    run.turn()
    run.turn(Submit(request("19", 28)))
    run.turn(took=5.0)
    run.drain()
    path = saved(tmp_path, run)
    gap = reported(capsys, path, "a")["samples"][0]["gap"]
    assert gap == {
        "seconds": 5.0,
        "since": 2,
        "turn": 3,
        "step": 2,
        "rows": 2,
        "tokens": 16,
        "chunk": 15,
        "chunk_of": ["19", 0],
    }
    text = printed(capsys, path, "a")
    assert "longest time between outputs: 5,000.0 ms, turn 2 to 3, whose step had" in text
    assert "16 tokens of 2 samples, 15 of them a chunk of '19'" in text


def hits(run: Run, name: str) -> dict[str, Any]:
    hit = figures(run.config, explain(run.config, run.turns, name))["prefix"]
    assert isinstance(hit, dict)
    return hit


def test_what_block_size_would_have_hit() -> None:
    run = Run(config(block_size=16, max_num_batched_tokens=64))
    run.turn(Submit(request("before", 44, tokens=1)))
    run.drain()
    run.turn(Submit(request("close", [*range(40), *[49] * 9], tokens=1)))
    run.drain()
    hit = hits(run, "close")
    assert (hit["hit"], hit["block"], hit["why"]) == (32, 2, "differs")
    assert hit["shared"] == hit["computed"] == 40
    assert hit["would"] == {1: 40, 8: 40, 16: 32, 32: 32, 64: 0, 128: 0, 256: 0}
    run.turn(Submit(request("same", 44, tokens=1)))
    run.drain()
    hit = hits(run, "same")
    assert (hit["hit"], hit["why"]) == (32, "")  # the third block is not full
    assert hit["would"][1] == 43  # one is always computed
    run.turn(Submit(request("other", [3] * 20, tokens=1)))
    run.drain()
    assert hits(run, "other")["why"] == "new"


def test_evicted_or_still_being_computed() -> None:
    run = Run(config(num_blocks=7))
    run.turn(
        Submit(request("first", range(12), tokens=1)), Submit(request("twin", range(12)))
    )
    run.drain()
    hit = hits(run, "twin")
    assert (hit["why"], hit["shared"]) == ("pending", 12)
    run.turn(Submit(request("large", range(20, 47), tokens=1)))
    run.drain()
    run.turn(Submit(request("late", range(9), tokens=1)))
    run.drain()
    hit = hits(run, "late")
    assert (hit["why"], hit["hit"], hit["would"][4]) == ("evicted", 0, 8)
    late = figures(run.config, explain(run.config, run.turns, "late"))
    assert late["verdict"]["lines"][0] == (
        "Verdict: its first 8 tokens had been cached, and were evicted: only 0 of 9 were "
        "cached then"
    )


def test_what_passed_a_window_may_never_have_been_in_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(num_blocks=7, groups=(CacheGroup(5),)))
    run.turn(Submit(request("first", range(12), tokens=1)))
    run.drain()
    for n in range(3):
        run.turn(Submit(request(f"large{n}", range(20 + n, 40 + n), tokens=1)))
        run.drain()
    run.turn(Submit(request("late", range(9), tokens=1)))
    run.drain()
    hit = hits(run, "late")
    assert (hit["why"], hit["hit"]) == ("passed", 0)
    assert "was evicted or given back behind the window" in printed(
        capsys, saved(tmp_path, run), "late"
    )


def test_a_block_that_a_window_lacks_is_named_with_its_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last blocks of a window are evicted first."""
    run = Run(config(num_blocks=14, groups=(CacheGroup(), CacheGroup(5))))
    for name, prompt in (("first", range(24)), ("other", range(30, 39))):
        run.turn(Submit(request(name, prompt, tokens=1)))
        run.drain()
    run.turn(Submit(request("late", (*range(12), 40, 41), tokens=1)))
    run.drain()
    hit = hits(run, "late")
    assert (hit["why"], hit["hit"], hit["missed"]) == ("window", 8, 1)
    lines = printed(capsys, saved(tmp_path, run), "late")
    assert "was not cached in layer group 1, which has a window" in lines
    assert "block 2 (counted from 0) was not cached in layer group 1" in lines


def test_without_token_ids_only_whole_blocks_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config(block_size=4))
    run.turn(Submit(request("a", 14, tokens=1)))
    run.drain()
    run.turn(Submit(request("b", [*range(10), 40, 41, 42], tokens=1)))
    run.drain()
    shown = redacted_config(run.config)
    blind = Run(shown)
    for turn in run.turns:
        events = redacted(run.config, turn.before, turn.events, b"secret")
        blind.turns.append(turn_of(blind, events))
    assert hits(run, "b")["shared"] == 10
    hit = hits(blind, "b")
    assert (hit["shared"], hit["hit"]) == (8, 8)
    assert hit["would"] == {4: 8, 8: 8, 16: 0}
    assert "hit by block size, had nothing been evicted: 4: 8, 8: 8, 16: 0" in printed(
        capsys, saved(tmp_path, blind), "b"
    )


def turn_of(run: Run, events: Any) -> Turn:
    from minfer.engine import step

    turn = Turn(len(run.turns), run.state, events, step(run.config, run.state, events))
    run.state = turn.transition.state
    return turn


def test_a_rejection_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(config(num_blocks=4))
    run.turn(Submit(request("a", 90)))
    text = printed(capsys, saved(tmp_path, run), "a")
    assert (
        "'rejected', 0 tokens: 'prompt and output of up to 94 tokens need 24 KV blocks"
        in text
    )


def test_an_answers_id_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server numbers prompts: what it calls "a" is "a-0" to the engine."""
    run = Run(config())
    run.turn(Submit(request("a-0", 9)))
    run.drain()
    path = saved(tmp_path, run)
    assert printed(capsys, path, "a") == printed(capsys, path, "a-0")


def test_an_answer_is_all_of_its_requests_in_the_runs_of_all_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had two prompts; one had ended when the engine died, and the two samples of the
    other went on each by itself.
    """
    before, unconcerned, after = (Run(config()) for _ in range(3))
    before.turn(Submit(request("a-0", 9, tokens=2)), Submit(request("a-1", 9, tokens=9)))
    before.turn()
    before.turn()
    unconcerned.turn(Submit(request("b-0", 3)))
    unconcerned.drain()
    for name in ("a-1#4", "b-0#5", "a-1#6"):
        after.turn(Submit(request(name, 9, tokens=7)))
    after.drain()
    for number, run in enumerate((before, unconcerned, after)):
        name = f"20200101T00000{number}Z-1-000001.journal"
        write_journal(tmp_path / name, run.config, run.turns)
    answer = reported(capsys, tmp_path, "a")
    ids = [answer["id"], *[explained["id"] for explained in answer["others"]]]
    assert ids == ["a-0", "a-1", "a-1#4", "a-1#6"]
    ends = [explained["samples"][0]["end"] for explained in (answer, *answer["others"])]
    assert [bool(end) for end in ends] == [True, False, True, True]
    text = printed(capsys, tmp_path, "a-1")
    assert re.findall("^Request '(.*?)'", text, re.M) == ["a-1", "a-1#4", "a-1#6"]
    assert printed(capsys, tmp_path, "a-1#6").count("Request ") == 1
    assert main(["explain", str(tmp_path), "c"]) == 2
    assert "none of 6 requests is 'c'" in capsys.readouterr().err, "of all runs"


def test_what_is_damaged_after_a_request_does_not_hide_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config())
    run.turn(Submit(request("a-0", 3, tokens=2)))
    run.drain()
    run.turn(Submit(request("b-0", 3, tokens=2)))
    run.drain()
    path = saved(tmp_path, run)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"b-0")] ^= 1
    path.write_bytes(data)
    assert reported(capsys, path, "a")["id"] == "a-0"


def test_what_it_refuses(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, name, pattern in (
        (
            hostile,
            "r99999",
            r"minfer: .*: none of \d+ requests is 'r99999'; near: r9.*explain .* lists",
        ),
        (tmp_path / "gone", "r1", r"minfer: .*gone: there is no such file or folder"),
        (tmp_path, "r1", r"minfer: .*: there is no \.journal file in this folder"),
    ):
        assert main(["explain", str(path), name]) == 2
        assert re.fullmatch(pattern + r".*\n", capsys.readouterr().err)


def test_nothing_of_a_request_reaches_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config())
    name = "a\x1b[2J{0}{reason}"
    run.turn(Submit(request(name, 3)))
    run.turn(fail="\x1b[31m{error}")
    run.drain()
    text = printed(capsys, saved(tmp_path, run), name)
    assert "\x1b" not in text
    assert "{error}" in text


def test_a_live_run_is_explained_as_its_metrics_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, journal = str(write_checkpoint(tmp_path / "tiny")), tmp_path / "journal"
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 12,
        "max_num_seqs": 6,
        "block_size": 8,
    }
    with LLM(
        folder,
        executor="oracle",
        journal=str(journal),
        max_model_len=64,
        max_num_batched_tokens=24,
        **settings,
    ) as llm:
        params = [
            SamplingParams(max_tokens=3 + 5 * i, temperature=0, ignore_eos=True)
            for i in range(9)
        ]
        outputs = llm.generate([[i + 1] * (3 + 2 * i) for i in range(9)], params)
    for output in outputs:
        explained = reported(capsys, journal, output.request_id)
        (sample,) = explained["samples"]
        metrics = output.metrics
        assert (
            sum(
                r["is"] == "Preempted" and r["id"] == output.request_id
                for r in sample["reasons"]
            )
            == metrics.preemptions
        )
        waits: dict[str, float] = {}
        for span in sample["parts"]:
            if span["kind"] == "line" and not span["preempted"]:
                waits[span["cause"]] = waits.get(span["cause"], 0.0) + span["seconds"]
        expected = {
            cause: s for cause, s in metrics.queue_times.items() if cause != "step"
        }
        assert {
            cause: s for cause, s in waits.items() if cause != "step" and s
        } == pytest.approx(expected, abs=1e-9)
        assert sample["first"] == metrics.first_token_time
        assert sample["last"][1] == metrics.last_token_time


def test_sizes_are_those_that_engines_have() -> None:
    assert set(SIZES) >= {1, 8, 16, 32, 64, 128}
    assert EngineConfig(num_blocks=1).block_size in SIZES


def test_drafts_are_reported_where_there_were_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, by_device())
    (sample,) = reported(capsys, path, "a")["samples"]
    drafts = sample["drafts"]
    assert 0 < drafts["accepted"] < drafts["proposed"]
    assert drafts["length"] == 1 + drafts["accepted"] / drafts["rows"]
    words = f"drafts: {drafts['accepted']} of {drafts['proposed']} accepted"
    assert words in printed(capsys, path, "a")
    run = Run(config())
    run.turn(Submit(request("a", 5)))
    run.drain()
    plain = saved(tmp_path, run)
    assert reported(capsys, plain, "a")["samples"][0]["drafts"] is None
    assert "drafts" not in printed(capsys, plain, "a")


def test_what_is_cut_off_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured, turns = recorded(HOSTILE)
    path = tmp_path / "run.journal"
    write_journal(path, configured, turns)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["explain", str(path)]) == 0
    listed = capsys.readouterr()
    assert "run.journal: the last record is cut off" in listed.err
    (name, *_) = read_journal(path).request_ids()
    assert main(["explain", str(path), name]) == 0
    assert "run.journal: the last record is cut off" in capsys.readouterr().err
