"""Who needs long for a mask is planned once that is there."""

import concurrent.futures.thread
import threading
from itertools import pairwise

import pytest

from minfer.effects.live.constraints.grammar_masks import (
    STUCK_ERROR,
    GrammarMasks,
)
from minfer.effects.live.constraints.sample_grammars import DueMask
from minfer.effects.text.grammars.grammar_library import MASK_WAIT_SECONDS, GrammarError
from minfer.effects.text.grammars.store import Grammars
from minfer.records.messages import Cancel, Ignored, Pause
from tests.effects.live.matchers import Clock, Counting, ask, counted
from tests.effects.live.slow import SLOW, Engine, on, plain


def quick_ones(clock: Clock, *names: str) -> Engine:
    """Beside one without a constraint, some that run, of none of whom masks are slow."""
    engine = Engine(clock)
    engine.turn(plain(), *(ask(name, max_tokens=90) for name in names))
    engine.threads.run()
    engine.turn(times=4)
    assert not engine.slow
    assert not engine.threads.jobs
    return engine


def test_who_arrives_is_paused_until_its_mask_is_there(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    assert engine.reported() == [Pause("a", 0)]
    assert len(engine.threads.jobs) == 1
    engine.turn(times=5)
    assert engine.lengths("p", "a") == [5, 0]
    assert not engine.compiler.made  # the matcher too is made by the thread
    engine.threads.run()
    engine.turn()
    assert engine.reported() == [on("a")]
    engine.turn(times=5)
    assert engine.tokens["a"] == counted(4)
    assert engine.lengths("p") == [11]


def test_each_sample_of_a_request_is_paused_for_itself(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a", n=3))
    assert engine.reported() == [Pause("a", i) for i in range(3)]
    engine.threads.run()
    engine.turn()
    assert engine.reported() == [Pause("a", 0, paused=False)]
    # The others wait for the prompt of the first: who has no seat has no matcher.
    assert engine.driver.state.paused == {("a", 1), ("a", 2)}
    assert len(engine.compiler.made) == 1
    for _ in range(4):
        engine.turn()
        engine.threads.run()
    engine.turn()
    assert len(engine.compiler.made) == 3


def test_who_was_quick_is_slow_no_more(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [MASK_WAIT_SECONDS, SLOW]
    engine.turn(plain(), ask("a"), ask("b"))
    assert engine.slow == {"a", "b"}
    engine.threads.run()
    assert engine.slow == {"b"}
    before = engine.lengths("a")[0]
    engine.turn(times=6)
    assert engine.lengths("a")[0] >= before + 4  # a token each turn
    assert engine.lengths("b") == [1]  # one, and it is paused again
    assert engine.driver.state.paused == {("b", 0)}


def test_a_slow_row_skips_steps_while_no_other_runs(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(ask("a"))
    lengths = [0]
    for _ in range(5):
        engine.threads.run()
        engine.turn(times=4)
        lengths += engine.lengths("a")
        assert engine.driver.state.paused == {("a", 0)}
    # Two steps are planned at once then, and the masks of the second one are its own.
    assert {b - a for a, b in pairwise(lengths)} <= {1, 2}
    assert engine.tokens["a"] == counted(lengths[-1])


def test_threads_make_the_masks_of_a_request_after_one_was_late(clock: Clock) -> None:
    engine = quick_ones(clock, "a", "b")
    engine.turn(ask("c", n=2))
    for _ in range(4):
        engine.threads.run()
        engine.turn(times=2)
    assert not engine.slow
    engine.compiler.made[-1].cost = 1.01 * MASK_WAIT_SECONDS
    engine.turn()
    assert engine.slow == {"c"}
    assert len(engine.masks._slow) == 2  # both samples
    engine.turn(times=3)
    assert engine.driver.state.paused == {("c", 0), ("c", 1)}
    held_up, before = engine.held_up, engine.lengths("a", "b", "p")
    engine.compiler.made[-1].cost = 0
    for _ in range(5):  # however quick its masks are from then on
        engine.threads.run()
        engine.turn(times=4)
        assert engine.slow == {"c"}
    assert engine.held_up == held_up
    after = engine.lengths("a", "b", "p")
    assert [new - old for new, old in zip(after, before, strict=True)] == [20] * 3
    assert engine.tokens["a"] == counted(after[0])


def test_masks_within_the_bound_make_no_row_slow(clock: Clock) -> None:
    engine = quick_ones(clock, "a", "b")
    for walker in engine.compiler.made:
        walker.cost = MASK_WAIT_SECONDS
    engine.turn(times=6)
    assert not engine.slow


@pytest.mark.parametrize("error", [GrammarError("no way"), RuntimeError("no way")])
@pytest.mark.parametrize("late", [False, True])
def test_a_matcher_that_cannot_be_made_ends_only_its_sample(
    clock: Clock, error: Exception, late: bool
) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"), ask("b"))
    if late:
        engine.masks.drop([("a", 0)])  # it needs another one
        engine.threads.run()
        engine.masks.drop([("a", 0)])
    engine.compiler.error = error
    engine.threads.run()
    engine.turn(times=5)
    ended = engine.ends["a"]
    assert (ended.reason, ended.length) == ("error", 0)
    assert ended.error == f"{STUCK_ERROR}: no way"
    assert engine.tokens["b"] == counted(len(engine.tokens["b"]))
    assert min(engine.lengths("b", "p")) >= 3
    assert len(engine.masks) == 1


def test_a_matcher_that_breaks_in_a_thread_ends_only_its_sample(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(plain(), ask("a"))
    engine.threads.run()
    engine.turn(times=4)
    (walker,) = engine.compiler.made
    walker.broken = True
    engine.threads.run()
    engine.turn(times=4)
    assert engine.ends["a"].error == f"{STUCK_ERROR}: too much work"
    assert engine.tokens["a"] == counted(1)
    assert set(engine.ends) == {"a"}


def test_any_error_in_a_thread_ends_only_its_sample(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))

    def broken(mask: DueMask) -> None:
        raise OSError(f"no more memory for {mask.grammar.name[0]}")

    monkeypatch.setattr(engine.masks, "_make_mask", broken)
    engine.threads.run()
    engine.turn(times=4)
    ended = engine.ends["a"]
    assert (ended.reason, ended.length) == ("error", 0)
    assert ended.error == (
        f"{STUCK_ERROR}: making its mask failed: OSError('no more memory for a')"
    )
    assert set(engine.ends) == {"a"}
    assert engine.lengths("p")[0] >= 4


def test_who_is_resumed_goes_on_where_its_output_ended(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a", output=tuple(counted(3))))
    engine.threads.run()
    (walker,) = engine.compiler.made
    assert walker.taken == counted(3)
    engine.turn(times=6)
    assert engine.tokens["a"] == counted(9)[3 : 3 + engine.lengths("a")[0]]
    assert engine.lengths("a")[0] >= 3
    assert len(engine.compiler.made) == 1


# --- who leaves while a thread is at it -------------------------------------------------


def test_what_is_made_for_a_sample_that_has_left_is_dropped(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    engine.turn(Cancel("a"))
    assert not len(engine.masks)
    engine.threads.run()
    engine.turn(times=2)
    ignored = [reason for reason in engine.reasons if isinstance(reason, Ignored)]
    assert [reason.event for reason in ignored] == ["pause"]
    assert not engine.slow
    assert engine.lengths("p") == [3]


def test_no_sample_gets_the_matcher_of_one_that_ended_slow(clock: Clock) -> None:
    engine = Engine(clock)
    engine.compiler.costs = [SLOW]
    engine.turn(plain(), ask("a"))
    engine.threads.run()
    engine.turn(times=2)
    engine.turn(Cancel("a"))
    engine.turn(ask("b"))
    assert engine.slow == {"b"}
    engine.threads.run()
    assert len(engine.compiler.made) == 2


def test_a_matcher_of_others_that_fails_in_a_thread_is_replaced(clock: Clock) -> None:
    engine = quick_ones(clock, "a")
    (walker,) = engine.compiler.made
    engine.turn(Cancel("a"))
    engine.turn(ask("b", max_tokens=90))
    assert not engine.slow  # it has that one
    engine.turn(times=3)
    assert engine.lengths("b")[0] > 0
    walker.cost = SLOW
    engine.turn(times=2)
    assert engine.slow == {"b"}
    engine.turn(times=4)
    assert engine.threads.jobs
    walker.broken = True
    engine.threads.run()
    assert len(engine.compiler.made) == 2
    held_up = engine.held_up
    engine.turn(times=5)
    assert engine.held_up == held_up
    assert engine.lengths("b")[0] > 4
    assert "b" not in engine.ends
    assert engine.tokens["b"] == counted(engine.lengths("b")[0])


def test_a_matcher_that_a_thread_may_use_is_not_shared(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    [job] = engine.threads.jobs
    job.do()  # it is slow no more, and the thread is about to say that it is done
    assert not engine.slow
    engine.turn(Cancel("a"))
    engine.turn(ask("b"))
    assert engine.slow == {"b"}


def test_a_job_of_one_that_has_left_takes_no_matcher(clock: Clock) -> None:
    engine = quick_ones(clock, "a")
    engine.turn(ask("b"))
    [job] = engine.threads.jobs
    engine.turn(Cancel("b"), Cancel("a"))
    job.do()
    assert len(engine.compiler.made) == 1
    engine.turn(ask("c"))
    assert not engine.slow  # it has the matcher of "a"


def test_who_has_a_seat_late_takes_what_is_idle_by_then(clock: Clock) -> None:
    engine = quick_ones(clock, "a")
    engine.turn(ask("b"))
    engine.turn(Cancel("a"))
    engine.threads.run()
    engine.turn(times=4)
    assert len(engine.compiler.made) == 1
    assert engine.tokens["b"] == counted(engine.lengths("b")[0])
    assert engine.lengths("b")[0] > 1


def test_a_mask_of_a_request_that_has_ended_lets_none_of_its_name_go_on(
    clock: Clock,
) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"))
    engine.turn(Cancel("a"))
    engine.turn(ask("a"))
    assert len(engine.threads.jobs) == 2
    engine.threads.run(1)  # the old one's
    assert not engine.driver.inbox
    engine.turn()
    assert not engine.reported()
    assert engine.slow == {"a"}
    engine.threads.run()
    engine.turn()
    assert engine.reported() == [on("a")]
    engine.turn(times=4)
    assert engine.tokens["a"] == counted(3)


def test_a_matcher_is_for_one_thread_at_a_time(clock: Clock) -> None:
    engine = Engine(clock)
    go, calls = threading.Event(), list[str]()

    class Waiting(Counting):
        def bits(self) -> bytes:
            calls.append("begins")
            assert go.wait(60)
            calls.append("ends")
            return super().bits()

    engine.compiler.kind = Waiting
    engine.turn(plain(), ask("a"))
    thread = threading.Thread(target=engine.threads.run)
    thread.start()
    while not calls:
        pass
    threading.Timer(0.02, go.set).start()
    engine.turn(on("a"))  # although it is not there yet
    engine.turn()
    assert calls[:2] == ["begins", "ends"]
    thread.join()
    engine.turn(times=3)
    assert engine.tokens["a"] == counted(engine.lengths("a")[0])
    assert calls == ["begins", "ends"] * (len(calls) // 2)


def test_a_sample_whose_masks_are_being_made_may_be_closed(clock: Clock) -> None:
    engine = Engine(clock)
    engine.turn(plain(), ask("a"), ask("b"))
    started = []

    class Closing(Counting):
        def bits(self) -> bytes:
            started.append(self)
            engine.driver.close()
            return super().bits()

    engine.compiler.kind = Closing
    engine.threads.run()
    assert len(started) == 1  # the other one's was cancelled
    assert not len(engine.masks)
    assert not engine.slow


def test_a_program_that_ends_breaks_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread makes a mask any more; a row that needs one waits, or makes it itself."""
    engine = Engine(clock)
    threads = GrammarMasks(Grammars(lambda: engine.compiler), 4)._threads
    engine.masks._threads = threads
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)  # as its end does
    engine.turn(plain(), ask("a"))
    engine.turn(times=3)
    assert engine.lengths("p", "a") == [3, 0]
    engine.turn(on("a"), times=4)
    assert engine.tokens["a"] == counted(engine.lengths("a")[0])
    assert engine.tokens["a"]
