"""What an engine counts, against counts by hand."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.analysis.drafts import sample_drafts, step_drafts, tally_of
from minfer.effects.live.totals import (
    ACCEPTED_PER_POSITION,
    COUNTERS,
    ITL,
    SECONDS_BOUNDS,
    STEP_TOKENS,
    TOKENS_BOUNDS,
    TTFT,
    Histogram,
    HistogramBuilder,
    TotalsCounter,
)
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterLoading,
    AdapterLost,
    Admitted,
    Discarded,
    Emit,
    Ended,
    Execute,
    Finished,
    Loading,
    LostBlocks,
    PolicyOverride,
    Preempted,
    Recomputing,
)
from minfer.records.plan import Yields
from minfer.records.state import EngineState, Transition, Turn, initial
from minfer.records.tiers import TransferKind
from minfer.speculate.tally import NO_DRAFTS
from tests.core.recorded import recorded, storm
from tests.core.simulation.clocked import Run
from tests.core.simulation.drafted import by_device, by_host
from tests.effects.watched import settle

PAIR = (("a", 0), ("b", 0))
BOTH: Yields = ((5,), (6,))


def at(moment: float) -> EngineState:
    return evolve(initial(EngineConfig(num_blocks=9)), time=moment)


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    buckets = HistogramBuilder((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        buckets.add(value)
    buckets.add(9.0, times=3)
    assert buckets.histogram() == Histogram((1.0, 2.0), (2, 2, 4), 7.5 + 27)
    histogram = buckets.histogram()
    buckets.add(1.0)
    assert histogram.counts == (2, 2, 4)  # as it was


def test_bounds_ascend() -> None:
    for bounds, first, last in (
        (SECONDS_BOUNDS, 0.001, 5000.0),
        (TOKENS_BOUNDS, 1.0, 5_000_000.0),
    ):
        assert (bounds[0], bounds[-1]) == (first, last)
        assert list(bounds) == sorted(set(bounds))


def test_nothing_happened_yet() -> None:
    totals = TotalsCounter().totals()
    assert totals.counts == dict.fromkeys(COUNTERS, 0)
    assert {name: histogram.total for name, histogram in totals.histograms.items()} == {
        TTFT: 0.0,
        ITL: 0.0,
        STEP_TOKENS: 0.0,
    }


def test_each_reason_has_its_count() -> None:
    tally = TotalsCounter()
    host, fetch = TransferKind.LOAD_FROM_HOST, TransferKind.FETCH_FROM_EXTERNAL
    reasons = (
        Admitted("a", 0, 2.0, 8, 12, cached=8, prompt=10),
        Admitted("a", 1, 2.0, 8, 12, cached=8, prompt=10),
        Admitted("a", 0, 2.0, 8, 12),  # it comes back
        Preempted("a", 0, ("b", 0), 12, 12),
        Discarded(3, "an error", plans=2, rows=5),
        PolicyOverride("rank", "it raised"),
        Loading("b", 0, 5, 2, 0.1, 0.2, host),
        Recomputing("c", 0, 5, 1, 0.2, 0.1, host),
        Loading("d", 0, 7, 1, 0.1, 0.2, fetch),
        Recomputing("e", 0, 5, 4, 0.2, 0.1, fetch),
        LostBlocks(3, "torn", host),
        LostBlocks(2, "missing", fetch),
        AdapterLoading("a", 0, "ab", 1, ""),
        AdapterLost("ab", 1, "torn", 1),
    )
    tally.count_turn(Transition(at(5.0), (), reasons))
    assert tally.totals().counts == {
        "prompt_tokens": 10,
        "generation_tokens": 0,
        "prefix_cache_queries": 20,
        "prefix_cache_hits": 16,
        "num_preemptions": 1,
        "kv_host_loaded_blocks": 3,
        "kv_host_recomputed_blocks": 4,
        "kv_host_lost_blocks": 3,
        "kv_keyed_loaded_blocks": 6,
        "kv_keyed_recomputed_blocks": 1,
        "kv_keyed_lost_blocks": 2,
        "adapter_loads": 1,
        "failed_adapter_loads": 1,
        "failed_steps": 2,
        "overruled_policy_answers": 1,
        "spec_decode_num_drafts": 0,
        "spec_decode_num_draft_tokens": 0,
        "spec_decode_num_accepted_tokens": 0,
    }
    tally.count_turn(Transition(at(6.0), (Emit((("a", 0), ("a", 1)), ((1, 2), ())),)))
    assert tally.totals().histograms[TTFT].total == 6.0 - 3.0  # it came at 3 s
    ends = (Finished("a", 0, "stop", 2), Finished("a", 1, "stop", 0))
    tally.count_turn(Transition(at(7.0), (Emit((), (), ends),)))
    assert not tally.last


def test_who_is_left_out_of_a_turn_has_a_longer_gap() -> None:
    tally = TotalsCounter()
    turns = [
        (1.0, PAIR, BOTH),
        (2.0, PAIR, BOTH),
        (3.0, PAIR, ((5,), ())),
        (4.0, (), ()),
        (6.0, PAIR, BOTH),
        (9.0, PAIR, BOTH),
    ]
    for moment, ids, tokens in turns:
        tally.count_turn(Transition(at(moment), (Emit(ids, tokens),)))
    gaps = tally.totals().histograms[ITL]
    assert sum(gaps.counts) == 2 + 1 + 2 + 2
    assert gaps.total == (1 + 1) + 1 + (3 + 4) + (3 + 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("run", [storm, recorded])
def test_storms_are_counted_as_by_hand(
    run: Callable[[int, int], tuple[EngineConfig, list[Turn]]], seed: int
) -> None:
    _, turns = run(seed, 80)
    tally, tokens, plans, gaps = TotalsCounter(), 0, list[int](), 0.0
    last = dict[tuple[str, int], float]()
    for turn in turns:
        tally.count_turn(turn.transition)
        now = turn.transition.state.time
        for command in turn.transition.commands:
            if isinstance(command, Execute):
                plans.append(sum(command.plan.num_scheduled_tokens))
            if isinstance(command, Emit):
                for sample, new in zip(command.ids, command.tokens, strict=True):
                    tokens += len(new)
                    if new and sample in last:
                        gaps += now - last[sample]
                    if new:
                        last[sample] = now
        for reason in turn.transition.reasons:
            if isinstance(reason, Ended):
                last.pop((reason.id, reason.sample), None)
            if isinstance(reason, Admitted) and reason.prompt:
                last.pop((reason.id, reason.sample), None)
    totals = tally.totals()
    assert totals.counts["generation_tokens"] == tokens
    assert sum(totals.histograms[STEP_TOKENS].counts) == len(plans)
    assert totals.histograms[STEP_TOKENS].total == sum(plans)
    assert totals.histograms[ITL].total == pytest.approx(gaps)


@pytest.mark.long
def test_a_steady_turn_costs_microseconds(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    sizes: dict[str, Any] = {
        "num_gpu_blocks_override": 512,
        "max_num_seqs": 64,
        "block_size": 8,
    }
    with LLM(folder, executor="oracle", **sizes) as llm:
        fold = llm.worker.tally.count_turn

        def timed(transition: Transition) -> None:
            started = time.thread_time()  # others may run beside
            fold(transition)
            times.append(time.thread_time() - started)

        monkeypatch.setattr(llm.worker.tally, "count_turn", timed)
        llm.generate(
            [[i + 1] for i in range(64)], SamplingParams(max_tokens=60, ignore_eos=True)
        )
        settle(llm)
    assert statistics.median(times) < 60e-6  # 6 us on an idle machine


@pytest.mark.parametrize("run", [by_device, by_host])
def test_drafts_are_counted_by_place(run: Callable[[], Run]) -> None:
    tally, drafts_total = TotalsCounter(), NO_DRAFTS
    for turn in run().turns:
        change = turn.before, turn.events, turn.transition
        tally.count_drafts(step_drafts(*change))
        drafts_total = drafts_total.plus(tally_of(sample_drafts(*change)))
    counts = tally.totals().counts
    assert counts["spec_decode_num_drafts"] == drafts_total.rows > 0
    assert counts["spec_decode_num_draft_tokens"] == sum(drafts_total.proposed)
    assert counts["spec_decode_num_accepted_tokens"] == sum(drafts_total.accepted)
    places = [counts[f"{ACCEPTED_PER_POSITION}{place}"] for place in range(3)]
    assert places == [*drafts_total.accepted]
    assert f"{ACCEPTED_PER_POSITION}3" not in counts
