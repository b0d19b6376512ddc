"""Beside requests with drafts those under a grammar have none, and no output changes: the
bundled model, on the CPU.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import define, field, frozen

from minfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from minfer.analysis.drafts import sample_drafts, tally_of
from minfer.records.messages import Preempted
from minfer.records.plan import Plan
from minfer.speculate.tally import DraftTally
from tests.circles import claimed
from tests.effects.live.test_structured_outputs import REPLAY, SCHEMA

ROOMY: Final[dict[str, Any]] = {"dtype": "float32", "num_gpu_blocks_override": 199}
CHOICES = ["certainly yes", "certainly not", "maybe"]
PROMPTS = ["def read(path):\n", "class Stack", "import os\n", "x = ", "for line in "] * 2
# What is asked, in turn: constraints, and the rest.
REQUESTED: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA},
    {"regex": "(key: [a-z]{2,6}; ){1,3}end of the list"},
    {"choice": CHOICES},
    {},
    {"grammar": 'start: "begin(" start ")" | /[0-9]{2,4}/ | start " plus " start'},
    {"json": {"const": "one two three four five"}},
    {"regex": "[ab]{5}(, then [ab]{5}){2}"},
    {"json_object": True},
    {},
)
MORE: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1},
    {"temperature": 0.7, "top_p": 0.9, "n": 3, "presence_penalty": 0.5},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1, "logprobs": 0, "min_tokens": 20},
    {"temperature": 1, "stop": ["plus"], "repetition_penalty": 1.1},
    {"temperature": 0, "min_tokens": 30},
)


def params(count: int) -> list[SamplingParams]:
    """All sorts of requests, no two alike."""
    chosen = []
    for i in range(count):
        requested = REQUESTED[i % len(REQUESTED)]
        bound = StructuredOutputs(**requested) if requested else None
        settings = {"max_tokens": 60, **MORE[i % len(MORE)]}
        chosen.append(SamplingParams(structured_outputs=bound, seed=i, **settings))
    return chosen


@define(eq=False, repr=False)
class Looking:
    """Looks at what goes to an executor, and at what comes back."""

    llm: LLM
    tally: DraftTally = field(factory=DraftTally)
    separate: int = 0  # rows that had drafts and were sampled apart
    beside: int = 0  # steps with rows of both kinds
    reasons: list[object] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        driver = self.llm.worker.driver
        executor: Any = driver.executor
        launch, turn = executor.launch, driver.turn

        def launched(plan: Plan) -> None:
            drafted = {draft.index for draft in plan.drafts}
            self.separate += len(drafted.intersection(plan.deferred))
            self.beside += bool(drafted and plan.deferred)
            launch(plan)

        def turned(before: Any = None) -> Any:
            state = driver.state
            transition = turn(before)
            self.reasons += transition.reasons
            self.tally = self.tally.plus(
                tally_of(sample_drafts(state, driver.last_events, transition))
            )
            return transition

        executor.launch = launched
        driver.turn = turned  # type: ignore[method-assign]  # to see what it decided


@frozen
class Reported:
    """What a sample is, but for the last bits of its log-probabilities."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None
    stopped_by: int | str | None
    error: str | None
    ranks: tuple[tuple[int, int], ...]


def reported(outputs: Sequence[RequestOutput]) -> list[Reported]:
    results = []
    for completion in (completion for output in outputs for completion in output.outputs):
        logprobs = completion.logprobs or ()
        ranks = tuple((t, lp.rank) for place in logprobs for t, lp in place.items())
        ends = completion.finish_reason, completion.stop_reason, completion.error
        results.append(
            Reported(tuple(completion.token_ids), completion.text, *ends, ranks)
        )
    return results


def serve(llm: LLM, count: int) -> list[Reported]:
    prompts = (PROMPTS * count)[:count]
    return reported(llm.generate(prompts, params(count), use_tqdm=False))


@cache
def plain(count: int) -> list[Reported]:
    """What there is without drafts, in an engine with room for all."""
    with LLM(**ROOMY, max_num_seqs=16) as llm:
        return serve(llm, count)


def drafting(method: str, drafts: int, *, adaptive: bool = False) -> dict[str, Any]:
    return {
        "method": method,
        "num_speculative_tokens": drafts,
        "adaptive": adaptive,
        "disable_by_batch_size": 99,
    }


WAYS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("ngram", 4, {"steps_in_flight": 1, "max_num_seqs": 16}),
    ("ngram", 7, {"max_num_seqs": 16}),
    ("suffix", 4, {"max_num_seqs": 6, "max_num_batched_tokens": 24}),
    (
        "ngram",
        4,
        {
            "block_size": 8,
            "num_gpu_blocks_override": 26,
            "max_model_len": 128,
            "max_num_seqs": 9,
        },
    ),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "drafts", "settings"),
    WAYS,
    ids=["depth 1", "depth 2", "chunked", "preempted"],
)
@pytest.mark.parametrize("count", [20, *claimed([120])])
def test_whatever_is_drafted_outputs_are_those_without(
    method: str, drafts: int, settings: dict[str, Any], count: int
) -> None:
    expected = plain(count)
    config = drafting(method, drafts)
    with LLM(speculative_config=config, **{**ROOMY, **settings}) as llm:
        looking = Looking(llm)
        assert serve(llm, count) == expected
        assert serve(llm, count) == expected  # with what is cached
    assert not looking.separate
    assert looking.beside > 5
    assert sum(looking.tally.accepted) > 5
    given_way = any(isinstance(reason, Preempted) for reason in looking.reasons)
    assert given_way == ("block_size" in settings)
    ends = {output.reason for output in expected}
    assert ends >= {"stop", "length"}


@pytest.mark.long
def test_as_many_drafts_as_pay_change_nothing_either() -> None:
    config = drafting("ngram", 4, adaptive=True)
    with LLM(speculative_config=config, max_num_seqs=16, **ROOMY) as llm:
        assert serve(llm, 20) == plain(20)


@pytest.mark.long
def test_a_draft_model_drafts_nothing_for_rows_under_a_grammar() -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(speculative_config=config, max_num_seqs=16, **ROOMY) as llm:
        looking = Looking(llm)
        assert serve(llm, 20) == plain(20)
    assert not looking.separate
    assert sum(looking.tally.accepted) > 20


@pytest.mark.long
def test_a_journal_replays_without_library_model_and_torch(tmp_path: Path) -> None:
    for redact in (False, True):
        folder = tmp_path / str(redact)
        with LLM(
            journal=folder,
            journal_redact=redact,
            speculative_config=drafting("ngram", 4),
            max_num_seqs=16,
            **ROOMY,
        ) as recorded:
            looking = Looking(recorded)
            serve(recorded, 10)
        assert looking.beside
        replayed = subprocess.run(
            [sys.executable, "-c", REPLAY, str(folder)], capture_output=True, text=True
        )
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "drafts" in replayed.stdout
