"""Coins decide on a device as the pure rule says; and in an engine, whatever is asked
for.
"""

import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, evolve, field

from minfer.effects.execution.device import device_rows
from minfer.records.messages import Executed, Failed, Preempted
from minfer.records.plan import Plan
from minfer.records.request import Request, SamplingParams
from minfer.records.speculation import DEVICE, HOST, REJECTION
from minfer.sampling.reference_sampler import RowSampling, next_token
from minfer.speculate.accept import TargetOutput, Verdict
from minfer.speculate.rejection import Streams, rejection, sample_draft
from tests.circles import claimed
from tests.effects.execution.drafting import drafting, guessing, speculation, watch_steps
from tests.effects.execution.test_draft_model import near, other, same
from tests.effects.execution.test_shaped import asking as shaped
from tests.effects.execution.test_speculative_step import DRAFTS, Drafted, World, check
from tests.effects.execution.test_verified import CONFIG, WANTED, Hand, unreadable
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Tokens,
    asking,
    check_scores,
    requests,
)

pytestmark = pytest.mark.usefixtures("device_kind")


# --- the draws of a step ----------------------------------------------------------------


def thrown(rng: random.Random, target: TargetOutput) -> tuple[Drafted, Verdict]:
    """Drafts of a row, said or drawn, and which of them coins let stand."""
    count = rng.randrange(DRAFTS + 1)
    if rng.random() < 0.4:
        return emitted(rng, target, count)
    tokens, lines, chances = list[int](), list[list[float]](), []
    streams = Streams.of(target.sampling.seed, target.sampling.sample)
    for _ in range(count):
        # A draft model that knows of the drafts before, as its target does.
        exact = target.shape_logits(tokens)
        line = [x + rng.gauss(0, 0.5) for x in exact]
        drawn_token = sample_draft(
            line, bare(target.sampling), (*target.tokens, *tokens), 0, streams
        )
        tokens.append(drawn_token.token)
        lines.append(line)
        chances.append(drawn_token.chances)
    return Drafted((*tokens,), (*lines,)), rejection(target, tokens, chances)


def emitted(
    rng: random.Random, target: TargetOutput, count: int
) -> tuple[Drafted, Verdict]:
    """Drafts that are likely."""
    tokens = list[int]()
    for _ in range(count):
        line = target.shape_logits(tokens)
        likely = sorted(range(VOCAB), key=line.__getitem__)[-1 - rng.randrange(2)]
        tokens.append(likely if rng.random() < 0.9 else rng.randrange(VOCAB))
    return Drafted((*tokens,)), rejection(target, tokens, [])


def bare(sampling: RowSampling) -> RowSampling:
    """Without what shapes logits, as these are shaped."""
    return RowSampling(
        seed=sampling.seed,
        sample=sampling.sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
    )


@pytest.mark.parametrize("seed", range(6))
def test_as_the_pure_rule_says(device_kind: str, seed: int) -> None:
    world = World.make(random.Random(seed), device_kind, thrown)
    check(random.Random(seed), world, 3)


# --- in an engine -----------------------------------------------------------------------


@define
class Text:
    """What is known of a row, and how it draws."""

    how: RowSampling
    prompt: int
    known: tuple[int, ...]


