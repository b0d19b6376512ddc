"""Log-probabilities from the model to the client: transformers' own, token
by token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from minfer import LLM, SamplingParams
from minfer.effects.live.input_processing.input_processor import RequestError
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.outputs import CompletionOutput
from minfer.records.messages import Executed

PROMPTS = ["def add(a, b):\n", "class Stack", "import os\n\n\ndef ", "x = [1, 2"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(
    temperature=1.3, top_k=40, top_p=0.95, max_tokens=24, seed=4, n=3, logprobs=20
)
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def theirs() -> Any:
    read: Any = AutoModelForCausalLM.from_pretrained
    return read(bundled_folder(), dtype=torch.float32).eval()


def check(
    reference_model: Any, prompt: tuple[int, ...], sample: CompletionOutput, k: int
) -> None:
    """All is as transformers' log_softmax says, within 1e-4 (float32, another order of
    sums).
    """
    with torch.inference_mode():
        logits = reference_model(torch.tensor([[*prompt, *sample.token_ids]])).logits[
            0, len(prompt) - 1 : -1
        ]
    exact = logits.double().log_softmax(-1)
    assert sample.logprobs is not None
    assert len(sample.logprobs) == len(sample.token_ids) == len(exact)
    for token, by_id, row in zip(sample.token_ids, sample.logprobs, exact, strict=True):
        assert next(iter(by_id)) == token
        likeliest = row.topk(k).indices.tolist()
        assert by_id.keys() == {token, *likeliest}
        for token_id, entry in by_id.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[token_id]).sum())
    total = sum(
        by_id[t].logprob
        for t, by_id in zip(sample.token_ids, sample.logprobs, strict=True)
    )
    assert sample.cumulative_logprob == pytest.approx(total)


@pytest.mark.long
def test_they_are_those_of_transformers(llm: LLM, theirs: Any) -> None:
    for params in (GREEDY, SAMPLED):
        for output in llm.generate(PROMPTS, params):
            assert len(output.outputs) == params.n
            for sample in output.outputs:
                check(theirs, output.prompt_ids, sample, params.logprobs or 0)


@pytest.mark.long
def test_greedy_takes_the_likeliest(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, GREEDY):
        sample = output.outputs[0]
        for token, by_id in zip(sample.token_ids, sample.logprobs or (), strict=True):
            assert by_id[token].rank == 1
            assert by_id[token].logprob == max(entry.logprob for entry in by_id.values())
            assert sorted(entry.rank for entry in by_id.values()) == [1, 2, 3]


@pytest.mark.long
def test_neighbours_that_ask_and_that_do_not(llm: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        quiet = evolve(params, logprobs=None)
        plain = llm.generate(PROMPTS * 2, [evolve(quiet, seed=i) for i in range(8)])
        all_params = [
            evolve(params, seed=i, logprobs=[None, 0, 5, 20][i % 4]) for i in range(8)
        ]
        for row_params, expected, actual in zip(
            all_params, plain, llm.generate(PROMPTS * 2, all_params), strict=True
        ):
            for sample, expected_sample in zip(
                actual.outputs, expected.outputs, strict=True
            ):
                assert sample.token_ids == expected_sample.token_ids
                assert expected_sample.logprobs is None
                assert expected_sample.cumulative_logprob is None
                if row_params.logprobs is None:
                    assert sample.logprobs is None
                else:
                    sizes = {len(by_id) for by_id in sample.logprobs or ()}
                    assert sizes <= {row_params.logprobs, row_params.logprobs + 1}


@pytest.mark.long
def test_what_is_streamed_joins_to_the_whole(llm: LLM) -> None:
    for params in (GREEDY, SAMPLED):
        (whole_output,) = llm.generate(PROMPTS[0], params)
        for sample in whole_output.outputs:
            pieces = [
                new
                for output in llm.stream(PROMPTS[0], params)
                for new in output.outputs
                if new.index == sample.index
            ]
            assert all(len(new.logprobs or ()) == len(new.token_ids) for new in pieces)
            joined = [by_id for new in pieces for by_id in new.logprobs or ()]
            assert joined == sample.logprobs
            assert pieces[-1].cumulative_logprob == pytest.approx(
                sample.cumulative_logprob
            )
            sums = [new.cumulative_logprob or 0 for new in pieces]
            assert sums == sorted(sums, reverse=True)


@pytest.mark.long
def test_a_stop_string_keeps_those_of_the_tokens_that_are_left(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    text, logprobs = output.outputs[0].text, output.outputs[0].logprobs
    assert logprobs is not None
    params = evolve(GREEDY, stop=(text[10:13],))
    (cut,) = llm.generate(PROMPTS[0], params)
    pieces = [new for output in llm.stream(PROMPTS[0], params) for new in output.outputs]
    sample = cut.outputs[0]
    assert sample.finish_reason == "stop"
    assert 0 < len(sample.token_ids) < len(logprobs)
    joined = [by_id for new in pieces for by_id in new.logprobs or ()]
    for reported in (sample.logprobs, joined):
        assert reported == logprobs[: len(sample.token_ids)]


@pytest.mark.long
def test_tokens_are_spelled_as_in_a_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    # Ends are tokens, but in no text.
    params = evolve(GREEDY, ignore_eos=False, min_tokens=24)
    sample = llm.generate(PROMPTS[0], params)[0].outputs[0]
    reported = zip(sample.token_ids, sample.logprobs or (), strict=True)
    spelled = [by_id[token].decoded_token for token, by_id in reported]
    decoder = Detokenizer(llm.tokenizer)
    assert spelled == [decoder.push((token,)) for token in sample.token_ids]
    assert "".join(filter(None, spelled)) == sample.text


def test_without_a_tokenizer_there_are_no_spellings() -> None:
    with LLM(skip_tokenizer_init=True, **SETTINGS) as llm:
        sample = llm.generate([1, 2, 3], evolve(GREEDY, max_tokens=2))[0].outputs[0]
        texts = {
            entry.decoded_token
            for by_id in sample.logprobs or ()
            for entry in by_id.values()
        }
        assert texts == {None}


@pytest.mark.parametrize("executor", ["dry", "oracle"])
def test_executors_without_a_model_refuse(executor: str) -> None:
    with LLM(executor=executor, num_gpu_blocks_override=64) as llm:
        with pytest.raises(
            RequestError, match=f"logprobs: the {executor} executor has no model"
        ):
            llm.generate(PROMPTS, evolve(GREEDY, logprobs=0))
        assert llm.generate(PROMPTS[0], evolve(GREEDY, logprobs=None))[0].finished


@pytest.mark.long
def test_the_journal_knows_nothing_of_them(tmp_path: Path) -> None:
    with LLM(journal=str(tmp_path), **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, SAMPLED)
    turns = list(read_journal(tmp_path).turns())
    results = [e for turn in turns for e in turn.events if isinstance(e, Executed)]
    written = sum(len(tokens) for result in results for tokens in result.yields)
    assert written >= sum(
        len(sample.token_ids) for output in outputs for sample in output.outputs
    )
    assert all(
        type(token) is int for r in results for tokens in r.yields for token in tokens
    )
