"""Matchers are where their samples are, whatever happened in between."""

from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from minfer.effects.live.constraints.grammar_masks import STUCK_ERROR, GrammarMasks
from minfer.effects.live.constraints.sample_grammars import AllowedTokens
from minfer.effects.live.masks import StepMasks
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.mask_lines import Lines
from minfer.effects.text.grammars.store import Grammars
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Execute, Executed, Finish, Pause, Submit, Tick
from minfer.records.plan import Mask, Plan
from minfer.records.request import Request, SamplingParams
from minfer.records.state import EngineState, initial
from tests.effects.live.matchers import EOS, Compiler, ask

CONFIG = EngineConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=32,
    depth=1,
)


@define
class Bench:
    """An engine whose rows yield token 9, with masks made for it."""

    compiler: Compiler = field(factory=Compiler)
    state: EngineState = field(factory=lambda: initial(CONFIG))
    plan: Plan | None = None
    masks: GrammarMasks = field(init=False)

    def __attrs_post_init__(self) -> None:
        store = Grammars(lambda: self.compiler)
        self.masks = GrammarMasks(store, CONFIG.block_size, frozenset({EOS}))

    def turn(self, *events: Any) -> StepMasks:
        """Take one, and make the masks of its plan."""
        executed: tuple[Executed, ...] = ()
        if self.plan is not None:
            executed = (
                Executed(
                    self.plan.step,
                    tuple((9,) * count for count in self.plan.max_sampled_tokens),
                ),
            )
        turned = step(CONFIG, self.state, (Tick(0.0), *executed, *events))
        self.state = turned.state
        plans = [
            command.plan for command in turned.commands if isinstance(command, Execute)
        ]
        self.plan = plans[0] if plans else None
        assert self.plan is not None
        return self.masks.begin(self.plan, self.state).result(5)


def allowed(masked: StepMasks) -> dict[int, int]:
    return {mask.index: mask.bits[0] >> 2 for mask in masked.masks}


def test_a_matcher_gets_each_token_once() -> None:
    bench = Bench()
    assert allowed(bench.turn(Submit(ask("a")))) == {0: 0}
    assert [allowed(bench.turn()) for _ in range(3)] == [{0: 1}, {0: 2}, {0: 3}]
    (walker,) = bench.compiler.made
    assert walker.taken == [9, 9, 9]
    assert walker.calls[-2:] == ["rollback 0", "advance 1"]


def test_each_sample_has_its_own_and_others_have_none() -> None:
    bench = Bench()
    plain = Request(id="b", prompt=(5,), max_tokens=9)
    bench.turn(Submit(ask("a", n=3)), Submit(plain))
    masked = bench.turn()  # by then its samples share the prompt
    assert len(masked.masks) == len(bench.compiler.made) == len(bench.masks) == 3
    assert bench.plan is not None
    assert len(bench.plan.rows) == 4
    assert sorted(len(compiled.taken) for compiled in bench.compiler.made) == [0, 0, 1]


def test_rows_in_lockstep_for_another_reason_get_no_mask() -> None:
    bench = Bench()
    assert not bench.turn(Submit(evolve(ask("a"), sampling=SamplingParams()))).masks
    assert not bench.compiler.made


def test_who_comes_with_output_gets_a_matcher_that_has_seen_it() -> None:
    bench = Bench()
    assert allowed(bench.turn(Submit(ask("a", output=(9, 8))))) == {0: 2}
    assert bench.compiler.made[0].taken == [9, 8]


def test_a_matcher_goes_back_to_where_its_sample_is() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")))
    bench.turn()
    early, plan = bench.state, bench.plan
    bench.turn()
    assert plan is not None
    assert allowed(bench.masks.begin(plan, early).result(5)) == {0: 1}
    assert bench.compiler.made[0].calls[-2:] == ["rollback 1", "advance 0"]


def test_an_id_that_is_used_again_gets_a_new_matcher() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")))
    bench.turn()
    bench.turn(Finish("a", 0, 1), Submit(ask("a")))
    assert len(bench.compiler.made) == 2
    bench.masks.drop([("a", 0), ("unknown", 0)])
    assert not len(bench.masks)


def test_a_matcher_that_cannot_go_on_ends_only_its_sample() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")), Submit(ask("b")))
    bench.compiler.made[0].broken = True
    masked = bench.turn()
    assert masked.ends == (Finish("a", 0, 1, "error", f"{STUCK_ERROR}: too much work"),)
    assert [mask.index for mask in masked.masks] == [1]