@define
class Judge:
    """Draws again, by the pure rules and by transformers, whatever an executor yields;
    all of it has to be the same.
    """

    target: Any
    draft: Any = None  # a draft model, in transformers
    texts: dict[int, Text] = field(factory=dict)  # by generation
    judged: int = 0  # rows with drafts, in steps
    stood: int = 0  # drafts

    def check(self, plan: Plan, result: Executed | Failed) -> None:
        """A step is done."""
        assert isinstance(result, Executed)
        for new_row in plan.opens:
            text = Text(new_row.sampling, new_row.prompt, new_row.known)
            self.texts[plan.run_ids[new_row.index]] = text
        drafts = {draft.index: draft.tokens for draft in plan.drafts}
        for entry, (gen, tokens) in enumerate(
            zip(plan.run_ids, result.yields, strict=True)
        ):
            if not tokens:
                continue
            text = self.texts[gen]
            if entry in drafts:
                count = plan.num_scheduled_tokens[entry] - 1
                expected = self.verdict(text, drafts[entry], count).tokens
                self.judged, self.stood = self.judged + 1, self.stood + len(expected) - 1
            else:
                expected = tuple(self.plainly(text, len(tokens)))
            assert tokens == expected
            text.known += tokens

    def verdict(self, text: Text, emitted: tuple[int, ...], count: int) -> Verdict:
        """What comes of drafts."""
        drafts, proposed = list(emitted), []
        while len(drafts) < count:
            known_tokens = (*text.known, *drafts)
            [line] = emitted_after(self.draft, known_tokens, 1)
            streams = Streams.of(text.how.seed, text.how.sample)
            drawn_token = sample_draft(line, text.how, known_tokens, text.prompt, streams)
            drafts.append(drawn_token.token)
            proposed.append(drawn_token.chances)
        lines = emitted_after(self.target, (*text.known, *drafts), count + 1)
        target = TargetOutput(
            sampling=text.how,
            tokens=text.known,
            num_prompt_tokens=text.prompt,
            logits=(*lines,),
        )
        return rejection(target, drafts, proposed)

    def plainly(self, text: Text, count: int) -> Iterator[int]:
        """What is drawn without drafts."""
        known_tokens = text.known
        for _ in range(count):
            [line] = emitted_after(self.target, known_tokens, 1)
            known_tokens = (
                *known_tokens,
                next_token(line, text.how, known_tokens, text.prompt),
            )
            yield known_tokens[-1]


@torch.inference_mode()
def emitted_after(model: Any, tokens: tuple[int, ...], last: int) -> list[list[float]]:
    """A model's logits after each of the last of these tokens."""
    logits: list[list[float]] = model(torch.tensor([tokens])).logits[0, -last:].tolist()
    return logits


WORLDS = [
    ({}, 1),
    ({"num_blocks": 9}, 2),
    *claimed(
        [
            ({}, 2),
            ({"max_num_seqs": 3, "max_num_batched_tokens": 5}, 2),
            ({"block_size": 5}, 3),
        ]
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("settings", "depth"), WORLDS, ids=str)
@pytest.mark.parametrize("requested", ["plain", "shaped"])
def test_an_engine_with_host_drafts_yields_what_the_rule_gives(
    model: Model, requested: str, settings: dict[str, int], depth: int
) -> None:
    wanted_requests = requests(0) if requested == "plain" else shaped()
    solo = {(request.id, 0): model.expected(request) for request in wanted_requests}
    run, _ = guessing(model, solo, 0.7, 4, rule=REJECTION, depth=depth, **settings)
    judge = Judge(model.theirs)
    watch_steps(run, judge.check)
    run.serve(wanted_requests, arrival_gap=depth % 2)
    assert judge.judged > 20 or "max_num_seqs" in settings
    assert judge.stood > judge.judged / 4
    if "num_blocks" in settings:
        assert run.count(Preempted)


@pytest.mark.long
@pytest.mark.parametrize(("settings", "depth"), WORLDS, ids=str)
def test_an_engine_with_a_draft_model_yields_what_the_rule_says(
    model: Model, settings: dict[str, int], depth: int
) -> None:
    draft = near(model)
    weights: Any = draft.weights
    draft_reference = copy.deepcopy(model.theirs)
    draft_reference.get_input_embeddings().weight.data.copy_(weights.embed)
    run, _ = drafting(model, draft, 3, rule=REJECTION, depth=depth, **settings)
    judge = Judge(model.theirs, draft_reference)
    watch_steps(run, judge.check)
    run.serve(requests(0), arrival_gap=depth % 2)
    assert judge.judged > 20 or "max_num_seqs" in settings
    assert judge.stood > judge.judged / 4


@pytest.mark.long
def test_noise_of_another_stream_is_noticed(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(seed: int, sample: int) -> Streams:
        right = Streams.of(seed, sample)
        return evolve(right, coins=right.picks)

    monkeypatch.setattr(device_rows, "Streams", SimpleNamespace(of=shared))
    run, _ = guessing(model, reference, 0.7, 4, rule=REJECTION)
    watch_steps(run, Judge(model.theirs).check)
    with pytest.raises(AssertionError):
        run.serve(requests(0), arrival_gap=1)


# --- where nothing is left to chance ----------------------------------------------------


def greedy() -> list[Request]:
    """Half of them with penalties."""
    ways = GREEDY, evolve(GREEDY, presence_penalty=1.0, repetition_penalty=1.3)
    wanted_requests = requests(3)
    return [
        evolve(request, sampling=ways[i % 2]) for i, request in enumerate(wanted_requests)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8)]
)
def test_the_target_as_its_own_draft_is_always_accepted(
    model: Model, sampling: SamplingParams
) -> None:
    wanted_requests = [
        evolve(r, sampling=sampling, max_tokens=30, stop_ids=frozenset())
        for r in requests(2, 6)
    ]
    run, tally = drafting(model, same(model), 3, rule=REJECTION)
    tokens = run.serve(wanted_requests, arrival_gap=1)
    assert tally.accepted == tally.proposed > 60
    solo = {(r.id, 0): model.expected(r) for r in wanted_requests}
    assert (tokens == solo) == (sampling is GREEDY), "drafts have noise of their own"


