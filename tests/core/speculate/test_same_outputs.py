"""Whatever is drafted, by whom, and how much of it is right: outputs are as without.

The same requests are served without drafts and with them, and what they yield is the
same, token for token. Each run is judged by all laws, turn by turn.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from attrs import define, evolve, field

from minfer.records.acceptance import Costs
from minfer.records.messages import Event, Executed, Finished, Propose
from minfer.records.plan import Draft
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.simulation.oracle import Oracle, OracleRow
from tests.circles import seeds
from tests.core.speculate.drafted import (
    HOSTED,
    ON_DEVICE,
    ROOMY,
    Guess,
    begun,
    model_wrong,
)
from tests.core.test_engine import VOCAB, ask
from tests.core.world import World, tiny_config

# One in so many drafts is wrong.
SHARES = {"all wrong": 1, "half wrong": 2, "all right": 10**9}
NO_COSTS = Costs(((4, 1.0), (64, 1.1)))


@define
class Speculating(World):
    """A world that keeps all outputs, in which so many of the drafts are right."""

    wrong: int = 1
    outs: dict[SampleId, tuple[int, ...]] = field(factory=dict)
    drafted: int = 0

    def propose_some(self, results: tuple[Event, ...]) -> list[Event]:
        del results
        run, rng = self.state.running, Random(f"draft {self.turns}")
        found = list[Event]()
        for i, name in enumerate(run.ids):
            whole = self._whole(name)
            # Of how much is known behind these results, one of the guesses is right.
            for more in (0, 1) if rng.random() < 0.5 else (1,):
                known = run.known[i] + more
                emitted = whole[known : known + rng.randint(0, 4)]
                found.append(Propose(*name, known, tuple(map(self._guess, emitted))))
        return found

    def _guess(self, token: int) -> int:
        off = Random(f"{self.turns} {token}").randrange(self.wrong) == 0
        return (token + off) % self.config.vocab_size

    def _end(self, done: Finished) -> None:
        self.outs[done.id, done.sample] = tuple(self.out.get((done.id, done.sample), ()))
        super()._end(done)


def served(seed: int, how: Speculation | None, wrong: int, depth: int) -> Speculating:
    """What the requests of a seed yield."""
    rng = Random(seed)
    config = evolve(
        tiny_config(rng),
        depth=depth,
        max_num_batched_tokens=64,
        speculation=how,
        max_waiting=2**20,
    )
    world = Speculating(config, rng, wrong=wrong)
    world.hungry = rng.random() < 0.5
    wishes = [world.some_request() for _ in range(6)]
    with model_wrong(wrong):
        for wish in wishes:
            world.submit(wish)
            world.turn()
        world.fail()
        world.drain()
    world.drafted = world.paths["host drafts"] + world.paths["device drafts"]
    return world


@pytest.mark.long
@pytest.mark.parametrize("wrong", SHARES.values(), ids=[*SHARES])
@pytest.mark.parametrize("drafter", [HOST, DEVICE])
@seeds(6, 120)
def test_worlds_yield_the_same(seeds: range, drafter: str, wrong: int) -> None:
    drafted = preempted = 0
    for seed in seeds:
        rng = Random(f"how {seed}")
        how = Speculation(
            drafter=drafter,
            drafts=rng.choice((1, 3, 4)),
            adaptive=rng.random() < 0.3,
            costs=NO_COSTS,
        )
        plain = served(seed, None, wrong, depth=2)
        world = served(seed, how, wrong, depth=1 + seed % 3)
        assert world.outs == plain.outs
        drafted += world.drafted
        preempted += world.preempted
    assert drafted > 3 * len(seeds)
    assert preempted, "the worlds are too kind"


def telling(right: int, count: int) -> Guess:
    """Drafts of which the first so many are right, and no other."""

    def guess(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
        coming = enumerate(whole[known : known + count])
        return tuple((token + (at >= right)) % VOCAB for at, token in coming)

    return guess


def drafting(right: int) -> Any:
    """A draft model that says the same as `telling`."""

    def drafted(self: Oracle, row: OracleRow, count: int) -> Iterator[int]:
        for at in range(count):
            token = (self._draw(row) + (at >= right)) % VOCAB
            self._write(row, (token,))
            yield token

    return drafted


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", [HOSTED, ON_DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("drafts", range(1, 5))
def test_every_number_of_drafts_and_of_those_that_stand(
    how: Speculation, drafts: int, depth: int
) -> None:
    config, wish = evolve(ROOMY, depth=depth, block_size=8), ask("a", 5, 50)
    for right in range(drafts + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Oracle, "_drafted", drafting(right))
            mine = evolve(how, drafts=drafts)
            bench = begun(mine, wish, guess=telling(right, drafts), config=config)
            bench.drain()
        sizes = {
            len(event.yields[0])
            for turn in bench.turns
            for event in turn.events
            if isinstance(event, Executed)
            and turn.before.inflight[0].drafts
            and turn.before.inflight[0].num_scheduled_tokens == (1 + drafts,)
        }
        assert sizes == {right + 1}
        assert bench.out["a", 0] == bench.right(wish)


# --- rules that are wrong ---------------------------------------------------------------


def all_stand(
    self: Oracle, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
) -> Iterator[int]:
    """Whatever was drafted is yielded, and the token after it."""
    del masks
    self._expect(row, start)
    self._write(row, (row.last,))
    self._write(row, draft.tokens)
    yield from draft.tokens or self._drafted(row, count)
    row.last = self._draw(row)
    yield row.last


def the_wrong_one_stands(
    self: Oracle, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
) -> Iterator[int]:
    """The first that is rejected is yielded in place of the token that is right."""
    tokens = list(verified(self, row, start, draft, count, masks))
    if draft.tokens and len(tokens) <= count:
        tokens[-1] = row.last = draft.tokens[len(tokens) - 1]
    yield from tokens


def nothing_is_taken_back(
    self: Oracle, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
) -> Iterator[int]:
    """The row goes on behind the drafts that did not stand."""
    before = row.next
    yield from verified(self, row, start, draft, count, masks)
    row.next = before + count + 1


verified = Oracle._verified


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (all_stand, HOST),
        (all_stand, DEVICE),
        (the_wrong_one_stands, HOST),
        (nothing_is_taken_back, HOST),
        (nothing_is_taken_back, DEVICE),
    ],
)
def test_a_wrong_rule_of_acceptance_is_caught(rule: Any, drafter: str) -> None:
    how = Speculation(drafter=drafter, drafts=3, adaptive=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Oracle, "_verified", rule)
        caught = [not _passes(seed, how) for seed in range(6)]
    assert any(caught)


def _passes(seed: int, how: Speculation) -> bool:
    try:
        served(seed, how, wrong=2, depth=2)
    except AssertionError:
        return False
    return True
