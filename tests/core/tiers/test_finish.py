"""The end of a transfer."""

from attrs import evolve

from minfer.records.messages import Submit
from tests.core.tiers.test_keyed import ALONE, Keyed
from tests.core.tiers.test_tiers import AGAIN, LONG


def test_pages_of_blocks_that_were_computed_meanwhile_are_free() -> None:
    bench = Keyed(evolve(ALONE, num_blocks=12))
    bench.serve(LONG)
    bench.push_out()
    bench.late = True
    bench.turn(Submit(AGAIN), Submit(evolve(LONG, id="anew", reads_cache=False)))
    while "anew" in bench.state.requests:
        bench.turn()
    assert bench.fetches
    bench.late = False
    bench.settle()
    assert bench.out["again", 0] == bench.out["anew", 0] == bench.right(LONG)
    assert bench.state.blocks.available == 12
    assert bench.state.blocks.prefix.cached + bench.state.blocks.free == 12