@pytest.mark.long
@pytest.mark.parametrize("lacking", [40, -27])
def test_a_draft_model_of_another_vocabulary(model: Model, lacking: int) -> None:
    draft = other(model, vocab_size=VOCAB - lacking)
    run, tally = drafting(model, draft, 3, rule=REJECTION)
    all_tokens = run.serve(requests(0), arrival_gap=1)
    assert 0 < tally.accepted < tally.proposed
    assert max(token for tokens in all_tokens.values() for token in tokens) < VOCAB


@pytest.mark.long
def test_log_probabilities_are_those_of_the_model(
    model: Model, reference: Tokens
) -> None:
    wanted_requests = asking(requests(0))
    run, tally = guessing(model, reference, 0.8, 5, rule=REJECTION)
    run.serve(wanted_requests, arrival_gap=1)
    check_scores(model, run, wanted_requests)
    assert tally.accepted > 20


@pytest.mark.long
def test_a_draft_model_that_is_not_finite_is_wrong_and_no_more(model: Model) -> None:
    bad = other(model)
    weights: Any = bad.weights
    embed = torch.full_like(weights.embed, torch.nan)
    bad = evolve(bad, weights=evolve(weights, embed=embed))
    run, tally = drafting(model, bad, 3, rule=REJECTION)
    solo = {(request.id, 0): model.expected(request) for request in greedy()}
    assert run.serve(greedy()) == solo
    assert tally.accepted < tally.proposed / 2


@pytest.mark.parametrize("draft", [5, VOCAB - 1])
def test_what_the_model_cannot_read_fails_its_request(model: Model, draft: int) -> None:
    unread = VOCAB - 1
    drawn = SamplingParams(logit_bias=((unread, 100.0),))
    bad = Request(id="bad", prompt=(3, 4), max_tokens=9, sampling=drawn)
    config = evolve(CONFIG, speculation=speculation(HOST, 6, REJECTION))
    hand = Hand.start(unreadable(model, unread), [WANTED[0], bad], config)
    hand.go_on({1: [draft, unread]})
    failed = hand.executor.collect()
    assert isinstance(failed, Failed)
    assert "not finite for request 'bad' (sample 0)" in failed.error


@pytest.mark.long
def test_drafts_of_both_in_one_step(model: Model) -> None:
    """What the host says is certain, beside what a draft model drew."""
    config = evolve(CONFIG, speculation=speculation(DEVICE, 6, REJECTION))
    hand = Hand.start(model, WANTED, config, same(model))
    greedily = [model.expected(request) for request in WANTED]
    hand.go_on({0: 3, 1: 4, 3: [(greedily[3][1] + 1) % VOCAB] * 2})
    assert list(map(len, hand.collect().yields)) == [4, 5, 1, 1]
