"""The library, asked to push tokens and to hide them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.live.errors import RequestError
from tests.effects.tiny_model import EOS

SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as engine:
        yield engine


def drawn(llm: LLM, **options: Any) -> list[int]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_only_what_is_allowed_comes(llm: LLM) -> None:
    assert set(drawn(llm, temperature=9, allowed_token_ids=[7, 9, 11])) <= {7, 9, 11}
    assert drawn(llm, allowed_token_ids=[7]) == [7] * 20


def test_a_bias_decides(llm: LLM) -> None:
    assert drawn(llm, logit_bias={9: 100}) == [9] * 20
    ignored = drawn(llm, ignore_eos=True)
    banned = drawn(llm, logit_bias={ignored[0]: -100}, ignore_eos=True)
    assert ignored[0] not in banned


def test_the_end_waits_for_enough_tokens(llm: LLM) -> None:
    ends = {"logit_bias": {EOS: 100}}
    assert drawn(llm, **ends) == [EOS]
    tokens = drawn(llm, **ends, min_tokens=6)
    assert len(tokens) == 7
    assert tokens.index(EOS) == 6
    assert drawn(llm, **ends, min_tokens=6, max_tokens=6).count(EOS) == 0
    assert drawn(llm, stop_token_ids=[9], logit_bias={9: 100}, min_tokens=2)[2:] == [9]


def test_fewer_tokens_come_twice_under_a_strong_penalty(llm: LLM) -> None:
    tokens = drawn(llm, frequency_penalty=2, presence_penalty=2, ignore_eos=True)
    plain = drawn(llm, ignore_eos=True)
    assert len(set(tokens)) > len(set(plain))


@pytest.mark.long
def test_bad_words_do_not_come_whatever_they_are_made_of(llm: LLM) -> None:
    assert llm.tokenizer is not None
    a, b, c = llm.tokenizer.encode("abc", add_special_tokens=False)  # a token each
    likely = {a: 99, b: 60, c: 60}

    def written(*words: str) -> str:
        assert llm.tokenizer is not None
        options = {"temperature": 4, "max_tokens": 60, "bad_words": words}
        return llm.tokenizer.decode(drawn(llm, **options, logit_bias=likely))

    assert written() == "a" * 60
    text = written("a", "bcb", "ccc")
    assert set(text) == set("bc")
    assert "bc" in text
    assert "bcb" not in text
    assert "ccc" not in text
    assert written("a", "bb", "cc") in ("bc" * 30, "cb" * 30)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    (plain,) = llm.generate([PROMPT], params, use_tqdm=False)
    pushed = SamplingParams(
        temperature=0, max_tokens=1, logprobs=3, logit_bias={9: 100}, repetition_penalty=2
    )
    (shaped,) = llm.generate([PROMPT], pushed, use_tqdm=False)
    assert plain.outputs[0].logprobs is not None
    assert shaped.outputs[0].logprobs is not None
    plain_logprobs, shaped_logprobs = (
        plain.outputs[0].logprobs[0],
        shaped.outputs[0].logprobs[0],
    )
    assert shaped.outputs[0].token_ids == [9]
    assert all(
        shaped_logprobs[token].logprob == logprob.logprob
        for token, logprob in plain_logprobs.items()
    )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": {10**6: 1}}, "logit_bias"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    llm: LLM, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        drawn(llm, **options)
    assert caught.value.param == param


def test_samples_of_a_request_are_each_penalized_by_themselves(llm: LLM) -> None:
    options: dict[str, Any] = {
        "temperature": 1,
        "seed": 4,
        "max_tokens": 12,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
    }
    (sampled,) = llm.generate([PROMPT], SamplingParams(n=3, **options), use_tqdm=False)
    (solo,) = llm.generate([PROMPT], SamplingParams(n=1, **options), use_tqdm=False)
    assert sampled.outputs[0].token_ids == solo.outputs[0].token_ids
    assert len({tuple(completion.token_ids) for completion in sampled.outputs}) == 3


def test_a_journal_has_what_was_requested(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(folder, **SETTINGS, journal=str(tmp_path)) as llm:
        tokens = drawn(
            llm,
            logit_bias={9: 3},
            allowed_token_ids=range(5, 40),
            bad_words=["a b"],
            min_tokens=2,
            frequency_penalty=0.5,
        )
    assert tokens
    assert main(["replay", str(tmp_path)]) == 0
    assert "replay" in capsys.readouterr().out
