"""A line about the load every ten seconds, and none without any."""

from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.effects.live.load_log import LoadLog
from minfer.effects.live.totals import Totals

COUNTS = {
    "prompt_tokens": 0.0,
    "generation_tokens": 0.0,
    "prefix_cache_queries": 0.0,
    "prefix_cache_hits": 0.0,
}


def test_a_line_is_due_every_ten_seconds_under_load() -> None:
    with LLM(executor="dry") as llm:
        empty = llm.client.snapshot()
    idle = evolve(empty, time=0.0, blocks=10, blocks_free=10, totals=Totals(COUNTS, {}))
    log = LoadLog(idle)
    counts = {
        "prompt_tokens": 500.0,
        "generation_tokens": 100.0,
        "prefix_cache_queries": 500.0,
        "prefix_cache_hits": 125.0,
    }
    busy = evolve(
        idle, running=3, waiting=2, blocks_free=6, totals=Totals(counts, {}), time=9.9
    )
    assert log.line(busy) is None  # not yet
    assert log.line(evolve(busy, time=20.0)) == (
        "running 3, waiting 2; tokens/s: 25.0 in, 5.0 out; KV cache 40.0 %, "
        "prefix hits 25.0 %"
    )
    assert log.line(evolve(busy, time=29.0)) is None
    stuck = log.line(evolve(busy, time=30.0))
    assert stuck is not None
    assert stuck.startswith("running 3, waiting 2; tokens/s: 0.0 in, 0.0 out;")
    gone = evolve(busy, running=0, waiting=0, time=41.0)
    assert log.line(gone) is None  # idle
    assert log.line(evolve(gone, time=60.0)) is None


def test_the_counts_are_the_engines() -> None:
    with LLM(executor="dry") as llm:
        before = llm.client.snapshot()
        log = LoadLog(before)
        llm.generate("def f(", SamplingParams(max_tokens=20, ignore_eos=True))
        snapshot = llm.client.snapshot()
        line = log.line(evolve(snapshot, time=before.time + 10.0))
    assert line is not None
    assert line.startswith("running 0, waiting 0; tokens/s: 0.3 in, 2.0 out; KV cache")
