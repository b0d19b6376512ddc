"""Drafts under grammars change no output, and forced text takes fewer steps: the bundled
model, on the CPU.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import define, field, frozen

from minfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from minfer.effects.live import foreseen, grammar_masks
from minfer.effects.text.grammars import at_once
from minfer.effects.text.grammars.at_once import AtOnce
from minfer.messages import Executed, Failed, Preempted
from minfer.plan import Plan
from minfer.runs.drafts import judged, tally_of
from minfer.speculate.tally import Tally
from tests.circles import long
from tests.effects.live.stuck import stick_at_the_end
from tests.effects.live.test_structured_outputs import REPLAY, SCHEMA
from tests.effects.text.grammars.bundled import matcher

ROOMY: Final[dict[str, Any]] = {"dtype": "float32", "num_gpu_blocks_override": 199}
NAMES = {
    "the_name_of_the_first_person": {"type": "string", "maxLength": 4},
    "measured_temperature_in_celsius": {"type": "integer", "minimum": 0, "maximum": 999},
    "is_the_door_open_at_the_moment": {"type": "boolean"},
    "a_list_of_known_categories": {
        "type": "array",
        "items": {"enum": ["first", "last"]},
        "maxItems": 1,  # else how much is forced is up to the model
    },
}
LONG_NAMES = {
    "type": "object",
    "properties": NAMES,
    "required": [*NAMES],
    "additionalProperties": False,
}
CHOICES = ["certainly yes", "certainly not", "maybe"]
PROMPTS = ["def read(path):\n", "class Stack", "import os\n", "x = ", "for line in "] * 2
# What is asked, in turn: constraints, and the rest.
ASKED: tuple[dict[str, Any], ...] = (
    {"json": LONG_NAMES, "disable_any_whitespace": True},
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
    made = []
    for i in range(count):
        asked = ASKED[i % len(ASKED)]
        bound = StructuredOutputs(**asked) if asked else None
        more = {"max_tokens": 60, **MORE[i % len(MORE)]}
        made.append(SamplingParams(structured_outputs=bound, seed=i, **more))
    return made


@define(eq=False, repr=False)
class Looking:
    """Looks at what goes to an executor, and at what comes back."""

    llm: LLM
    tally: Tally = field(factory=Tally)
    rows: int = 0  # that yielded something
    apart: int = 0  # rows that had drafts and were sampled apart
    wrong: list[tuple[int, ...]] = field(factory=list)  # drafts that may not come
    reasons: list[object] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        driver = self.llm.worker.driver
        executor: Any = driver.executor
        launch, collect, turn = executor.launch, executor.collect, driver.turn

        def launched(plan: Plan) -> None:
            self.look(plan)
            launch(plan)

        def collected() -> Executed | Failed:
            result: Executed | Failed = collect()
            assert isinstance(result, Executed), result
            self.rows += sum(map(bool, result.yields))
            return result

        def turned(before: Any = None) -> Any:
            was = driver.state
            found = turn(before)
            self.reasons += found.reasons
            self.tally = self.tally.plus(tally_of(judged(was, driver.taken, found)))
            return found

        executor.launch, executor.collect = launched, collected
        driver.turn = turned  # type: ignore[method-assign]  # to see what it decided

    def look(self, plan: Plan) -> None:
        """Grammars allow what is drafted."""
        run = self.llm.worker.driver.state.running
        for draft in plan.drafts:
            if draft.index not in plan.apart:
                continue
            self.apart += 1
            i = run.gens.index(plan.gens[draft.index])
            request = run.seqs[i].request
            output = run.tokens(i, self.llm.setup.config.block_size)
            asked = request.sampling.structured_outputs
            assert asked is not None
            walk = self.llm.grammars.get(asked).matcher()
            walk.advance(output[len(request.prompt) :])
            if walk.allowed(draft.tokens) < len(draft.tokens):
                self.wrong.append(draft.tokens)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And nothing takes long, however busy this machine is."""
    for module, names in {
        grammar_masks: ("MASK_WAIT",),
        foreseen: ("LONG", "IN_A_TURN"),
        at_once: ("BEHIND", "MASK_WAIT"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, 60.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@frozen
class Told:
    """What a sample is, but for the last bits of its log-probabilities."""

    tokens: tuple[int, ...]
    text: str
    reason: str | None
    stopped_by: int | str | None
    error: str | None
    ranks: tuple[tuple[int, int], ...]


def told(outputs: Sequence[RequestOutput]) -> list[Told]:
    found = []
    for one in (one for output in outputs for one in output.outputs):
        every = one.logprobs or ()
        ranks = tuple((t, lp.rank) for place in every for t, lp in place.items())
        ends = one.finish_reason, one.stop_reason, one.error
        found.append(Told(one.token_ids, one.text, *ends, ranks))
    return found


def serve(llm: LLM, count: int) -> list[Told]:
    prompts = (PROMPTS * count)[:count]
    return told(llm.generate(prompts, params(count), use_tqdm=False))


@cache
def plain(count: int) -> list[Told]:
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


@pytest.mark.parametrize(
    ("method", "drafts", "settings"),
    WAYS,
    ids=["depth 1", "depth 2", "chunked", "preempted"],
)
@pytest.mark.parametrize("count", [20, *long([120])])
def test_whatever_is_drafted_outputs_are_those_without(
    method: str, drafts: int, settings: dict[str, Any], count: int
) -> None:
    expected = plain(count)
    config = drafting(method, drafts)
    with LLM(speculative_config=config, **{**ROOMY, **settings}) as llm:
        looking = Looking(llm)
        assert serve(llm, count) == expected
        assert serve(llm, count) == expected  # with what is cached
    assert not looking.wrong
    assert looking.apart > 40
    assert sum(looking.tally.accepted) > 100
    given_way = any(isinstance(one, Preempted) for one in looking.reasons)
    assert given_way == ("block_size" in settings)
    ends = {one.reason for one in expected}
    assert ends >= {"stop", "length"}


def test_as_many_drafts_as_pay_change_nothing_either() -> None:
    config = drafting("ngram", 4, adaptive=True)
    with LLM(speculative_config=config, max_num_seqs=16, **ROOMY) as llm:
        assert serve(llm, 20) == plain(20)


@pytest.mark.parametrize(("temperature", "drafts"), [(0, 4), (1, 4), (1, 8)])
def test_forced_text_is_drafted_and_takes_fewer_steps(
    temperature: float, drafts: int
) -> None:
    bound = StructuredOutputs(json=LONG_NAMES, disable_any_whitespace=True)
    made = [
        SamplingParams(
            structured_outputs=bound, temperature=temperature, seed=i, max_tokens=150
        )
        for i in range(4)
    ]
    rows, texts = [], []
    for config in (None, drafting("ngram", drafts)):
        with LLM(speculative_config=config, **ROOMY) as llm:
            looking = Looking(llm)
            outputs = llm.generate(PROMPTS[:4], made, use_tqdm=False)
        texts.append(told(outputs))
        rows.append(looking.rows)
    assert texts[0] == texts[1]
    tokens = sum(len(one.tokens) for one in texts[0])
    assert rows[0] >= tokens
    assert tokens > 2.5 * rows[1], "tokens of a step of a row, with drafts"
    proposed, accepted = map(sum, (looking.tally.proposed, looking.tally.accepted))
    assert accepted > 0.9 * proposed > 0.4 * tokens


def test_where_coins_decide_they_do_not_for_those_under_a_grammar() -> None:
    asked = [one for one in params(20) if one.structured_outputs is not None]
    found = []
    coins = {**drafting("ngram", 4), "rejection_sample_method": "standard"}
    for config in (None, coins):
        with LLM(speculative_config=config, max_num_seqs=16, **ROOMY) as llm:
            looking = Looking(llm)
            prompts = PROMPTS * 2
            outputs = llm.generate(prompts[: len(asked)], asked, use_tqdm=False)
            found.append(told(outputs))
    assert found[0] == found[1]
    assert sum(looking.tally.accepted) > 20


def test_a_draft_model_leaves_those_under_a_grammar_alone() -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(speculative_config=config, max_num_seqs=16, **ROOMY) as llm:
        looking = Looking(llm)
        assert serve(llm, 20) == plain(20)
    assert not looking.apart
    assert sum(looking.tally.accepted) > 20


def test_who_cannot_go_on_ends_where_it_does_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stick_at_the_end(monkeypatch)
    asked = StructuredOutputs(choice=["certainly", "certainly not"])
    found = []
    for config in (None, drafting("ngram", 8)):
        with LLM(speculative_config=config, **ROOMY) as llm:
            looking = Looking(llm)
            how = SamplingParams(structured_outputs=asked, temperature=0)
            both = [how, SamplingParams(temperature=0, max_tokens=9)]
            found.append(told(llm.generate(PROMPTS[:2], both, use_tqdm=False)))
    assert found[0] == found[1]
    assert found[0][0].error == f"{grammar_masks.STUCK}: took too long"
    assert found[0][0].text.startswith("certainly")
    assert looking.apart


def test_matchers_that_break_behind_drafts_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third time, a matcher is worn out by what is only drafted."""
    behind, calls = AtOnce._behind, [0]

    def breaking(self: AtOnce, moves: Any, lines: Any) -> None:
        behind(self, moves, lines)
        for one in moves:
            calls[0] += 1
            if one.drafts and calls[0] % 3 == 0:
                one.spoilt, one.reached = True, one.reached // 2

    monkeypatch.setattr(AtOnce, "_behind", breaking)
    with LLM(speculative_config=drafting("ngram", 4), max_num_seqs=16, **ROOMY) as llm:
        assert serve(llm, 20) == plain(20)
    assert calls[0] > 50


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
        assert looking.apart > 20
        replayed = subprocess.run(
            [sys.executable, "-c", REPLAY, str(folder)], capture_output=True, text=True
        )
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "drafts" in replayed.stdout


def test_a_matcher_knows_what_it_forces_in_the_bundled_vocabulary() -> None:
    """What the counts above rest on."""
    walk = matcher(json=LONG_NAMES, disable_any_whitespace=True)
    assert len(walk.forced()) > 5
