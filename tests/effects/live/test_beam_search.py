"""Beam search as a library: sequences and scores are those of transformers, whatever else
is served meanwhile.
"""

import threading
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM

from minfer import LLM, BeamSearchOutput, BeamSearchParams, ParameterError, SamplingParams
from minfer.effects.live.beams.beam_rounds import replay_searches
from minfer.effects.live.errors import DrainingError, RequestError
from minfer.effects.live.journal.journal_files import read_journal
from minfer.records.messages import Admitted, Preempted, Submit
from minfer.sampling.beam import MAX_BEAMS, MAX_CANDIDATES, NEVER
from minfer.sampling.params import MAX_LOGPROBS
from tests.circles import claimed
from tests.effects.tiny_model import write_checkpoint

SETTINGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "device": "cpu",
}
HOWS: Final = [
    {"beam_width": width, "length_penalty": penalty, "early_stopping": early}
    for width, penalty, early in product((2, 4, 8), (0.5, 1.0, 2.0), (False, True, NEVER))
]
SOME: Final = [HOWS[at] for at in (0, 4, 8, 10, 14, 15, 18, 23, 25)]  # of each a few
Prompt = list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS, block_size=4, num_gpu_blocks_override=400) as made:
        yield made


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    """The same one as transformers runs it, which has searched before: that imports."""
    found = theirs(folder)
    with torch.inference_mode():
        found.generate(torch.tensor([[5]]), num_beams=2, max_new_tokens=1)
    return found


