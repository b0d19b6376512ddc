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

SETTINGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "device": "cpu",
}
SEARCH_OPTIONS: Final = [
    {"beam_width": width, "length_penalty": penalty, "early_stopping": early}
    for width, penalty, early in product((2, 4, 8), (0.5, 1.0, 2.0), (False, True, NEVER))
]
SOME: Final = [
    SEARCH_OPTIONS[index] for index in (0, 4, 8, 10, 14, 15, 18, 23, 25)
]  # of each a few
Prompt = list[int]


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS, block_size=4, num_gpu_blocks_override=400) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    """The same one as transformers runs it, which has searched before: that imports."""
    loaded = theirs(folder)
    with torch.inference_mode():
        loaded.generate(torch.tensor([[5]]), num_beams=2, max_new_tokens=1)
    return loaded


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
    llm: LLM, model: Any, prompts: list[Prompt], options: dict[str, Any], max_tokens: int
) -> list[str]:
    """Where sequences or scores are others than transformers'."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = BeamSearchParams(max_tokens=max_tokens, **options)
    outputs = llm.beam_search(inputs, params, use_tqdm=False)
    wrong = []
    for prompt, output in zip(prompts, outputs, strict=True):
        right = _generated(llm, model, prompt, params)
        for rank, (sequence, expected) in enumerate(
            zip(output.sequences, right, strict=True)
        ):
            tokens, score = expected
            size = len(sequence.tokens) - len(prompt)
            assert sequence.cum_logprob is not None
            own_score = sequence.cum_logprob / size**params.length_penalty
            if tuple(sequence.tokens) != tokens or abs(own_score - score) > 1e-3 * max(
                1, abs(score)
            ):
                wrong.append(
                    f"{options}: {rank}. of {prompt}: {sequence}, not {expected}"
                )
    return wrong


def _generated(
    llm: LLM, model: Any, prompt: Prompt, params: BeamSearchParams
) -> list[tuple[tuple[int, ...], float]]:
    stops = sorted(llm.setup.stop_ids)
    with torch.inference_mode():
        generated = model.generate(
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
            generated.sequences.tolist(), generated.sequences_scores.tolist(), strict=True
        )
    ]


def _unpadded(row: list[int], prompt: int, stops: list[int]) -> tuple[int, ...]:
    ends = (index for index in range(prompt, len(row)) if row[index] in stops)
    return tuple(row[: next(ends, len(row)) + 1])


@pytest.mark.long
@pytest.mark.parametrize("options", SOME, ids=str)
def test_sequences_are_those_of_transformers(llm: LLM, model: Any, options: Any) -> None:
    assert not differences(llm, model, prompts_of(llm, 3, 20), options, 8)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, *claimed([20, 200])])
def test_sequences_of_the_bundled_model_are_those_of_transformers(count: int) -> None:
    """Each prompt under one of the ways to search; many, under one of each width."""
    with LLM(**SETTINGS, num_gpu_blocks_override=400, max_model_len=512) as llm:
        model, text = theirs(llm.setup.folder), Path(__file__).read_text()
        rng, wrong = Random(7), list[str]()
        assert llm.tokenizer is not None
        for number in range(count):
            begin = rng.randrange(len(text) - 400)
            excerpt = text[begin : begin + rng.randint(5, 300)]
            prompt = list(llm.tokenizer.encode(excerpt))
            turns = (
                islice(SEARCH_OPTIONS, number % 9, None, 9)
                if count > 3
                else (SEARCH_OPTIONS[10 * number],)
            )
            for options in turns:
                wrong += differences(
                    llm, model, [prompt], options, 24 if count > 3 else 8
                )
    assert not wrong


def texts(outputs: list[BeamSearchOutput]) -> list[tuple[str, float | None]]:
    return [
        (sequence.text, sequence.cum_logprob)
        for out in outputs
        for sequence in out.sequences
    ]


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
    small = {**SETTINGS, "block_size": 4, "max_num_batched_tokens": 24}
    small["max_model_len"] = 48
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    drawn = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    prompts = ["abcabc", "abcabcd", "xyz", "abcabc"]
    with LLM(folder, **small, num_gpu_blocks_override=300) as roomy:
        expected = texts(roomy.beam_search(prompts, params))
        solo = roomy.generate(prompts, drawn)
    with LLM(folder, **small, num_gpu_blocks_override=22) as llm:
        reasons = list[object]()
        turn = llm.worker.driver.record
        assert turn is None
        llm.worker.driver.record = _Noted(reasons)
        jobs = llm._make_checked_batch([*prompts], drawn, None)
        llm.frontend.submit(jobs.processors)
        actual = texts(llm.beam_search(prompts, params))
        beside = [jobs.inbox.get().take() for _ in prompts]
    assert [text for text, _ in actual] == [text for text, _ in expected]
    assert sorted(output.outputs[0].text for output in beside) == sorted(
        output.outputs[0].text for output in solo
    )
    admitted = [reason for reason in reasons if isinstance(reason, Admitted)]
    assert any(reason.hit for reason in admitted if "/" in reason.id), (
        "beams hit their parents"
    )
    assert any(isinstance(reason, Preempted) for reason in reasons)


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
        assert {request.id for request in submitted} >= {"0/0/0", "0/1/3", "1/11/0"}
        searches = replay_searches(turns)
        assert [*searches] == ["0", "1"]
        for before in (turns, turns[:7]):  # their ids come again
            assert replay_searches([*before, *turns]) == searches
        for search, output in zip(searches.values(), outputs, strict=True):
            assert search.is_finished
            expected = [
                (sequence.cum_logprob, sequence.finish_reason)
                for sequence in output.sequences
            ]
            assert [(beam.logprob, beam.reason) for beam in search.best(4)] == expected
            size = len(output.request.prompt_token_ids)
            tokens = [sequence.tokens[size:] for sequence in output.sequences]
            assert redact or [list(beam.tokens) for beam in search.best(4)] == tokens


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
        params_list: Any = [BeamSearchParams(beam_width=2)]
        with pytest.raises(ParameterError, match="one for each prompt"):
            llm.beam_search(["a", "b"], params_list)
        with pytest.raises(ParameterError, match="must be BeamSearchParams"):
            llm.beam_search(["a"], [SamplingParams()])  # type: ignore[list-item]


def test_as_many_candidates_as_log_probabilities_can_be_had() -> None:
    assert MAX_CANDIDATES <= MAX_LOGPROBS


@pytest.mark.long
def test_a_full_queue_and_a_drain_let_a_search_go_on(folder: str) -> None:
    """Only its first round is a new request; those that follow have its place."""
    small = {**SETTINGS, "max_num_seqs": 4, "max_waiting": 1}
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    with LLM(folder, **SETTINGS, num_gpu_blocks_override=80) as roomy:
        expected = texts(roomy.beam_search("abc", params))
    with LLM(folder, **small, num_gpu_blocks_override=80) as llm:
        started = threading.Event()
        llm.frontend.after.append(started.set)
        outputs = list[BeamSearchOutput]()
        search = threading.Thread(
            target=lambda: outputs.extend(llm.beam_search("abc", params))
        )
        search.start()
        assert started.wait(30)
        assert llm.client.drain(30)
        search.join()
        assert texts(outputs) == expected
        with pytest.raises(DrainingError):
            llm.beam_search("abc", params)
