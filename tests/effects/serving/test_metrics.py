"""Metrics are folds: their sums agree with what the engine's transitions say
one by one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minfer import LLM, SamplingParams
from minfer.effects.execution.tiers.block_folder import REFUSED, BlockFolder
from minfer.effects.execution.tiers.peers.peer_plan import PREFILL, PeerPlan
from minfer.effects.execution.tiers.peers.peers import Peers
from minfer.effects.serving.observability.metric_help import HELP
from minfer.effects.serving.observability.metrics import Metrics
from minfer.records.messages import Admitted, Emit, Execute
from minfer.records.policy import FirstCome
from minfer.records.state import Transition
from minfer.simulation.oracle import Oracle
from tests.effects.tiny_model import write_checkpoint
from tests.effects.watched import Watched

Made = Callable[..., tuple[LLM, Metrics, list[Transition]]]
STEADY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def made(folder: str) -> Iterator[Made]:
    opened: list[LLM] = []

    def make(**settings: Any) -> tuple[LLM, Metrics, list[Transition]]:
        llm = LLM(folder, executor="oracle", block_size=8, **settings)
        opened.append(llm)
        return llm, Metrics(llm, "tiny"), Watched(llm)

    yield make
    for llm in opened:
        llm.close()


def settle(llm: LLM) -> None:
    """Wait for the engine's thread to end: outputs are out before the turn is counted."""
    if llm.worker.thread is not None:
        llm.worker.thread.join(10)
        assert not llm.worker.thread.is_alive()


@pytest.mark.long
def test_each_says_in_plain_words_what_it_is(made: Made, tmp_path: Path) -> None:
    llm, metrics, _ = made(journal=tmp_path)
    llm.worker.store = BlockFolder(tmp_path, 1 << 20, "cpu")
    llm.generate([[5] * 20], STEADY)
    text = generate_latest(metrics.registry).decode()
    families = [
        family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("minfer_")
    ]
    reported = {
        family.name.removeprefix("minfer_"): family.documentation for family in families
    }
    # And no help of what is not, but for what engines count that send each other blocks.
    sent = Peers(PeerPlan(name="x", role=PREFILL), 1).totals().keys()
    assert sent <= HELP.keys()
    assert reported.keys() - {"cache_config_info"} == HELP.keys() - sent
    for name, words in reported.items():
        assert words.endswith("."), name
        assert len(words.split()) >= 5, name
        assert name.replace("_", " ") not in words, name


def read(metrics: Metrics) -> dict[str, float]:
    """Samples by name and their labels' values but the model's, which must be right."""
    found = {}
    for family in text_string_to_metric_families(
        generate_latest(metrics.registry).decode()
    ):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("minfer_"):
                assert labels.pop("model_name") == "tiny"
                found[" ".join([sample.name[7:], *labels.values()])] = sample.value
    return found


def test_counts_of_a_run(made: Made) -> None:
    llm, metrics, turns = made(num_gpu_blocks_override=64)
    llm.generate([[i] * 20 for i in range(1, 6)], STEADY)
    llm.generate([1] * 20, SamplingParams(max_tokens=4, n=2, seed=0, ignore_eos=True))
    settle(llm)
    found = read(metrics)
    assert found["prompt_tokens_total"] == 120
    assert found["generation_tokens_total"] == 158
    assert found["prefix_cache_queries_total"] == 140  # the samples of the second request
    hits = [r.cached for t in turns for r in t.reasons if isinstance(r, Admitted)]
    assert found["prefix_cache_hits_total"] == sum(hits) >= 16
    assert found["request_success_total length"] == 7
    assert (
        found["request_success_total stop"] == found["request_success_total error"] == 0
    )
    assert found["request_prompt_tokens_count"] == 6
    assert found["request_prompt_tokens_sum"] == 120
    assert found["request_generation_tokens_sum"] == 158
    assert found["request_params_n_sum"] == 7
    assert found["request_params_max_tokens_sum"] == 154
    assert found["time_to_first_token_seconds_count"] == 7
    assert found["inter_token_latency_seconds_count"] == 5 * 29 + 2 * 3
    for name in (
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
    ):
        assert found[f"{name}_seconds_count"] == 6
    whole = (
        found["request_queue_time_seconds_sum"]
        + found["request_inference_time_seconds_sum"]
    )
    assert whole == pytest.approx(found["e2e_request_latency_seconds_sum"])
    assert found["request_time_per_output_token_seconds_count"] == 6
    assert found["num_preemptions_total"] == found["failed_steps_total"] == 0
    planned = [c.plan for t in turns for c in t.commands if isinstance(c, Execute)]
    assert found["iteration_tokens_total_count"] == len(planned)
    assert found["iteration_tokens_total_sum"] == sum(
        sum(plan.num_scheduled_tokens) for plan in planned
    )
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == 0
    assert found["cache_config_info 8 True 64"] == 1
    assert not llm.worker.tally.last