def theirs(folder: str | Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.eval()


def prompts_of(llm: LLM, count: int, longest: int) -> list[Prompt]:
    rng, vocab = Random(count), llm.setup.spec.vocab_size
    return [
        [rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


def differences(
    llm: LLM, model: Any, prompts: list[Prompt], how: dict[str, Any], most: int
) -> list[str]:
    """Where sequences or scores are others than transformers'."""
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = BeamSearchParams(max_tokens=most, **how)
    outputs = llm.beam_search(wanted, params, use_tqdm=False)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        right = _generated(llm, model, prompt, params)
        for at, (one, due) in enumerate(zip(output.sequences, right, strict=True)):
            tokens, score = due
            size = len(one.tokens) - len(prompt)
            assert one.cum_logprob is not None
            mine = one.cum_logprob / size**params.length_penalty
            if one.tokens != tokens or abs(mine - score) > 1e-3 * max(1, abs(score)):
                found.append(f"{how}: {at}. of {prompt}: {one}, not {due}")
    return found


def _generated(
    llm: LLM, model: Any, prompt: Prompt, params: BeamSearchParams
) -> list[tuple[tuple[int, ...], float]]:
    stops = sorted(llm.setup.stop_ids)
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=stops,
            pad_token_id=stops[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    return [
        (_unpadded(row, len(prompt), stops), score)
        for row, score in zip(
            made.sequences.tolist(), made.sequences_scores.tolist(), strict=True
        )
    ]


def _unpadded(row: list[int], prompt: int, stops: list[int]) -> tuple[int, ...]:
    ends = (at for at in range(prompt, len(row)) if row[at] in stops)
    return tuple(row[: next(ends, len(row)) + 1])


@pytest.mark.long
@pytest.mark.parametrize("how", SOME, ids=str)
def test_sequences_are_those_of_transformers(llm: LLM, model: Any, how: Any) -> None:
    assert not differences(llm, model, prompts_of(llm, 3, 20), how, 8)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, *claimed([20, 200])])
def test_sequences_of_the_bundled_model_are_those_of_transformers(count: int) -> None:
    """Each prompt under one of the ways to search; many, under one of each width."""
    with LLM(**SETTINGS, num_gpu_blocks_override=400, max_model_len=512) as llm:
        model, text = theirs(llm.setup.folder), Path(__file__).read_text()
        rng, found = Random(7), list[str]()
        assert llm.tokenizer is not None
        for at in range(count):
            begin = rng.randrange(len(text) - 400)
            part = text[begin : begin + rng.randint(5, 300)]
            prompt = list(llm.tokenizer.encode(part))
            turns = islice(HOWS, at % 9, None, 9) if count > 3 else (HOWS[10 * at],)
            for how in turns:
                found += differences(llm, model, [prompt], how, 24 if count > 3 else 8)
    assert not found


def texts(outputs: list[BeamSearchOutput]) -> list[tuple[str, float | None]]:
    return [(one.text, one.cum_logprob) for out in outputs for one in out.sequences]


def test_a_search_gives_the_best_in_order_prompt_and_all(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search("abc", params)
    first, second = output.sequences
    assert first.text.startswith("abc")
    assert first.cum_logprob is not None
    assert second.cum_logprob is not None
    assert 0 > first.cum_logprob >= second.cum_logprob
    assert (first.finish_reason, len(first.tokens)) == (
        "length",
        len(output.request.prompt_token_ids) + 6,
    )
    assert output.request.metrics.output_tokens == 12
    assert not llm.worker.driver.state.requests, "nothing is left of it"


@pytest.mark.long
def test_searches_run_beside_samples_in_a_cache_that_is_short(folder: str) -> None:
    """Hits and preemptions change nothing, and neighbours get what they get alone."""
    few = {**SETTINGS, "block_size": 4, "max_num_batched_tokens": 24}
    few["max_model_len"] = 48
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    drawn = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    prompts = ["abcabc", "abcabcd", "xyz", "abcabc"]
    with LLM(folder, **few, num_gpu_blocks_override=300) as roomy:
        due = texts(roomy.beam_search(prompts, params))
        solo = roomy.generate(prompts, drawn)
    with LLM(folder, **few, num_gpu_blocks_override=22) as llm:
        reasons = list[object]()
        turn = llm.worker.driver.record
        assert turn is None
        llm.worker.driver.record = _Noted(reasons)
        jobs = llm._make_checked_batch([*prompts], drawn, None)
        llm.front.submit(jobs.processors)
        got = texts(llm.beam_search(prompts, params))
        beside = [jobs.inbox.get().take() for _ in prompts]
    assert [text for text, _ in got] == [text for text, _ in due]
    assert sorted(one.outputs[0].text for one in beside) == sorted(
        one.outputs[0].text for one in solo
    )
    admitted = [one for one in reasons if isinstance(one, Admitted)]
    assert any(one.hit for one in admitted if "/" in one.id), "beams hit their parents"
    assert any(isinstance(one, Preempted) for one in reasons)


class _Noted:
    """A recorder that keeps the reasons."""

    def __init__(self, reasons: list[object]) -> None:
        self.reasons = reasons

    def __call__(self, turn: Any) -> None:
        self.reasons += turn.transition.reasons

    def close(self, state: Any) -> None:
        """Nothing is to be done."""


@pytest.mark.long
def test_a_journal_of_searches_replays(folder: str, tmp_path: Path) -> None:
    for redact in (False, True):
        path = tmp_path / f"{redact}.journal"
        settings = {**SETTINGS, "journal": path, "journal_redact": redact}
        with LLM(folder, **settings, block_size=4, num_gpu_blocks_override=80) as llm:
            params = BeamSearchParams(beam_width=4, max_tokens=12)
            outputs = llm.beam_search(["abc", "abcabc"], params)
        journal = read_journal(path)
        turns = [*journal.turns()]  # raises where they are decided otherwise
        submitted = [e.request for t in turns for e in t.events if isinstance(e, Submit)]
        assert {one.id for one in submitted} >= {"0/0/0", "0/1/3", "1/11/0"}
        found = replay_searches(turns)
        assert [*found] == ["0", "1"]
        for before in (turns, turns[:7]):  # their ids come again
            assert replay_searches([*before, *turns]) == found
        for search, output in zip(found.values(), outputs, strict=True):
            assert search.is_finished
            due = [(one.cum_logprob, one.finish_reason) for one in output.sequences]
            assert [(one.logprob, one.reason) for one in search.best(4)] == due
            size = len(output.request.prompt_token_ids)
            tokens = [one.tokens[size:] for one in output.sequences]
            assert redact or [one.tokens for one in search.best(4)] == tokens


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": MAX_BEAMS + 1}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "n": 0}, "n"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": 99}, "length_penalty"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_parameters_that_make_no_sense(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams(**wrong)
    assert caught.value.param == param


@pytest.mark.long
def test_what_cannot_be_searched_is_refused_before_anything_runs(folder: str) -> None:
    with LLM(folder, **{**SETTINGS, "max_num_seqs": 3}, num_gpu_blocks_override=9) as llm:
        with pytest.raises(RequestError, match="max_num_seqs is 3"):
            llm.beam_search("abc", BeamSearchParams(beam_width=4))
        with pytest.raises(RequestError, match="each of 3 beams may take 2"):
            llm.beam_search("abc", BeamSearchParams(beam_width=3, max_tokens=200))
        (all_that_fits,) = llm.beam_search(
            "abc", BeamSearchParams(beam_width=3, max_tokens=None, n=1)
        )
        assert all_that_fits.sequences[0].finish_reason in ("stop", "length")
        several: Any = [BeamSearchParams(beam_width=2)]
        with pytest.raises(ParameterError, match="one for each prompt"):
            llm.beam_search(["a", "b"], several)
        with pytest.raises(ParameterError, match="must be BeamSearchParams"):
            llm.beam_search(["a"], [SamplingParams()])  # type: ignore[list-item]


def test_as_many_candidates_as_log_probabilities_can_be_had() -> None:
    assert MAX_CANDIDATES <= MAX_LOGPROBS


@pytest.mark.long
def test_a_full_queue_and_a_drain_let_a_search_go_on(folder: str) -> None:
    """Only its first round is a new request; those that follow have its place."""
    few = {**SETTINGS, "max_num_seqs": 4, "max_waiting": 1}
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    with LLM(folder, **SETTINGS, num_gpu_blocks_override=80) as roomy:
        due = texts(roomy.beam_search("abc", params))
    with LLM(folder, **few, num_gpu_blocks_override=80) as llm:
        begun = threading.Event()
        llm.front.after.append(begun.set)
        found = list[BeamSearchOutput]()
        search = threading.Thread(
            target=lambda: found.extend(llm.beam_search("abc", params))
        )
        search.start()
        assert begun.wait(30)
        assert llm.client.drain(30)
        search.join()
        assert texts(found) == due
        with pytest.raises(DrainingError):
            llm.beam_search("abc", params)
