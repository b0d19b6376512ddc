"""What a request leaves of a block that it does not fill, and who begins with a copy."""

from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys, is_tail, root_key, tail_key, tail_keys
from minfer.engine import step
from minfer.journal.redact_state import redacted_state
from minfer.policies.builtin import POLICIES, policy_named
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Cancel, Emit, Event, Execute, Submit, Tick
from minfer.records.request import Continuation, ParameterError, Request, SamplingParams
from minfer.records.sequence import Place
from minfer.records.state import Turn, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.ledger import Ledger
from tests.core.journal.made import opened
from tests.core.journal.test_redact import SECRET, blind
from tests.core.journal.test_redact_state import comparable
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask
from tests.core.world import reference

GREEDY = SamplingParams(temperature=0.0)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)
ROOT = root_key(b"model")


def node(name: str, prompt: tuple[int, ...], size: int = 4, **more: Any) -> Request:
    emitted: dict[str, Any] = {"max_tokens": 1, "sampling": GREEDY, "root": ROOT} | more
    keys = block_keys(emitted["root"], prompt, size)
    tails = tail_keys(emitted["root"], keys, prompt, size)
    emitted = {"continuation": Continuation(tail_keys=tails)} | emitted
    return Request(id=name, prompt=prompt, keys=keys, **emitted)


def served(bench: Bench, *requests: Request) -> list[Admitted]:
    """Serve requests together; returns how they were admitted."""
    bench.reasons.clear()
    bench.give(*map(Submit, requests))
    bench.drain()
    for one in requests:
        assert bench.out[one.id, 0] == bench.right(one), "a copy is as good as computing"
    return bench.reasons_of(Admitted)


def test_keys_of_tails_are_those_of_no_full_blocks() -> None:
    keys = block_keys(ROOT, (1, 2, 3, 4, 5, 6), 4)
    before, whole = tail_keys(ROOT, keys, (1, 2, 3, 4, 5, 6), 4)
    assert (before, whole) == (tail_key(keys[0], (5,)), tail_key(keys[0], (5, 6)))
    assert is_tail(before)
    assert not any(map(is_tail, keys))
    assert tail_keys(ROOT, keys, (1, 2, 3, 4), 4) == (tail_key(ROOT, (1, 2, 3)), b"")
    assert tail_keys(ROOT, keys, (1, 2, 3, 4, 5), 4) == (b"", tail_key(keys[0], (5,)))


def test_children_begin_with_copies_of_their_parents_tail() -> None:
    """Block size 4: of a prompt of six tokens two are in a block that is not full."""
    bench = Bench(evolve(CONFIG, block_size=4))
    root = (1, 2, 3, 4, 5, 6)
    (first,) = served(bench, node("a", root))
    assert (first.hit, first.copied) == (0, 0)
    both = served(bench, node("b", (*root, 7)), node("c", (*root, 8)))
    assert [(one.hit, one.copied) for one in both] == [(4, 2), (4, 2)]
    # Of the parent's block nothing is rewritten: a third child still finds it.
    (again,) = served(bench, node("d", (*root, 9)))
    assert (again.hit, again.copied) == (4, 2)
    deeper = served(bench, node("e", (*root, 7, 1)), node("f", (*root, 8, 1)))
    assert [(one.hit, one.copied) for one in deeper] == [(4, 3), (4, 3)]
    # The block is full by now: its content is published as any other.
    (full,) = served(bench, node("g", (*root, 7, 1, 2)))
    assert (full.hit, full.copied) == (8, 0)


def test_what_does_not_fit_exactly_is_computed() -> None:
    bench = Bench(evolve(CONFIG, block_size=4))
    root = (1, 2, 3, 4, 5, 6)
    served(bench, node("a", root))
    for name, other in {
        "another token": node("b", (1, 2, 3, 4, 5, 7, 7)),
        "two tokens more": node("c", (*root, 7, 8)),
        "another root": node("d", (*root, 7), root=root_key(b"other")),
        "not asked for": node("e", (*root, 7), continuation=Continuation()),
        "not to be read": node("f", (*root, 7), sampling=SCORED),
    }.items():
        (got,) = served(bench, other)
        assert got.copied == 0, name


def test_a_prompt_shorter_than_a_block_has_a_tail_only() -> None:
    bench = Bench(evolve(CONFIG, block_size=16))
    served(bench, node("a", (1, 2, 3), 16))
    (got,) = served(bench, node("b", (1, 2, 3, 4), 16))
    assert (got.hit, got.copied) == (0, 3)
    (computed,) = served(bench, node("c", (1, 2, 3, 4), 16, sampling=SCORED))
    assert computed.copied == 0


def test_no_more_than_one_token_may_come_of_it() -> None:
    bench = Bench()
    with pytest.raises(ParameterError, match="one token at most"):
        ask("a", max_tokens=2, continuation=Continuation(tail_keys=(b"", b"")))
    bench.give(
        Submit(ask("b", max_tokens=0, continuation=Continuation(tail_keys=(b"", b""))))
    )
    bench.drain()
    assert bench.ended["b", 0].reason == "length"


def test_a_step_that_fails_takes_its_copies_with_it() -> None:
    bench = Bench(evolve(CONFIG, block_size=4))
    root = (1, 2, 3, 4, 5, 6)
    served(bench, node("a", root))
    child = node("b", (*root, 7))
    bench.give(Submit(child))
    bench.give(bench.oracle.fail("boom", halfway=True))
    bench.drain()
    assert bench.out["b", 0] == bench.right(child)


