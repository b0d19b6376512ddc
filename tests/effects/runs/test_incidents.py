"""Incidents as an operator meets them, recorded by simulation: `minfer explain` names the
cause and the remedy of each in its first lines.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from minfer.blocks.keys import block_keys, root_key
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.simulation.cost import CostModel
from minfer.simulation.oracle import Oracle
from minfer.simulation.simulate import Simulation

ROOT = root_key(b"model")
SIZE = 16
COSTS = CostModel(
    name="a GPU", decode=((64, 0.01),), mixed=0.01, token=0.00005, sequence=0.0001
)


def engine(**settings: Any) -> EngineConfig:
    known = {
        "num_blocks": 4096,
        "block_size": SIZE,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    return EngineConfig(**{**known, **settings})


def asked(name: str, prompt: Iterable[int], tokens: int, **more: Any) -> Request:
    ids = tuple(prompt)
    keys = block_keys(ROOT, ids, SIZE)
    return Request(id=name, prompt=ids, max_tokens=tokens, root=ROOT, keys=keys, **more)


def text(number: int, length: int) -> tuple[int, ...]:
    """Token ids that no other text has in this order."""
    return tuple(random.Random(number).choices(range(10_000), k=length))


def recorded(
    folder: Path, config: EngineConfig, arrivals: Iterable[tuple[float, Request]]
) -> str:
    path = folder / "run.journal"
    executor = Oracle(config.block_size, 50_000, config.groups)
    simulation = Simulation(config, executor, COSTS, arrivals)
    write_journal(path, config, simulation.turns())
    return str(path)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
def test_a_pool_that_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = engine(num_blocks=64)
    path = recorded(
        tmp_path,
        config,
        ((i / 20, asked(f"r{i}", text(i, 200), 100)) for i in range(25)),
    )
    verdict, remedy, *rest = explained(capsys, path)
    assert verdict.startswith("Verdict: requests waited ")
    assert "the KV cache was full: it has 64 blocks of 16 tokens" in verdict
    assert "preemptions" in verdict
    assert "--gpu-memory-utilization" in remedy
    slowest = rest[rest.index(f"25 requests in {path}") + 2].split()[0]
    _, verdict, remedy, *_ = explained(capsys, path, slowest)
    assert verdict.startswith("Verdict: ")
    assert "the KV cache was full" in verdict
    assert "--num-gpu-blocks-override" in remedy


@pytest.mark.long
def test_a_priority_that_starves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An urgent stream that fills the engine, and one request that is not urgent."""
    config = engine(max_num_seqs=4, policy=Priority())
    urgent = [
        (i / 9.2, asked(f"urgent-{i}", text(i, 50), 40, priority=0)) for i in range(120)
    ]
    patient = (1.05, asked("nightly", text(900, 50), 20, priority=5))
    path = recorded(tmp_path, config, sorted([*urgent, patient], key=lambda a: a[0]))
    lines = explained(capsys, path)
    first_lines = "\n".join(lines[:2])
    assert "1 request of priority 5 waited up to" in first_lines
    assert "'nightly'" in first_lines
    assert "--scheduling-policy priority let them go first" in first_lines
    assert "ageing" in first_lines
    _, verdict, remedy, *_ = explained(capsys, path, "nightly")
    assert "were of requests that came later" in verdict
    assert "their priority was 0, its own 5" in verdict
    assert "raise its priority" in remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: (*ids[:7], 5000, *ids[8:]), "has id 5000 instead of 7"),
        (lambda ids: (*ids[:7], 5000, *ids[7:]), "is inserted (its id is 5000)"),
        (lambda ids: (*ids[:7], *ids[8:]), "is left out (the other has id 7)"),
    ],
)
def test_a_prefix_that_differs_in_one_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    system = tuple(range(1000))
    requests = [
        (float(i), asked(f"r{i}", (*system, *range(2000 + 50 * i, 2050 + 50 * i)), 5))
        for i in range(4)
    ]
    changed = (4.0, asked("odd", (*change(system), *range(3000, 3050)), 5))
    path = recorded(tmp_path, engine(), [*requests, changed])
    verdict, remedy, *_ = explained(capsys, path)
    assert "1 prompt differs from another in one token, as 'odd' from 'r0'" in verdict
    assert "in token 7 (counted from 0)" in verdict
    # Of the 1,000 tokens, 62 blocks of 16: the others had so many, and this one none.
    assert "up to 992 tokens were computed instead of cached" in verdict
    assert "put what changes" in remedy
    _, verdict, remedy, *_ = explained(capsys, path, "odd")
    assert verdict.startswith("Verdict: its prompt differs from that of 'r0' in one ")
    assert f"token: token 7, counted from 0, {words}, and the " in verdict
    assert verdict.endswith("tokens were cached, without it up to 992")
    assert " ms" not in verdict  # what the miss cost is not measured
    assert "put what changes" in remedy
    _, verdict, *rest = explained(capsys, path, "r3")
    assert verdict.startswith("Verdict: nothing held it up")
    assert any(line.startswith("Prefix: 992 of 1,050 tokens were") for line in rest)


def test_a_prefix_that_ends_one_token_before_a_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = engine(block_size=64)
    system = tuple(range(127))

    def with_keys(name: str, begin: int) -> Request:
        ids = (*system, *range(begin, begin + 9))
        keys = block_keys(ROOT, ids, 64)
        return Request(id=name, prompt=ids, max_tokens=3, root=ROOT, keys=keys)

    path = recorded(
        tmp_path, config, [(0.0, with_keys("a", 500)), (1.0, with_keys("b", 600))]
    )
    verdict, remedy, *_ = explained(capsys, path)
    assert "as 'b' by one token: it shares 127 tokens with 'a'" in verdict
    assert "--block-size below 64" in remedy
    _, verdict, remedy, *_ = explained(capsys, path, "b")
    assert "its prompt misses a block by one token: it shares 127 tokens" in verdict
    assert "the block ends at 128" in verdict
    assert "with --block-size 16, 112 tokens would have been cached" in remedy


def test_a_prompt_of_whole_blocks_misses_its_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [(float(i), asked(f"r{i}", range(32), 3)) for i in range(2)]
    path = recorded(tmp_path, engine(), same)
    _, verdict, remedy, *_ = explained(capsys, path, "r1")
    assert "misses a block by one token: all its 32 tokens are those of 'r0'" in verdict
    assert "Only 16 tokens were cached" in verdict
    assert "--block-size 8, 24 tokens" in remedy


def test_a_quiet_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path, engine(), [(0.0, asked("only", range(20), 50))])
    assert explained(capsys, path)[0] == "Verdict: nothing held requests up"
    _, verdict, *_ = explained(capsys, path, "only")
    assert verdict.startswith("Verdict: nothing held it up: ")
    assert verdict.endswith("of its time was decode")


def test_the_slowest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [30, 10, 50, 20, 40]
    requests = [(0.0, asked(f"r{n}", text(n, 20), n)) for n in lengths]
    path = recorded(tmp_path, engine(), requests)
    lines = explained(capsys, path, "--slowest", "2")
    assert lines[1] == f"5 requests in {path}; the 2 that took longest"
    assert [line.split()[0] for line in lines[3:5]] == ["r50", "r40"]
    assert main(["explain", path, "r10", "--slowest", "2"]) != 0
    assert "leave it or REQUEST out" in capsys.readouterr().err
