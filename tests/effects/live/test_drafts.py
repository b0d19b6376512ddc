"""What the host drafts, and when: answers are those without."""

from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.analysis.drafts import sample_drafts, tally_of
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.host_drafts import (
    MAX_SKIPPED_TURNS,
    MAX_TOKENS_READ,
    HostDrafts,
)
from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Execute,
    Executed,
    Failed,
    Propose,
    Submit,
)
from minfer.records.request import PromptOnly, Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST, Speculation
from minfer.records.state import Transition
from minfer.simulation.oracle import Oracle
from minfer.speculate.lookup import Lookup
from minfer.speculate.proposer import Proposal, Proposer
from minfer.speculate.tally import NO_DRAFTS
from tests.circles import seeds

VOCAB = 3  # so small that everything has been there before
PLAIN = EngineConfig(
    num_blocks=400,
    block_size=4,
    max_model_len=1200,
    max_num_seqs=4,
    max_num_batched_tokens=1200,
    vocab_size=VOCAB,
)
HOW = Speculation(drafter=HOST, drafts=4, adaptive=False)
CONFIG = evolve(PLAIN, speculation=HOW)


class Loop(Driver):
    """A driver that keeps what was decided and what came out."""

    def __init__(self, config: EngineConfig, proposer: Proposer | None = None) -> None:
        self.host = None if proposer is None else HostDrafts(config, proposer)
        super().__init__(config, Oracle(4, VOCAB), drafts=self.host)
        self.out: dict[SampleId, list[int]] = {}
        self.tally = NO_DRAFTS
        self.steps = 0

    def turn(self, before: Any = None) -> Transition:
        previous = self.state
        transition = super().turn(before)
        self.steps += sum(isinstance(event, Executed) for event in self.last_events)
        self.tally = self.tally.plus(
            tally_of(sample_drafts(previous, self.last_events, transition))
        )
        assert not transition.reasons or not any(
            type(reason).__name__ == "Ignored" for reason in transition.reasons
        )
        for command in transition.commands:
            if isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    self.out.setdefault(name, []).extend(tokens)
        return transition

    def proposals(self) -> list[Propose]:
        return [event for event in self.last_events if isinstance(event, Propose)]

    def finish(self) -> "Loop":
        while self.busy:
            self.turn()
        return self


def request(name: str, prompt: int = 20, output: int = 60, **settings: Any) -> Request:
    tokens = tuple(Random(name).choices(range(VOCAB), k=prompt))
    return Request(id=name, prompt=tokens, max_tokens=output, **settings)


def run(config: EngineConfig, proposer: Proposer | None, *requests: Request) -> Loop:
    loop = Loop(config, proposer)
    for submitted in requests:
        loop.post(Submit(submitted))
    return loop.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_answers_are_those_without_in_fewer_steps(depth: int, adaptive: bool) -> None:
    costs = Costs(((4, 1.0), (16, 1.05), (32, 1.2)))
    spec_config = evolve(HOW, adaptive=adaptive, costs=costs)
    requests = [
        request("a"),
        request("b", n=2),
        request("c", stop_ids=frozenset({1})),
        request("d", 1, 30),
        request("e", 7, 50),
    ]
    plain = run(evolve(PLAIN, depth=depth), None, *requests)
    config = evolve(CONFIG, depth=depth, speculation=spec_config)
    with_drafts = run(config, Lookup(min_match=2), *requests)
    assert with_drafts.out == plain.out
    assert with_drafts.steps < plain.steps
    assert 0 < sum(with_drafts.tally.accepted) < sum(with_drafts.tally.proposed)
    host = with_drafts.host
    assert host is not None
    assert not host.samples  # nothing is kept of who has ended
    assert not host.by_run_id
    assert not host.library.samples


def test_nothing_is_drafted_behind_an_end() -> None:
    """`turn` asserts that no proposal is ignored; here one would be, each time."""
    for seed in range(20):
        run(CONFIG, Lookup(min_match=1), request(f"r{seed}", 9, 3))
        run(
            CONFIG,
            Lookup(min_match=1),
            request(f"r{seed}", 9, stop_ids=frozenset({0, 1})),
        )


class Always(Proposer):
    """Proposes ones, and notes how often it is asked, and what it is told."""

    def __init__(self) -> None:
        self.requested = 0
        self.reported = list[int]()

    def grew(self, state: Any, who: SampleId, tokens: tuple[int, ...]) -> Any:
        self.reported.append(len(tokens))
        return state

    def propose(self, state: Any, who: SampleId, most: int) -> Proposal:
        self.requested += 1
        return Proposal((1,) * most)


