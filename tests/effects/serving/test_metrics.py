"""Metrics are folds: their sums agree with what the engine's transitions say
one by one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minfer import LLM, SamplingParams
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running.unprepared_work import (
    LAUNCHES,
    MISSING,
    UnpreparedWork,
)
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
from tests.effects.watched import Watched, settle

StartLLM = Callable[..., tuple[LLM, Metrics, list[Transition]]]
STEADY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def start_llm(folder: str) -> Iterator[StartLLM]:
    opened: list[LLM] = []

    def make(**settings: Any) -> tuple[LLM, Metrics, list[Transition]]:
        llm = LLM(folder, executor="oracle", block_size=8, **settings)
        opened.append(llm)
        return llm, Metrics(llm, "tiny"), Watched(llm)

    yield make
    for llm in opened:
        llm.close()


OF_ADAPTERS = (
    "adapter_generation_tokens",
    "adapter_requests",
    "num_adapters_running",
    "num_adapters_waiting",
)


def count(llm: LLM, work: UnpreparedWork) -> None:
    """Have an executor without a device count, as one on a GPU does."""

    class CountingOracle(Oracle):
        def counts(self) -> dict[str, float]:
            return work.totals()

    executor: Any = llm.worker.driver.executor
    assert type(executor) is Oracle
    executor.__class__ = CountingOracle


@pytest.mark.long
def test_each_says_in_plain_words_what_it_is(start_llm: StartLLM, tmp_path: Path) -> None:
    llm, metrics, _ = start_llm(journal=tmp_path)
    llm.worker.store = BlockFolder(tmp_path, 1 << 20, "cpu")
    work = UnpreparedWork(torch.device("cpu"))
    count(llm, work)
    llm.generate([[5] * 20], STEADY)
    text = generate_latest(metrics.registry).decode()
    families = [
        family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("minfer_")
    ]
    help_texts = {
        family.name.removeprefix("minfer_"): family.documentation for family in families
    }
    # And no help of what is not, but for what engines count that send each other blocks,
    # and of adapters, which this one has not enabled.
    sent = Peers(PeerPlan(name="x", role=PREFILL), 1).totals().keys()
    others = {*sent, *OF_ADAPTERS}
    assert others <= HELP.keys()
    assert help_texts.keys() - {"cache_config_info"} == HELP.keys() - others
    for name, words in help_texts.items():
        assert words.endswith("."), name
        assert len(words.split()) >= 5, name
        assert name.replace("_", " ") not in words, name


def test_what_steps_did_unprepared_is_counted(start_llm: StartLLM) -> None:
    """By an executor on a GPU; by others, nothing."""
    llm, metrics, _ = start_llm()
    assert LAUNCHES not in llm.client.snapshot().totals.counts
    work = UnpreparedWork(torch.device("cpu"))
    count(llm, work)
    work.note_launch(StepShape(decode_rows=4, draws=4), MISSING, 0.25)
    text = generate_latest(metrics.registry).decode()
    assert 'minfer_steps_without_graph_total{model_name="tiny"} 1.0' in text
    assert 'minfer_steps_without_graph_seconds_total{model_name="tiny"} 0.25' in text
    assert 'minfer_kernels_compiled_in_steps_total{model_name="tiny"} 0.0' in text


def read(metrics: Metrics) -> dict[str, float]:
    """Samples by name and their labels' values but the model's, which must be right."""
    samples = {}
    for family in text_string_to_metric_families(
        generate_latest(metrics.registry).decode()
    ):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("minfer_"):
                assert labels.pop("model_name") == "tiny"
                samples[" ".join([sample.name[7:], *labels.values()])] = sample.value
    return samples


def test_counts_of_a_run(start_llm: StartLLM) -> None:
    llm, metrics, turns = start_llm(num_gpu_blocks_override=64)
    llm.generate([[i] * 20 for i in range(1, 6)], STEADY)
    llm.generate([1] * 20, SamplingParams(max_tokens=4, n=2, seed=0, ignore_eos=True))
    settle(llm)
    samples = read(metrics)
    assert samples["prompt_tokens_total"] == 120
    assert samples["generation_tokens_total"] == 158
    assert (
        samples["prefix_cache_queries_total"] == 140
    )  # the samples of the second request
    hits = [r.cached for t in turns for r in t.reasons if isinstance(r, Admitted)]
    assert samples["prefix_cache_hits_total"] == sum(hits) >= 16
    assert samples["request_success_total length"] == 7
    assert (
        samples["request_success_total stop"]
        == samples["request_success_total error"]
        == 0
    )
    assert samples["request_prompt_tokens_count"] == 6
    assert samples["request_prompt_tokens_sum"] == 120
    assert samples["request_generation_tokens_sum"] == 158
    assert samples["request_params_n_sum"] == 7
    assert samples["request_params_max_tokens_sum"] == 154
    assert samples["time_to_first_token_seconds_count"] == 7
    assert samples["inter_token_latency_seconds_count"] == 5 * 29 + 2 * 3
    for name in (
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
    ):
        assert samples[f"{name}_seconds_count"] == 6
    queue_and_inference = (
        samples["request_queue_time_seconds_sum"]
        + samples["request_inference_time_seconds_sum"]
    )
    assert queue_and_inference == pytest.approx(
        samples["e2e_request_latency_seconds_sum"]
    )
    assert samples["request_time_per_output_token_seconds_count"] == 6
    assert samples["num_preemptions_total"] == samples["failed_steps_total"] == 0
    planned = [c.plan for t in turns for c in t.commands if isinstance(c, Execute)]
    assert samples["iteration_tokens_total_count"] == len(planned)
    assert samples["iteration_tokens_total_sum"] == sum(
        sum(plan.num_scheduled_tokens) for plan in planned
    )
    assert samples["num_requests_running"] == samples["num_requests_waiting"] == 0
    assert samples["kv_cache_usage_perc"] == 0
    assert samples["cache_config_info 8 True 64"] == 1
    assert not llm.worker.tally.last


@pytest.mark.long
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_drafts_of_a_run(start_llm: StartLLM, folder: str, method: str) -> None:
    """The second time the host finds what the first one was answered."""
    spec_config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    spec_config["adaptive"] = False
    if method == "draft_model":
        spec_config["model"] = folder  # its own draft: the oracle says what it drafts
    llm, metrics, _ = start_llm(
        num_gpu_blocks_override=64, speculative_config=spec_config
    )
    metrics_of_runs = [llm.generate([[5] * 20], STEADY)[0].metrics for _ in range(2)]
    settle(llm)
    samples = read(metrics)
    drafts = samples["spec_decode_num_drafts_total"]
    proposed = samples["spec_decode_num_draft_tokens_total"]
    accepted = samples["spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted <= proposed <= 3 * drafts
    places = [
        samples[f"spec_decode_num_accepted_tokens_per_pos_total {position}"]
        for position in range(3)
    ]
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    length = samples["spec_decode_mean_acceptance_length"]
    assert length == pytest.approx(1 + accepted / drafts)
    sums = [0, 0]
    for request_metrics in metrics_of_runs:
        sums[0] += request_metrics.draft_tokens
        sums[1] += request_metrics.accepted_draft_tokens
    assert sums == [proposed, accepted]


def test_without_drafts_there_is_no_length(start_llm: StartLLM) -> None:
    llm, metrics, _ = start_llm(num_gpu_blocks_override=64)
    llm.generate([[5] * 20], STEADY)
    settle(llm)
    samples = read(metrics)
    assert samples["spec_decode_mean_acceptance_length"] == 0
    assert samples["spec_decode_num_drafts_total"] == 0
    assert not any("per_pos" in name for name in samples)


def test_gaps_are_those_between_the_outputs_of_each_sequence(start_llm: StartLLM) -> None:
    llm, metrics, turns = start_llm(
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
    samples = read(metrics)
    assert samples["inter_token_latency_seconds_count"] == len(gaps) > 100
    assert samples["inter_token_latency_seconds_sum"] == pytest.approx(sum(gaps))
    assert samples["time_to_first_token_seconds_count"] == 9
    assert samples["num_preemptions_total"] > 0
    assert (
        samples["prefix_cache_queries_total"] == samples["prompt_tokens_total"]
    )  # once, at the first
    for bound in ("0.001", "0.01", "1.0"):
        below = sum(gap <= float(bound) for gap in gaps)
        assert samples[f"inter_token_latency_seconds_bucket {bound}"] == below
    assert samples["inter_token_latency_seconds_bucket +Inf"] == len(gaps)


@pytest.mark.long
def test_what_waits_and_why(start_llm: StartLLM) -> None:
    llm, metrics, _ = start_llm(num_gpu_blocks_override=64, max_num_seqs=2)
    samples_by_turn: list[dict[str, float]] = []
    llm.frontend.after.append(lambda: samples_by_turn.append(read(metrics)))
    llm.generate(
        [[1], [2], [3], [4], [5]], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    settle(llm)
    fifth_turn = samples_by_turn[4]
    assert fifth_turn["num_requests_running"] == 2
    assert fifth_turn["num_requests_waiting"] == 3
    assert fifth_turn["num_requests_waiting_by_reason rows"] == 1
    assert fifth_turn["num_requests_waiting_by_reason turn"] == 2
    assert 0 < fifth_turn["kv_cache_usage_perc"] < 1
    assert "num_requests_waiting_by_reason rows" not in samples_by_turn[-1]


def test_ends_by_reason(start_llm: StartLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, metrics, _ = start_llm(num_gpu_blocks_override=64)
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
    samples = read(metrics)
    ends = {
        reason: samples[f"request_success_total {reason}"]
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert samples["failed_steps_total"] >= 3
    assert samples["request_prompt_tokens_count"] == 4
    assert not llm.worker.tally.last


def test_a_journal_says_whether_it_is_written(
    start_llm: StartLLM, tmp_path: Path
) -> None:
    llm, metrics, _ = start_llm(journal=tmp_path)
    assert (read(metrics)["journal_writing"], read(metrics)["journal_errors_total"]) == (
        1,
        0,
    )
    journal = llm.worker.journal
    assert journal is not None
    journal.failed, journal.errors = OSError(), 3
    samples = read(metrics)
    assert (samples["journal_writing"], samples["journal_errors_total"]) == (0, 3)
    llm, metrics, _ = start_llm()
    assert not [name for name in read(metrics) if name.startswith("journal")]


def test_files_of_blocks_are_counted(start_llm: StartLLM, tmp_path: Path) -> None:
    llm, metrics, _ = start_llm()
    assert "kv_disk_stored_blocks_total" not in read(metrics)
    llm.worker.store = BlockFolder(tmp_path, 1 << 20, "cpu")
    llm.worker.store.counts[REFUSED + "torn"] += 2
    samples = read(metrics)
    assert samples["kv_disk_refused_files_total torn"] == 2
    assert samples["kv_disk_refused_files_total missing"] == 0
    assert samples["kv_disk_stored_blocks_total"] == 0


def test_a_turn_without_news_changes_nothing(start_llm: StartLLM) -> None:
    llm, metrics, _ = start_llm(num_gpu_blocks_override=64)
    before = generate_latest(metrics.registry).split(b"# HELP process_")[0]
    llm.worker.tally.count_turn(Transition(llm.worker.driver.state))
    assert generate_latest(metrics.registry).split(b"# HELP process_")[0] == before


def test_a_policys_answers_that_could_not_be_used_are_counted(
    start_llm: StartLLM,
) -> None:
    class Raises(FirstCome):
        def rank(self, *_: Any) -> Any:
            raise KeyError("a policy's own")

    llm, metrics, _ = start_llm(num_gpu_blocks_override=64, scheduling_policy=Raises())
    llm.generate([[1, 2], [3, 4], [5]], SamplingParams(max_tokens=3))
    settle(llm)
    samples = read(metrics)
    assert samples["overruled_policy_answers_total"] == 3
    assert samples["request_success_total length"] == 3


# Names that vLLM 0.33 writes, as far as they are written here too.
OF_VLLM: dict[str, str] = dict.fromkeys(
    (
        "cache_config_info",
        "e2e_request_latency_seconds_sum",
        "generation_tokens_total",
        "inter_token_latency_seconds_bucket",
        "iteration_tokens_total_count",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prompt_tokens_total",
        "request_decode_time_seconds_sum",
        "request_generation_tokens_sum",
        "request_inference_time_seconds_sum",
        "request_params_max_tokens_sum",
        "request_params_n_sum",
        "request_prefill_time_seconds_sum",
        "request_prompt_tokens_sum",
        "request_queue_time_seconds_sum",
        "request_success_total",
        "request_time_per_output_token_seconds_sum",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds_bucket",
    ),
    "",
) | {"request_num_preemptions_sum": "request_preemptions_sum"}


def test_names_of_vllm_have_the_same_values(start_llm: StartLLM) -> None:
    llm, metrics, _ = start_llm(num_gpu_blocks_override=64)
    llm.generate([[i] * 20 for i in range(1, 6)], STEADY)
    settle(llm)
    assert "vllm:" not in generate_latest(metrics.registry).decode()
    metrics.vllm_names = True
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(dict)
    text = generate_latest(metrics.registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name][frozenset(sample.labels.items())] = sample.value
    engine = ("engine", "0")
    for name, own_name in OF_VLLM.items():
        assert samples[f"vllm:{name}"] == {
            labels | {engine}: value
            for labels, value in samples[f"minfer_{own_name or name}"].items()
        }, name
        assert samples[f"vllm:{name}"]
    reasons = samples["vllm:num_requests_waiting_by_reason"]
    assert {value for labels in reasons for key, value in labels if key == "reason"} == {
        "capacity",
        "deferred",
    }
    (adapters,) = samples["vllm:lora_requests_info"]
    assert ("max_lora", "0") in adapters


def test_a_stop_string_in_the_last_token_counts_as_the_reader_sees_it() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with LLM(executor="dry") as llm:
        metrics = Metrics(llm, "tiny")
        (full,) = llm.generate(["a"], greedy)[0].outputs
        last = llm.generate(["a"], evolve(greedy, max_tokens=3))[0].outputs[0].text
        stop = full.text.removeprefix(last)
        (cut,) = llm.generate(["a"], evolve(greedy, stop=(stop,)))[0].outputs
        settle(llm)
        samples = read(metrics)
    assert (full.finish_reason, cut.finish_reason) == ("length", "stop")
    ends = {name: samples[f"request_success_total {name}"] for name in ("stop", "length")}
    assert ends == {"stop": 1, "length": 2}
