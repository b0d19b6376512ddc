"""The line to the engine: what crosses it is plain data, and nothing else does."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from minfer import LLM, SamplingParams
from minfer.effects.live.client import EngineDied, EngineMessage, Snapshot, TurnOutputs
from minfer.records.messages import Admitted, Missed, Preempted, QueueBlocked
from tests.effects.watched import settle

ROOT = Path(__file__).resolve().parents[3]
SMALL: dict[str, Any] = {
    "executor": "oracle",
    "block_size": 8,
    "num_gpu_blocks_override": 12,
    "max_num_seqs": 6,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
}


def is_plain(value: object) -> bool:
    """Whether a value is made of what any language has, and of frozen records of it."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if isinstance(value, tuple | list | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    kind: Any = type(value)
    if not attrs.has(kind) or kind.__setattr__ is object.__setattr__:
        return False
    return all(is_plain(getattr(value, field.name)) for field in attrs.fields(kind))


def test_plain_is_plain() -> None:
    assert is_plain(EngineDied(("a",), "why"))
    assert is_plain({("a", 0): [([1, 2], [0.5])]})
    assert not is_plain(EngineDied(("a",), object()))  # type: ignore[arg-type]  # the point
    assert not is_plain([lambda: None])


def test_messages_are_frozen_and_plain(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run in which all kinds of reasons occur, and of an engine that breaks."""
    messages: list[EngineMessage] = []
    snapshots: list[Snapshot] = []
    with LLM(folder, **SMALL) as llm:
        llm.client.listen(messages.append)
        llm.frontend.after.append(lambda: snapshots.append(llm.client.snapshot()))
        params = [
            SamplingParams(max_tokens=3 + 5 * i, temperature=0, ignore_eos=True)
            for i in range(9)
        ]
        llm.generate([[5] * (3 + 2 * i) for i in range(9)], params)
        settle(llm)
        monkeypatch.setattr(llm.worker.driver, "turn", lambda _before: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            llm.generate([1], params[0])
    *news, death = messages
    assert death == EngineDied(
        ("9",), "the engine broke: ZeroDivisionError('division by zero')"
    )
    assert {type(message) for message in news} == {TurnOutputs}
    reasons = [
        r for message in news if isinstance(message, TurnOutputs) for r in message.reasons
    ]
    assert {type(reason) for reason in reasons} >= {Admitted, QueueBlocked, Preempted}
    assert {type(reason) for reason in reasons} <= {
        Admitted,
        QueueBlocked,
        Preempted,
        Missed,
    }
    for record in (*messages, *snapshots):
        assert is_plain(record), record
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            record.time = 0.0  # type: ignore[misc, union-attr]  # the point


def test_log_probabilities_are_part_of_the_news() -> None:
    news: list[EngineMessage] = []
    with LLM(num_gpu_blocks_override=64) as llm:
        llm.client.listen(news.append)
        sampling = SamplingParams(
            max_tokens=5, logprobs=2, temperature=0, ignore_eos=True
        )
        quiet = attrs.evolve(sampling, logprobs=None)
        outputs = llm.generate(["def ", "import "], [sampling, quiet])
    assert all(map(is_plain, news))
    reported = [
        beside
        for message in news
        if isinstance(message, TurnOutputs) and message.logprobs
        for name, row in zip(message.ids, message.logprobs, strict=True)
        for beside in row
        if name == ("0", 0)
    ]
    expected = [
        next(iter(by_id.values())) for by_id in outputs[0].outputs[0].logprobs or ()
    ]
    assert [entry.logprob for entry in reported] == [entry.logprob for entry in expected]


@pytest.mark.long
def test_no_other_module_touches_the_queue() -> None:
    """Folders above use the client and the frontend of a model, not the
    engine's insides.
    """
    allowed = {
        "effects/live/served_model.py",  # makes it
        # It tells API servers of its cache and its load.
        "effects/cluster/engine_server/engine_process.py",
        "effects/cli/verify/logit_differences.py",  # of the executor's own model
        "effects/cli/compare/measure_level.py",  # likewise
    }
    for path in sorted((ROOT / "effects").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "worker":
                assert name in allowed, f"{name}, line {node.lineno}"
