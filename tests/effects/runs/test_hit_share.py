"""The prefix-hit share is one number: /metrics, replay, explain, the page, usage, a count
by hand.

It is what the cache gave at each sample's first admission, over the prompt tokens of
those samples.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minfer import LLM, SamplingParams
from minfer.analysis.explain import explain
from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.effects.runs.explain_command import figures
from minfer.effects.runs.page.columns import Run
from minfer.effects.serving.observability.metrics import Metrics
from minfer.records.messages import Admitted, Submit
from minfer.records.request import Request
from minfer.records.state import Turn
from tests.core.recorded import recorded, storm
from tests.effects.storms import hits_by_plans, tally_of, weather
from tests.effects.tiny_model import write_checkpoint
from tests.effects.watched import Watched, settle


def of_metrics(metrics: Metrics) -> tuple[int, int]:
    """Cached tokens and tokens of prompts, as a scraper reads them."""
    text = generate_latest(metrics.registry).decode()
    values = {
        s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    names = ("minfer_prefix_cache_hits_total", "minfer_prefix_cache_queries_total")
    return int(values[names[0]]), int(values[names[1]])


def of_replay(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """Likewise as `minfer replay` tells them; its share is theirs."""
    assert main(["replay", str(path), "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    hit, prompt = message["cached_tokens"], message["prompt_tokens"]
    assert message["hit_share"] == hit / prompt
    return hit, prompt


def of_page(turns: list[Turn]) -> tuple[int, int]:
    """Likewise as the viewer shows them."""
    run = Run()
    for turn in turns:
        run.add_turn(turn)
    return run.cached, run.prompt


@pytest.mark.parametrize("seed", [20, 74])
def test_metrics_replay_and_page_agree_with_a_count_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    config, turns = storm(seed, 400)
    events_seen = weather(turns)
    for kind in ("several samples", "preempted", "cancels", "resumed", "failed steps"):
        assert events_seen[kind] >= 10, f"the storm has hardly any {kind}"
    right = hits_by_plans(turns)
    assert 0 < right[0] < right[1]
    write_journal(tmp_path / "run.journal", config, turns)
    assert of_replay(tmp_path / "run.journal", capsys) == right
    assert of_page(turns) == right
    counts = tally_of(turns).counts
    assert (counts["prefix_cache_hits"], counts["prefix_cache_queries"]) == right


# Worlds in which no id comes again: of one that does, the first request is explained.
@pytest.mark.parametrize("seed", [4, 10, 22])
def test_explanations_of_all_requests_add_up_to_it(seed: int) -> None:
    config, turns = recorded(seed)
    hit = prompt = 0
    for name in {e.request.id for t in turns for e in t.events if isinstance(e, Submit)}:
        explained: Any = figures(config, explain(config, turns, name))
        for sample in explained["samples"]:
            admissions = [
                admission
                for admission in sample["reasons"]
                if admission["is"] == "Admitted"
            ]
            hit += sum(admission["cached"] for admission in admissions)
            prompt += sum(admission["prompt"] for admission in admissions)
            if sample["end"] is not None:
                assert sample["end"]["cached"] == sum(
                    admission["cached"] for admission in admissions
                )
    assert (hit, prompt) == hits_by_plans(turns)


def test_a_running_engine_its_journal_and_its_outputs_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several samples, preemptions, a cancelled stream, and a request that goes on from
    output.
    """
    folder = str(write_checkpoint(tmp_path / "tiny"))
    settings: dict[str, Any] = {
        "block_size": 8,
        "num_gpu_blocks_override": 24,
        "max_num_seqs": 6,
    }
    with LLM(
        folder, executor="oracle", journal=tmp_path / "runs", max_model_len=96, **settings
    ) as llm:
        metrics = Metrics(llm, "tiny")
        turns = Watched(llm)
        before = (
            Submit(
                Request(id="resumed", prompt=(1,) * 20, output=(5,) * 9, max_tokens=30)
            ),
        )
        for event in before:
            llm.worker.driver.post(event)
        common = [7] * 24
        params = SamplingParams(
            max_tokens=40, n=2, seed=1, temperature=1, ignore_eos=True
        )
        outputs = llm.generate([[*common, i] for i in range(8)], params, use_tqdm=False)
        stream = llm.stream([*common, 99], SamplingParams(max_tokens=60, ignore_eos=True))
        next(stream)
        stream.close()
        repeated = llm.generate([[*common, 3]], params, use_tqdm=False)
        settle(llm)
        reported = of_metrics(metrics)
    admissions = [r for turn in turns for r in turn.reasons if isinstance(r, Admitted)]
    journal = read_journal(tmp_path / "runs")
    assert (
        hits_by_plans(journal.turns()) == reported == of_replay(tmp_path / "runs", capsys)
    )
    assert weather(journal.turns())["preempted"]
    assert weather(journal.turns())["resumed"] == 1
    first = {r.id: r.cached for r in admissions if r.sample == 0 and r.prompt}
    assert [o.num_cached_tokens for o in (*outputs, *repeated)] == [
        first[o.request_id] for o in (*outputs, *repeated)
    ]
    assert repeated[0].num_cached_tokens == 24
    assert sum(r.cached for r in admissions if r.sample) > 0, (
        "no later sample hit anything"
    )