@pytest.mark.long
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_drafts_of_a_run(made: Made, folder: str, method: str) -> None:
    """The second time the host finds what the first one was answered."""
    how: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    how["adaptive"] = False
    if method == "draft_model":
        how["model"] = folder  # its own draft: the oracle says what it drafts
    llm, metrics, _ = made(num_gpu_blocks_override=64, speculative_config=how)
    reported = [llm.generate([[5] * 20], STEADY)[0].metrics for _ in range(2)]
    settle(llm)
    found = read(metrics)
    drafts = found["spec_decode_num_drafts_total"]
    proposed = found["spec_decode_num_draft_tokens_total"]
    accepted = found["spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted <= proposed <= 3 * drafts
    places = [
        found[f"spec_decode_num_accepted_tokens_per_pos_total {at}"] for at in range(3)
    ]
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    length = found["spec_decode_mean_acceptance_length"]
    assert length == pytest.approx(1 + accepted / drafts)
    sums = [0, 0]
    for one in reported:
        sums[0] += one.draft_tokens
        sums[1] += one.accepted_draft_tokens
    assert sums == [proposed, accepted]


def test_without_drafts_there_is_no_length(made: Made) -> None:
    llm, metrics, _ = made(num_gpu_blocks_override=64)
    llm.generate([[5] * 20], STEADY)
    settle(llm)
    found = read(metrics)
    assert found["spec_decode_mean_acceptance_length"] == 0
    assert found["spec_decode_num_drafts_total"] == 0
    assert not any("per_pos" in name for name in found)


def test_gaps_are_those_between_the_outputs_of_each_sequence(made: Made) -> None:
    llm, metrics, turns = made(
        num_gpu_blocks_override=12,
        max_num_seqs=6,
        max_model_len=64,
        max_num_batched_tokens=24,
    )
    params = [
        SamplingParams(max_tokens=3 + 5 * i, temperature=0, ignore_eos=True)
        for i in range(9)
    ]
    llm.generate([[i + 1] * (3 + 2 * i) for i in range(9)], params)
    settle(llm)
    last: dict[tuple[str, int], float] = {}
    gaps = []
    for turn in turns:
        for emit in (c for c in turn.commands if isinstance(c, Emit)):
            for name, tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens:
                    gaps += [turn.state.time - last[name]] if name in last else []
                    last[name] = turn.state.time
    found = read(metrics)
    assert found["inter_token_latency_seconds_count"] == len(gaps) > 100
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(sum(gaps))
    assert found["time_to_first_token_seconds_count"] == 9
    assert found["num_preemptions_total"] > 0
    assert (
        found["prefix_cache_queries_total"] == found["prompt_tokens_total"]
    )  # once, at the first
    for listen_at in ("0.001", "0.01", "1.0"):
        below = sum(gap <= float(listen_at) for gap in gaps)
        assert found[f"inter_token_latency_seconds_bucket {listen_at}"] == below
    assert found["inter_token_latency_seconds_bucket +Inf"] == len(gaps)


@pytest.mark.long
def test_what_waits_and_why(made: Made) -> None:
    llm, metrics, _ = made(num_gpu_blocks_override=64, max_num_seqs=2)
    found: list[dict[str, float]] = []
    llm.frontend.after.append(lambda: found.append(read(metrics)))
    llm.generate(
        [[1], [2], [3], [4], [5]], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    settle(llm)
    then = found[4]
    assert then["num_requests_running"] == 2
    assert then["num_requests_waiting"] == 3
    assert then["num_requests_waiting_by_reason rows"] == 1
    assert then["num_requests_waiting_by_reason turn"] == 2
    assert 0 < then["kv_cache_usage_perc"] < 1
    assert "num_requests_waiting_by_reason rows" not in found[-1]


def test_ends_by_reason(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, metrics, _ = made(num_gpu_blocks_override=64)
    stream = llm.stream([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    token = llm.generate([1, 2], STEADY)[0].outputs[0].token_ids[0]
    llm.generate(
        [1, 2], SamplingParams(max_tokens=9, temperature=0, stop_token_ids=[token])
    )
    settle(llm)  # a step may still be in flight, for the executor that launched it
    broken = Oracle(8, 260)
    monkeypatch.setattr(llm.worker.driver.deferred, "executor", broken)
    monkeypatch.setattr(
        broken, "collect", lambda: broken.fail("device error", halfway=False)
    )
    assert llm.generate([1, 2], STEADY)[0].outputs[0].finish_reason == "error"
    settle(llm)
    found = read(metrics)
    ends = {
        why: found[f"request_success_total {why}"]
        for why in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert found["failed_steps_total"] >= 3
    assert found["request_prompt_tokens_count"] == 4
    assert not llm.worker.tally.last


def test_a_journal_says_whether_it_is_written(made: Made, tmp_path: Path) -> None:
    llm, metrics, _ = made(journal=tmp_path)
    assert (read(metrics)["journal_writing"], read(metrics)["journal_errors_total"]) == (
        1,
        0,
    )
    journal = llm.worker.journal
    assert journal is not None
    journal.failed, journal.errors = OSError(), 3
    found = read(metrics)
    assert (found["journal_writing"], found["journal_errors_total"]) == (0, 3)
    llm, metrics, _ = made()
    assert not [name for name in read(metrics) if name.startswith("journal")]


def test_files_of_blocks_are_counted(made: Made, tmp_path: Path) -> None:
    llm, metrics, _ = made()
    assert "kv_disk_stored_blocks_total" not in read(metrics)
    llm.worker.store = BlockFolder(tmp_path, 1 << 20, "cpu")
    llm.worker.store.counts[REFUSED + "torn"] += 2
    found = read(metrics)
    assert found["kv_disk_refused_files_total torn"] == 2
    assert found["kv_disk_refused_files_total missing"] == 0
    assert found["kv_disk_stored_blocks_total"] == 0


def test_a_turn_without_news_changes_nothing(made: Made) -> None:
    llm, metrics, _ = made(num_gpu_blocks_override=64)
    before = generate_latest(metrics.registry).split(b"# HELP process_")[0]
    llm.worker.tally.count_turn(Transition(llm.worker.driver.state))
    assert generate_latest(metrics.registry).split(b"# HELP process_")[0] == before


def test_a_policys_answers_that_could_not_be_used_are_counted(made: Made) -> None:
    class Raises(FirstCome):
        def rank(self, *_: Any) -> Any:
            raise KeyError("a policy's own")

    llm, metrics, _ = made(num_gpu_blocks_override=64, scheduling_policy=Raises())
    llm.generate([[1, 2], [3, 4], [5]], SamplingParams(max_tokens=3))
    settle(llm)
    found = read(metrics)
    assert found["overruled_policy_answers_total"] == 3
    assert found["request_success_total length"] == 3


def test_a_stop_string_in_the_last_token_counts_as_the_reader_sees_it() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with LLM(executor="dry") as llm:
        metrics = Metrics(llm, "tiny")
        (whole,) = llm.generate(["a"], greedy)[0].outputs
        last = llm.generate(["a"], evolve(greedy, max_tokens=3))[0].outputs[0].text
        stop = whole.text.removeprefix(last)
        (cut,) = llm.generate(["a"], evolve(greedy, stop=(stop,)))[0].outputs
        settle(llm)
        found = read(metrics)
    assert (whole.finish_reason, cut.finish_reason) == ("length", "stop")
    ends = {name: found[f"request_success_total {name}"] for name in ("stop", "length")}
    assert ends == {"stop": 1, "length": 2}
