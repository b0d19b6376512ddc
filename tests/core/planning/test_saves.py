"""States of recurrent layers are saved with a plan, kept once it is committed, and copied
to the rows that start from them.
"""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import Key, block_keys
from minfer.planning.states import state_key
from minfer.records.config import CacheGroup
from minfer.records.messages import (
    Admitted,
    Cancel,
    Discarded,
    Missed,
    Pause,
    Preempted,
    SavesSkipped,
    StateMissed,
    Submit,
)
from minfer.records.plan import Copy
from minfer.records.request import KvTransfer, Request
from minfer.records.sequence import NEVER, NO_STATES
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state_keeping import StateKeeping
from minfer.testing.kept_states import kept_states
from tests.core.planning.test_states import STATES
from tests.core.test_engine import Bench, ask

PROMPT = tuple(range(10, 20))  # two full blocks, and two tokens more
ASKED = ask("a", prompt=PROMPT, max_tokens=12)
AGAIN = evolve(ASKED, id="b")


def kept(bench: Bench) -> set[Key]:
    """The states that are kept."""
    return {*kept_states(bench.config, bench.state.blocks.prefix)}


def key_at(bench: Bench, tokens: tuple[int, ...], request: Request = ASKED) -> Key:
    """The key of the state after these tokens."""
    keys = block_keys(request.root, tokens, bench.config.block_size)
    return state_key(bench.config, keys[-1])


def saves(bench: Bench) -> list[tuple[str, int]]:
    """The requests whose states were saved, and where."""
    out = list[tuple[str, int]]()
    names = dict[int, str]()
    for plan in bench.plans:
        names |= {plan.run_ids[row.index]: row.name[0] for row in plan.opens}
        for save in plan.saves:
            out.append((names[plan.run_ids[save.index]], plan.saved_at(save)))
    return out


def test_a_state_inside_a_long_chunk_costs_no_step() -> None:
    """One step computes the prompt, which else takes two; an equal prompt hits the state,
    which is kept at the same position.
    """
    steps = dict[int, int]()
    for inside_from in (0, 8):
        keeping = StateKeeping(max_share=1.0, inside_from=inside_from)
        bench = Bench(evolve(STATES, states=keeping))
        bench.give(Submit(evolve(ASKED, max_tokens=1)))
        bench.drain()
        steps[inside_from] = len(bench.plans)
        assert saves(bench) == [("a", 8)]
        assert kept(bench) == {key_at(bench, PROMPT[:8])}
        bench.give(Submit(AGAIN))
        bench.drain()
        assert [admitted.hit for admitted in bench.reasons_of(Admitted)] == [0, 8]
    assert steps == {0: 2, 8: 1}


def test_a_prompt_is_saved_at_its_last_block_boundary_and_then_each_block() -> None:
    bench = Bench(STATES)
    bench.give(Submit(ASKED))
    first, *_ = bench.plans
    assert (first.num_scheduled_tokens, first.max_sampled_tokens) == ((8,), (0,))
    assert [save.index for save in first.saves] == [0]
    assert not kept(bench), "the plan is in flight"
    bench.turn()
    assert kept(bench) == {key_at(bench, PROMPT[:8])}
    bench.drain()
    assert saves(bench) == [("a", 8), ("a", 12), ("a", 16), ("a", 20)]
    assert bench.out["a", 0] == bench.right(ASKED)
    whole = PROMPT + bench.out["a", 0]
    # The last checkpoint has taken the place of those before.
    assert kept(bench) == {key_at(bench, PROMPT[:8]), key_at(bench, whole[:20])}
    assert bench.state.blocks.available == STATES.num_blocks


def test_a_state_at_the_very_end_of_a_prompt_is_a_checkpoint() -> None:
    bench = Bench(STATES)
    bench.give(Submit(ask("a", prompt=tuple(range(12)), max_tokens=6)))
    bench.drain()
    assert saves(bench) == [("a", 8), ("a", 12), ("a", 16)]
    whole = (*range(12), *bench.out["a", 0])
    assert kept(bench) == {key_at(bench, whole[:end]) for end in (8, 16)}


def test_a_long_prompt_is_saved_where_its_chunks_end_at_a_block_boundary() -> None:
    bench = Bench(evolve(STATES, max_num_batched_tokens=14))
    bench.give(Submit(ask("a", 42, 1)))
    bench.drain()
    assert saves(bench) == [("a", 12), ("a", 24), ("a", 36), ("a", 40)]


def test_an_equal_prompt_starts_from_there() -> None:
    bench = Bench(STATES)
    bench.give(Submit(ASKED))
    bench.drain()
    saved = bench.plans[0].saves[0]
    bench.give(Submit(AGAIN))
    plan = bench.plans[-1]
    assert bench.reasons_of(Admitted)[-1].hit == 8
    assert (plan.starts, plan.num_scheduled_tokens) == ((8,), (2,))
    working = plan.opens[0].tables[-1]
    pairs = zip(saved.pages, working, strict=True)
    assert plan.copies == tuple(Copy(*pages, 4) for pages in pairs)
    bench.drain()
    assert bench.out["b", 0] == bench.right(ASKED)
    assert not bench.reasons_of(StateMissed)


