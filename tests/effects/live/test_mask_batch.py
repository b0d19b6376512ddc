"""Who of a step is at its end, and draws what it likes."""

from minfer.effects.live.constraints.mask_batch import STUCK_ERROR, MaskBatch
from minfer.effects.live.constraints.sample_grammars import SampleGrammar
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.records.messages import Finish
from tests.effects.live.matchers import ask


def test_those_who_cannot_go_on_end_by_name_and_those_without_a_token_simply() -> None:
    batch = MaskBatch(free=[1])
    for line, name in ((0, "a"), (2, "b"), (3, "c"), (4, "d")):
        batch.samples[line] = SampleGrammar((name, 0), ask(name))
        batch.lengths[line] = 10 + line
    batch.errors = {2: GrammarError("no way"), 3: GrammarError("too slow")}
    assert batch.end({3, 4}) == (
        Finish("b", 0, 12, "error", f"{STUCK_ERROR}: no way"),
        Finish("c", 0, 13, "error", f"{STUCK_ERROR}: too slow"),
        Finish("d", 0, 14),
    )
    assert batch.free == [1, 2, 3, 4]


def test_of_whom_there_is_a_mask_nothing_ends() -> None:
    batch = MaskBatch(samples={0: SampleGrammar(("a", 0), ask("a"))}, lengths={0: 3})
    assert batch.end(()) == ()
    assert not batch.free
