"""Beams in the engine: searches beside other requests, with and without room for all."""

from typing import Any

import pytest
from attrs import evolve

from minfer.beam import NEVER, BeamSearch
from minfer.messages import Submit
from minfer.request import Request, SamplingParams
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask
from tests.core.world import beam_reference


def search(name: str, width: int, length: int = 6, most: int = 8, **more: Any) -> Request:
    how = more.pop("beams", BeamSearch())
    greedy = SamplingParams(temperature=0)
    bound = {"sampling": greedy, "lockstep": True, "beams": how}
    return ask(name, length, most, n=width, **bound, **more)


def is_right(bench: Bench, wish: Request) -> None:
    config = bench.config
    due = beam_reference(
        wish, config.block_size, VOCAB, config.max_model_len, config.window
    )
    assert len(due) == wish.n
    for sample, one in enumerate(due):
        done = bench.ended[wish.id, sample]
        assert bench.out[wish.id, sample] == one.tokens
        assert (done.reason, done.length) == (one.reason, len(one.tokens))
        assert done.logprob == one.logprob


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early", [False, True, NEVER])
def test_a_search_alone(width: int, early: bool | str) -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=8, num_blocks=80))
    wish = search(
        "a",
        width,
        11,
        13,
        beams=BeamSearch(early_stopping=early),
        stop_ids=frozenset({3, 5}),
    )
    bench.give(Submit(wish))
    bench.drain()
    is_right(bench, wish)