def some_node(
    rng: Random, trees: list[list[tuple[int, ...]]], number: int, size: int
) -> Request:
    """A prompt that goes on from another one, with a token more, or a new one."""
    tree = rng.choice(trees)
    prompt = (*rng.choice(tree), rng.randrange(4))
    if len(prompt) >= 40 or rng.random() < 0.05:
        prompt = tuple(rng.randrange(4) for _ in range(rng.randint(1, 9)))
    tree.append(prompt)
    who = rng.choice("abc")
    more: dict[str, Any] = {"continuation": Continuation(), "max_tokens": 9}
    more = more if rng.random() < 0.2 else {}
    return node(
        f"r{number}", prompt, size, **more, priority=rng.randint(0, 1), client=who
    )


def played(config: EngineConfig, rng: Random, turns: int) -> list[Turn]:
    """Trees of prompts under every law, beside other requests, cancels and failures."""
    state, ledger = initial(config), Ledger(config, initial(config))
    oracle = Oracle(config.block_size, VOCAB, config.groups)
    trees: list[list[tuple[int, ...]]] = [[(1,)], [(2, 2)]]
    requested, out, log = dict[str, Request](), dict[str, tuple[int, ...]](), list[Turn]()
    places: list[Place | None] = [None]
    for number in range(turns + 400):
        events: list[Event] = [Tick(float(number))]
        if oracle.plans:
            failed = number < turns and rng.random() < 0.05
            events.append(
                oracle.fail("boom", halfway=True) if failed else oracle.collect()
            )
        for at in range(rng.choice((0, 0, 1, 3)) if number < turns else 0):
            one = some_node(rng, trees, 10 * number + at, config.block_size)
            place = rng.choice(places) if rng.random() < 0.3 else None
            one = evolve(one, continuation=evolve(one.continuation, place=place))
            requested[one.id] = one
            events.append(Submit(one))
        if state.requests and number < turns and rng.random() < 0.05:
            events.append(Cancel(rng.choice(list(state.requests))))
        turn = step(config, state, tuple(events))
        ledger.take(tuple(events), turn)
        log.append(Turn(number, state, tuple(events), turn))
        state = turn.state
        places += [live.place for live in state.requests.values()]
        for command in turn.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
            elif isinstance(command, Emit):
                for (name, _), tokens in zip(command.ids, command.tokens, strict=True):
                    out[name] = out.get(name, ()) + tokens
        if number >= turns and not state.requests and not state.inflight:
            break
    assert not state.requests
    for name, tokens in out.items():
        limit, size = config.max_model_len, config.block_size
        right = reference(requested[name], 0, size, VOCAB, limit, config.groups)
        assert tokens == tuple(right)[: len(tokens)], name
    return log


def copied(log: list[Turn]) -> int:
    every = (reason for turn in log for reason in turn.transition.reasons)
    return sum(one.copied for one in every if isinstance(one, Admitted))


GROUPS = (
    (CacheGroup(),),
    (CacheGroup(8),),
    (CacheGroup(), CacheGroup(8, pages=2)),
    (CacheGroup(9), CacheGroup(pages=2)),
)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_trees_of_prompts_keep_every_law_and_lose_no_token(seed: int) -> None:
    rng = Random(seed)
    policies = [policy_named(name) for name in POLICIES]
    groups = rng.choice(GROUPS)
    config = EngineConfig(
        num_blocks=rng.choice((12, 20, 60)) * sum(group.pages for group in groups),
        block_size=rng.choice((4, 8)),
        max_model_len=64 if seed % 2 else 40,
        max_num_seqs=rng.choice((2, 8)),
        max_num_batched_tokens=rng.choice((8, 64)),
        vocab_size=VOCAB,
        depth=rng.choice((1, 2, 3)),
        groups=groups,
        policy=policies[seed % len(policies)],
    )
    assert copied(played(config, rng, 100))


@pytest.mark.long
def test_without_token_ids_the_same_is_decided() -> None:
    """From the beginning; and a snapshot of any state is that of the replay."""
    config = evolve(CONFIG, block_size=4, depth=2, num_blocks=14)
    log = played(config, Random(5), 200)
    journal = opened(blind(config, log))
    for mine, theirs in zip(log, journal.turns(), strict=True):
        state = redacted_state(config, mine.transition.state, SECRET)
        assert comparable(state) == comparable(theirs.transition.state), mine.number
    assert copied(log)


def test_a_tail_that_two_have_computed_is_published_once() -> None:
    bench = Bench()
    served(bench, node("a", (1, 2, 3)), node("b", (1, 2, 3)))
    blocks = bench.state.blocks
    assert blocks.available == CONFIG.num_blocks
    assert blocks.idle == 1


def test_a_tail_that_is_cached_and_computed_again_is_as_old_as_before() -> None:
    bench, prompts = Bench(), {"a": (1, 2, 3), "b": (4, 5, 6)}
    served(bench, node("a", prompts["a"]))
    served(bench, node("b", prompts["b"]))
    served(bench, node("again", prompts["a"], sampling=SCORED))
    idle = bench.state.blocks.prefix.idle
    tails = [tail_key(ROOT, prompt) for prompt in prompts.values()]
    assert [key for _, key in sorted(idle.items())] == tails