def test_the_next_turn_of_a_conversation_starts_from_the_last_checkpoint() -> None:
    bench = Bench(STATES)
    bench.give(Submit(ASKED))
    bench.drain()
    longer = ask("c", prompt=PROMPT + bench.out["a", 0] + (3, 4, 5), max_tokens=3)
    bench.give(Submit(longer))
    bench.drain()
    assert bench.reasons_of(Admitted)[-1].hit == 20
    assert bench.out["c", 0] == bench.right(longer)


def test_where_a_second_prompt_leaves_the_first_a_third_starts() -> None:
    bench = Bench(STATES)
    hits = []
    for name, tail in (("a", (1,) * 9), ("b", (2,) * 9), ("c", (3,) * 9)):
        request = ask(name, prompt=tuple(range(20, 32)) + tail, max_tokens=2)
        bench.give(Submit(request))
        bench.drain()
        hits.append(bench.reasons_of(Admitted)[-1].hit)
        assert bench.out[name, 0] == bench.right(request)
    assert hits == [0, 0, 12]
    [lost] = bench.reasons_of(StateMissed)
    assert lost == StateMissed("b", 0, block=0, cached=3)
    assert bench.reasons_of(Missed)[1] == Missed("b", 0, 0, 5)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_state_is_kept_if_its_row_is_there_when_its_step_is_over(depth: int) -> None:
    bench = Bench(evolve(STATES, depth=depth))
    bench.give(Submit(ASKED))
    bench.turn(Cancel("a"))
    bench.drain()
    # What was committed in that turn is kept, and pages in flight are free again.
    assert kept(bench) == {key_at(bench, PROMPT[:8])}
    assert bench.state.blocks.available == STATES.num_blocks
    gone = Bench(evolve(STATES, depth=depth))
    gone.give(Submit(ASKED))
    gone.give(Cancel("a"))
    gone.drain()
    assert not kept(gone)
    assert gone.state.blocks.free == STATES.num_blocks


def test_a_row_that_ends_with_a_save_keeps_it() -> None:
    bench = Bench(STATES)
    request = ask("a", prompt=PROMPT, max_tokens=3)  # its last input is at position 11
    bench.give(Submit(request))
    bench.drain()
    whole = PROMPT + bench.out["a", 0]
    assert saves(bench)[-1] == ("a", 12)
    assert key_at(bench, whole[:12]) in kept(bench)


@pytest.mark.parametrize("max_share", [0.02, 0.03])  # one state, of two pages
def test_states_have_their_share_and_the_next_one_of_a_row_takes_its_own(
    max_share: float,
) -> None:
    bench = Bench(evolve(STATES, states=StateKeeping(max_share=max_share)))
    bench.give(Submit(ASKED))
    bench.turn()
    assert len(kept(bench)) == 1
    other = ask("other", 9, 12)
    bench.turn(Submit(other))
    bench.drain()
    assert len(kept(bench)) == 1
    assert ("other", 8) not in saves(bench), "it has none to make room with"
    assert ("a", 12) in saves(bench)
    assert bench.out["a", 0] == bench.right(ASKED)
    assert bench.out["other", 0] == bench.right(other)


def test_without_free_pages_a_row_makes_room_for_its_next_state() -> None:
    """Nothing of others is evicted for a second state of a row."""
    groups = CacheGroup(), CacheGroup(state=True, pages=4)
    config = evolve(STATES, num_blocks=22, groups=groups)
    bench = Bench(evolve(config, states=StateKeeping(max_share=1.0)))
    bench.give(Submit(ask("old", 17, 2)))
    bench.drain()
    old = {*bench.state.blocks.prefix.nodes}
    bench.give(Submit(ask("a", prompt=PROMPT, max_tokens=12)))
    for _ in range(3):
        bench.turn()
    assert saves(bench)[-2:] == [("a", 8), ("a", 12)]
    first = key_at(bench, PROMPT[:8])
    assert first not in kept(bench), "it was there, and made room"
    bench.drain()
    assert old <= {*bench.state.blocks.prefix.nodes}
    assert len(kept(bench) - old) == 1


def test_a_save_leaves_a_block_for_each_row() -> None:
    """In pools of many sizes, one of which has just enough."""
    left = list[int]()
    for num_blocks in range(14, 40):
        bench = Bench(evolve(STATES, num_blocks=num_blocks, depth=1))
        bench.give(
            Submit(evolve(ASKED, max_tokens=8)), Submit(evolve(AGAIN, max_tokens=8))
        )
        while bench.state.running.run_ids:
            rows, planned = len(bench.state.running), len(bench.plans)
            bench.turn()
            if any(plan.saves for plan in bench.plans[planned:]):
                left.append(bench.state.blocks.available - rows * STATES.block_pages)
    assert min(left) >= 0


