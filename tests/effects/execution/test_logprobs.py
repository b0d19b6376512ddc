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
    with LLM(**SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def theirs() -> Any:
    read: Any = AutoModelForCausalLM.from_pretrained
    return read(bundled_folder(), dtype=torch.float32).eval()


def check(theirs: Any, prompt: tuple[int, ...], one: CompletionOutput, k: int) -> None:
    """All is as transformers' log_softmax says, within 1e-4 (float32, another order of
    sums).
    """
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *one.token_ids]])).logits[
            0, len(prompt) - 1 : -1
        ]
    exact = logits.double().log_softmax(-1)
    assert one.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids) == len(exact)
    for token, by_id, row in zip(one.token_ids, one.logprobs, exact, strict=True):
        assert next(iter(by_id)) == token
        likeliest = row.topk(k).indices.tolist()
        assert by_id.keys() == {token, *likeliest}
        for other, found in by_id.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert found.rank == 1 + int((row > row[other]).sum())
    total = sum(
        by_id[t].logprob for t, by_id in zip(one.token_ids, one.logprobs, strict=True)
    )
    assert one.cumulative_logprob == pytest.approx(total)


@pytest.mark.long
def test_they_are_those_of_transformers(llm: LLM, theirs: Any) -> None:
    for how in (GREEDY, SAMPLED):
        for output in llm.generate(PROMPTS, how):
            assert len(output.outputs) == how.n
            for one in output.outputs:
                check(theirs, output.prompt_token_ids, one, how.logprobs or 0)


@pytest.mark.long
def test_greedy_takes_the_likeliest(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, GREEDY):
        one = output.outputs[0]
        for token, by_id in zip(one.token_ids, one.logprobs or (), strict=True):
            assert by_id[token].rank == 1
            assert by_id[token].logprob == max(found.logprob for found in by_id.values())
            assert sorted(found.rank for found in by_id.values()) == [1, 2, 3]


@pytest.mark.long
def test_neighbours_that_ask_and_that_do_not(llm: LLM) -> None:
    for how in (GREEDY, SAMPLED):
        quiet = evolve(how, logprobs=None)
        plain = llm.generate(PROMPTS * 2, [evolve(quiet, seed=i) for i in range(8)])
        each = [evolve(how, seed=i, logprobs=[None, 0, 5, 20][i % 4]) for i in range(8)]
        for params, one, other in zip(
            each, plain, llm.generate(PROMPTS * 2, each), strict=True
        ):
            for mine, wanted in zip(other.outputs, one.outputs, strict=True):
                assert mine.token_ids == wanted.token_ids
                assert wanted.logprobs is None
                assert wanted.cumulative_logprob is None
                if params.logprobs is None:
                    assert mine.logprobs is None
                else:
                    sizes = {len(by_id) for by_id in mine.logprobs or ()}
                    assert sizes <= {params.logprobs, params.logprobs + 1}


@pytest.mark.long
def test_what_is_streamed_joins_to_the_whole(llm: LLM) -> None:
    for how in (GREEDY, SAMPLED):
        (whole,) = llm.generate(PROMPTS[0], how)
        for one in whole.outputs:
            parts = [
                new
                for output in llm.stream(PROMPTS[0], how)
                for new in output.outputs
                if new.index == one.index
            ]
            assert len(parts) > 2
            assert all(len(new.logprobs or ()) == len(new.token_ids) for new in parts)
            assert sum([new.logprobs or () for new in parts], ()) == one.logprobs
            assert parts[-1].cumulative_logprob == pytest.approx(one.cumulative_logprob)
            sums = [new.cumulative_logprob or 0 for new in parts]
            assert sums == sorted(sums, reverse=True)


@pytest.mark.long
def test_a_stop_string_keeps_those_of_the_tokens_that_are_left(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text, wanted = whole.outputs[0].text, whole.outputs[0].logprobs
    assert wanted is not None
    params = evolve(GREEDY, stop=(text[10:13],))
    (cut,) = llm.generate(PROMPTS[0], params)
    parts = [new for output in llm.stream(PROMPTS[0], params) for new in output.outputs]
    one = cut.outputs[0]
    assert one.finish_reason == "stop"
    assert 0 < len(one.token_ids) < len(wanted)
    for found in (one.logprobs, sum([new.logprobs or () for new in parts], ())):
        assert found == wanted[: len(one.token_ids)]


@pytest.mark.long
def test_tokens_are_spelled_as_in_a_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    # Ends are tokens, but in no text.
    params = evolve(GREEDY, ignore_eos=False, min_tokens=24)
    one = llm.generate(PROMPTS[0], params)[0].outputs[0]
    reported = zip(one.token_ids, one.logprobs or (), strict=True)
    spelled = [by_id[token].decoded_token for token, by_id in reported]
    decoder = Detokenizer(llm.tokenizer)
    assert spelled == [decoder.push((token,)) for token in one.token_ids]
    assert "".join(filter(None, spelled)) == one.text


def test_without_a_tokenizer_there_are_no_spellings() -> None:
    with LLM(skip_tokenizer_init=True, **SETTINGS) as llm:
        one = llm.generate([1, 2, 3], evolve(GREEDY, max_tokens=2))[0].outputs[0]
        texts = {
            found.decoded_token
            for by_id in one.logprobs or ()
            for found in by_id.values()
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
        made = llm.generate(PROMPTS, SAMPLED)
    turns = list(read_journal(tmp_path).turns())
    results = [e for turn in turns for e in turn.events if isinstance(e, Executed)]
    written = sum(len(tokens) for result in results for tokens in result.yields)
    assert written >= sum(len(one.token_ids) for output in made for one in output.outputs)
    assert all(
        type(token) is int for r in results for tokens in r.yields for token in tokens
    )