@pytest.mark.long
def test_while_nothing_comes_of_proposals_they_are_made_in_fewer_turns() -> None:
    costs = Costs(((1, 1.0), (2, 90.0)))  # no draft can pay
    spec_config = evolve(HOW, adaptive=True, costs=costs)
    asking = Always()
    loop = run(evolve(CONFIG, speculation=spec_config), asking, request("a", 5, 600))
    assert not loop.tally.rows
    rounds = 600 / MAX_SKIPPED_TURNS + 2 * MAX_SKIPPED_TURNS.bit_length()
    assert 5 < asking.requested < rounds


def test_a_prompt_is_read_a_part_a_turn() -> None:
    asking = Always()
    loop = Loop(CONFIG, asking)
    loop.post(Submit(request("a", 1000, 50)))
    for _ in range(2):  # to the first token, which has come before all was read
        loop.turn()
        assert not loop.proposals()
    assert max(asking.reported) <= MAX_TOKENS_READ
    loop.finish()
    # But for what came when drafts were not requested any more.
    unread = 1000 + len(loop.out["a", 0]) - sum(asking.reported)
    assert 0 <= unread <= MAX_SKIPPED_TURNS


def test_in_steps_of_many_rows_no_drafts_are_requested() -> None:
    asking = Always()
    spec_config = evolve(HOW, rows=1)
    requests = request("a", 5, 20), request("b", 5, 20)
    run(evolve(CONFIG, speculation=spec_config), asking, *requests)
    assert not asking.requested


def test_who_cannot_have_drafts_is_not_read() -> None:
    asking = Always()
    bound = request("c", needs_host_mask=True)
    run(CONFIG, asking, request("b", 5, 0, prompt_only=PromptOnly("last")), bound)
    assert not asking.reported


def test_what_was_discarded_is_read_anew() -> None:
    """A step that fails, with another in flight: no token is told twice."""

    class Failing(Oracle):
        calls = 0

        def collect(self) -> Executed | Failed:
            self.calls += 1
            if self.calls == 5:
                return self.fail("boom", halfway=True)
            return super().collect()

    requests = request("a"), request("b", n=2)
    plain = run(PLAIN, None, *requests)
    loop = Loop(CONFIG, Lookup(min_match=2))
    loop.deferred.executor = Failing(4, VOCAB)
    for submitted in requests:
        loop.post(Submit(submitted))
    loop.finish()
    assert loop.out == plain.out
    assert loop.tally.rate > 0


def test_who_gives_way_is_read_on_where_it_was() -> None:
    tight = evolve(CONFIG, num_blocks=14, max_model_len=50)
    plain = evolve(tight, speculation=None)
    requests = [request(name, 8, 40) for name in "abcd"]
    assert (
        run(tight, Lookup(min_match=2), *requests).out == run(plain, None, *requests).out
    )


@pytest.mark.long
@seeds(20, 300)
def test_who_is_let_in_may_give_way_within_the_turn(seeds: range) -> None:
    """`turn` asserts that nothing is proposed for who has."""
    for seed in seeds:
        rng = Random(seed)
        tight = evolve(
            CONFIG,
            num_blocks=rng.randrange(12, 30),
            max_model_len=44,
            depth=rng.choice([2, 3]),
            max_num_batched_tokens=rng.randrange(8, 24),
            max_num_seqs=rng.randrange(2, 8),
        )
        requests = [
            request(f"{seed} {i}", rng.randrange(3, 20), rng.randrange(5, 24))
            for i in range(8)
        ]
        plain = evolve(tight, speculation=None)
        loop = run(tight, Lookup(min_match=2), *requests)
        assert loop.out == run(plain, None, *requests).out


def test_who_is_cancelled_is_forgotten() -> None:
    loop = Loop(CONFIG, Lookup(min_match=2))
    loop.post(Submit(request("a", 20, 500)))
    for _ in range(5):
        loop.turn()
    loop.post(Cancel("a"))
    loop.finish()
    assert loop.host is not None
    assert not loop.host.samples


def test_drafts_are_launched_with_tokens_behind_what_is_known() -> None:
    loop = Loop(CONFIG, Lookup(min_match=2))
    loop.post(Submit(request("a")))
    num_drafts = 0
    while loop.busy:
        lengths = dict(
            zip(loop.state.running.run_ids, loop.state.running.known, strict=True)
        )
        transition = loop.turn()
        for command in transition.commands:
            if isinstance(command, Execute):
                for draft in command.plan.drafts:
                    gen = command.plan.run_ids[draft.index]
                    assert command.plan.starts[draft.index] >= lengths[gen]
                    assert (
                        len(draft.tokens)
                        == command.plan.num_scheduled_tokens[draft.index] - 1
                    )
                    num_drafts += 1
    assert num_drafts > 5