def test_a_failed_step_has_its_rows_start_again_from_the_last_state() -> None:
    bench = Bench(evolve(STATES, depth=2))
    other = ask("other", 6, 12)
    bench.give(Submit(ASKED), Submit(other))
    for _ in range(5):
        bench.turn()
    before = bench.state.running.known
    turn = bench.give(bench.oracle.fail("boom", halfway=True))
    names = {("a", 0), ("other", 0)}
    assert {reason.by for reason in bench.reasons_of(Preempted)} == names
    [failed] = bench.reasons_of(Discarded)
    assert (failed.rows, failed.plans) == (2, 2)
    again = [reason for reason in turn.reasons if isinstance(reason, Admitted)]
    assert [(reason.hit, reason.prompt) for reason in again] == [(12, 0), (8, 0)]
    assert bench.state.running.known == before, "no token is lost"
    bench.drain()
    assert bench.out["a", 0] == bench.right(ASKED)
    assert bench.out["other", 0] == bench.right(other)
    assert bench.state.blocks.available == STATES.num_blocks


def test_who_fails_too_often_ends_and_the_others_go_on() -> None:
    bench = Bench(evolve(STATES, max_failures=2))
    other = ask("other", 6, 12)
    bench.give(Submit(ASKED))
    bench.give(bench.oracle.fail("boom", halfway=True))
    bench.give(Submit(other), bench.oracle.fail("boom again", halfway=True))
    assert bench.ended["a", 0].reason == "error"
    bench.drain()
    assert bench.out["other", 0] == bench.right(other)
    assert bench.state.blocks.available == STATES.num_blocks


def test_samples_of_a_request_start_at_the_last_boundary_of_its_prompt() -> None:
    bench = Bench(STATES)
    request = ask("a", prompt=PROMPT, max_tokens=6, n=3, seed=1)
    bench.give(Submit(request))
    bench.drain()
    assert [reason.hit for reason in bench.reasons_of(Admitted)] == [0, 8, 8]
    assert [reason.copied for reason in bench.reasons_of(Admitted)] == [0, 0, 0]
    for sample in range(3):
        assert bench.out["a", sample] == bench.right(request, sample)


def drafting(bench: Bench) -> list[Any]:
    return [plan for plan in bench.plans if plan.drafts]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stride", [2, 3])
def test_drafts_of_a_draft_model_end_before_a_state_is_saved(
    depth: int, stride: int
) -> None:
    """At each stride, with a known position, whatever was rejected before."""
    how = Speculation(drafter=DEVICE, drafts=3, adaptive=False)
    keeping = StateKeeping(decode_stride_blocks=stride)
    bench = Bench(evolve(STATES, depth=depth, speculation=how, states=keeping))
    long = evolve(ASKED, max_tokens=40)
    bench.give(Submit(long))
    bench.drain()
    assert drafting(bench)
    for plan in bench.plans:
        assert not {save.index for save in plan.saves} & {d.index for d in plan.drafts}
    size, end = STATES.block_size, len(long.prompt) + long.max_tokens - 1
    first = (len(long.prompt) - 1) // size * size
    ends = range(first, end + 1, stride * size)
    assert saves(bench) == [("a", position) for position in ends]
    assert bench.out["a", 0] == bench.right(long)


def test_a_paused_row_holds_the_state_from_which_it_starts() -> None:
    bench = Bench(STATES)
    short = ask("a", prompt=PROMPT[:9], max_tokens=2)
    bench.give(Submit(short))
    bench.drain()
    later = evolve(short, id="b", needs_host_mask=True)
    bench.give(Submit(later), Pause("b", 0))
    (chain,) = bench.state.running.chains
    assert chain.states.origin == key_at(bench, PROMPT[:8])
    assert not bench.state.inflight, "one input is left, and it waits for its mask"
    filler = ask("filler", 40, 2)
    bench.give(Submit(filler))
    for _ in range(6):
        bench.turn()
    bench.turn(Pause("b", 0, paused=False))
    bench.drain()
    assert bench.out["b", 0] == bench.right(later)


def test_the_next_checkpoint_leaves_one_that_another_row_holds() -> None:
    bench = Bench(STATES)
    bench.give(Submit(evolve(ASKED, max_tokens=40)))
    checkpoint = bench.right(ASKED)[:2]
    held = key_at(bench, PROMPT + checkpoint)
    while held not in kept(bench):
        bench.turn()
    later = ask("b", prompt=(*PROMPT, *checkpoint, 7), max_tokens=2, needs_host_mask=True)
    bench.turn(Submit(later), Pause("b", 0))
    assert [chain.states.origin for chain in bench.state.running.chains][1] == held
    for _ in range(12):
        bench.turn()
    assert len(saves(bench)) > 4
    assert held in kept(bench)
    bench.turn(Pause("b", 0, paused=False))
    bench.drain()
    assert bench.out["b", 0] == bench.right(later)