def test_who_comes_later_gets_the_matcher_of_one_that_has_ended() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")))
    bench.turn()
    bench.masks.drop([("a", 0)])
    assert bench.compiler.made[0].served == 1
    b, c = ask("b"), ask("c")
    # It waits for nothing; who is third has to.
    assert bench.masks.add_requests([b, c]) == (Pause("c", 0),)
    assert allowed(bench.turn(Finish("a", 0, 1), Submit(b))) == {0: 0}
    assert allowed(bench.turn()) == {0: 1}
    (walker,) = bench.compiler.made
    assert walker.taken == [9]


def test_who_had_long_outputs_before_it_may_go_through_a_new_one() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")), Submit(ask("also")))
    bench.turn()
    bench.masks.drop([("also", 0), ("a", 0)])
    b = ask("b")
    bench.masks.add_requests([b])
    bench.turn(Finish("a", 0, 1), Finish("also", 0, 1), Submit(b))
    bench.turn()
    walker, _ = bench.compiler.made
    walker.broken = True
    masked = bench.turn()
    assert not masked.ends
    assert allowed(masked) == {0: 2}
    # No other that served, although one is idle: the new one says what may come.
    assert bench.compiler.made[2].taken == [9, 9]
    bench.compiler.made[2].broken = True
    (end,) = bench.turn().ends
    assert end == Finish("b", 0, 3, "error", f"{STUCK_ERROR}: too much work")
    # Nor does a sample get it that comes then, or the one that it had before.
    bench.masks.drop([("b", 0)])
    assert bench.masks.add_requests([ask("d"), ask("e")]) == (Pause("e", 0),)


def test_many_rows_are_divided_between_threads() -> None:
    bench = Bench()
    masked = bench.turn(*[Submit(ask(f"{i}")) for i in range(8)])
    assert sorted(mask.index for mask in masked.masks) == list(range(8))
    assert {mask.bits for mask in masked.masks} == {bytes([1 << EOS, 0, 0, 0])}


def test_where_the_end_is_to_be_ignored_it_comes_only_once_nothing_else_may() -> None:
    bench = Bench()
    sampling = {"ignore_eos": True}
    masked = bench.turn(Submit(ask("a", sampling=sampling, stop_ids=frozenset())))
    assert masked.masks == ()
    assert masked.ends == (Finish("a", 0, 0, "stop"),)
    later = bench.turn()
    assert later.masks == (Mask(0, bytes([1 << 2, 0, 0, 0])),)


def test_masks_are_written_to_the_memory_that_is_lent_for_their_step() -> None:
    bench, lent = Bench(), dict[int, Lines]()

    def lend(step: int) -> Lines:
        lent[step] = np.zeros((3, 1), np.int32)
        return lent[step]

    bench.masks.use_memory(lend)
    plain = evolve(ask("b"), sampling=SamplingParams())
    masked = bench.turn(Submit(ask("a")), Submit(plain), Submit(ask("c")))
    assert masked == StepMasks(written=True)
    assert [line.tolist() for line in lent[0]] == [[1 << EOS], [-1], [1 << EOS]]
    bench.compiler.made[0].broken = True
    masked = bench.turn()
    assert masked.written
    assert [end.id for end in masked.ends] == ["a"]
    assert [line.tolist() for line in lent[1]] == [[-1], [-1], [1 << EOS | 1 << 2]]


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_memory_that_does_not_fit_is_not_written_to(shape: tuple[int, int]) -> None:
    bench, lent = Bench(), np.zeros(shape, np.int32)
    bench.masks.use_memory(lambda _: lent)
    masked = bench.turn(Submit(ask("a")), Submit(ask("b")))
    assert not masked.written
    assert allowed(masked) == {0: 0, 1: 0}
    assert not lent.any()


def test_a_thread_s_mask_does_not_outlive_the_way_it_was_made_for() -> None:
    bench = Bench()
    bench.turn(Submit(ask("a")))
    bench.turn()
    grammar = bench.masks._samples["a", 0]
    grammar.allowed = AllowedTokens(1, b"\x40\0\0\0")  # as if a thread had made it
    early, plan = bench.state, bench.plan
    assert plan is not None
    assert allowed(bench.masks.begin(plan, early).result(5)) == {0: 16}
    bench.turn()
    assert allowed(bench.masks.begin(plan, early).result(5)) == {0: 1}
    assert allowed(bench.masks.begin(plan, early).result(5)) == {0: 1}


def test_where_the_library_cannot_be_loaded_all_that_need_it_end() -> None:
    def missing() -> Any:
        raise GrammarError("there is none")

    bench = Bench()
    bench.masks._grammars = Grammars(missing)
    masked = bench.turn(Submit(ask("a")), Submit(ask("b")))
    assert not masked.masks
    message = f"{STUCK_ERROR}: there is none"
    assert masked.ends == tuple(Finish(name, 0, 0, "error", message) for name in "ab")