def test_what_leaves_before_it_starts_gives_its_state_back() -> None:
    bench = Bench(STATES)
    short = ask("a", prompt=PROMPT[:9], max_tokens=2)
    bench.give(Submit(short))
    bench.drain()
    later = evolve(short, id="b", needs_host_mask=True)
    bench.give(Submit(later), Pause("b", 0))
    bench.give(Cancel("b"))
    assert bench.state.blocks.live == 0
    assert key_at(bench, PROMPT[:8]) in kept(bench)


def test_a_kept_state_becomes_the_working_one_where_both_do_not_fit() -> None:
    bench = Bench(evolve(STATES, num_blocks=8, states=StateKeeping(max_share=1.0)))
    bench.give(Submit(ask("a", prompt=PROMPT[:9], max_tokens=1)))
    bench.drain()
    [save] = [save for plan in bench.plans for save in plan.saves]
    again = ask("b", prompt=PROMPT[:9], max_tokens=2)
    bench.give(Submit(ask("beside", 2, 2)), Submit(again))
    plan = bench.plans[-1]
    assert bench.reasons_of(Admitted)[-1].hit == 8
    assert (plan.copies, plan.opens[1].tables[-1]) == ((), save.pages)
    assert not kept(bench)
    bench.drain()
    assert bench.out["b", 0] == bench.right(again)


def test_where_both_just_fit_a_kept_state_is_copied() -> None:
    bench = Bench(evolve(STATES, num_blocks=10, states=StateKeeping(max_share=1.0)))
    bench.give(Submit(ask("a", prompt=PROMPT[:9], max_tokens=1)))
    bench.drain()
    again = ask("b", prompt=PROMPT[:9], max_tokens=2)
    bench.give(Submit(ask("beside", 2, 2)), Submit(again))
    assert len(bench.plans[-1].copies) == STATES.state_pages
    assert kept(bench)


def test_without_a_state_group_nothing_is_saved() -> None:
    bench = Bench(evolve(STATES, groups=(CacheGroup(),)))
    bench.give(Submit(ASKED))
    (chain,) = bench.state.running.chains
    assert chain.states is NO_STATES
    bench.drain()
    assert not saves(bench)


def test_what_is_never_saved_is_cut_nowhere() -> None:
    bench = Bench(evolve(STATES, states=StateKeeping(max_share=0.0)))
    bench.give(Submit(ASKED))
    assert bench.plans[0].num_scheduled_tokens == (10,)
    assert bench.state.running.chains[0].states.save_at == NEVER


FEW = evolve(STATES, states=StateKeeping(max_share=1.0, max_saved_pages=3), depth=1)


def test_a_step_saves_at_most_as_many_states_and_rows_take_turns() -> None:
    bench = Bench(FEW)
    requests = [
        ask(name, prompt=(number, *PROMPT[1:]), max_tokens=14)
        for number, name in enumerate("ab")
    ]
    bench.give(*map(Submit, requests))
    bench.drain()
    assert saves(bench) == [("a", 8), ("b", 12), ("a", 16), ("b", 20)]
    skipped = [
        (reason.saved, reason.skipped) for reason in bench.reasons_of(SavesSkipped)
    ]
    assert skipped == [(1, 1)] * 4
    for request in requests:
        assert bench.out[request.id, 0] == bench.right(request)
    assert bench.state.blocks.available == FEW.num_blocks


def test_states_in_prompts_are_saved_before_checkpoints() -> None:
    """Although that of `first` is the further behind."""
    bench = Bench(evolve(FEW, states=evolve(FEW.states, decode_stride_blocks=3)))
    bench.give(Submit(ask("first", prompt=PROMPT[:9], max_tokens=30)))
    while bench.state.running.scheduled != (19,):
        bench.turn()
    bench.turn(Submit(ask("b", 9, 12)))
    assert saves(bench) == [("first", 8), ("b", 8)], "and not first at 20"
    bench.drain()
    assert ("first", 32) in saves(bench)


@pytest.mark.parametrize("awaited", [{"n": 2}, {"kv_transfer": KvTransfer(push_to="b")}])
def test_states_that_others_wait_for_are_saved_first(awaited: dict[str, Any]) -> None:
    bench = Bench(FEW)
    request = ask("awaited", prompt=PROMPT, max_tokens=2, **awaited)
    bench.give(Submit(ask("alone", 9, 2)), Submit(request))
    assert saves(bench) == [("awaited", 8)]
