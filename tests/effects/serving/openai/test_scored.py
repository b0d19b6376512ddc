"""Prompts that are scored, echoed or only computed, as clients ask for them over HTTP."""

import math
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from minfer.effects.serving.openai import fields
from minfer.effects.serving.openai.logprob_formats import CompletionLogprobs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.outputs import Logprob, PromptLogprobs
from minfer.effects.text.tokenizer import Tokenizer

TEXT = 'def add(a, b):\n    """Add \u2603."""\n    return a + b\n'
END = "<|endoftext|>"
# Long, and nothing that says the same: after that the model would end at once.
COUNTED = "".join(f"    x{number} = read({number * 7 % 31})\n" for number in range(60))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


def right(ids: list[int]) -> torch.Tensor:
    """The log-probabilities of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs


def looks_alike(tokenizer: Tokenizer, first: int, second: int) -> bool:
    """Whether two tokens have one name in OpenAI's format: parts of characters do."""
    return first != second and tokenizer.decode([first]) == tokenizer.decode([second])


@pytest.mark.long
def test_a_prompt_is_scored_as_evaluation_harnesses_ask_for_it(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    values = right(ids)
    for max_tokens in (0, 1):  # both are in use: a token that is thrown away, or none
        completion = client.completions.create(
            model="bundled",
            prompt=[ids, ids[:5]],
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
            seed=1234,
        )
        scored = completion.choices[0].logprobs
        assert scored is not None
        assert scored.token_logprobs is not None
        assert scored.top_logprobs is not None
        values_of_first: list[object] = [scored.token_logprobs[0], scored.top_logprobs[0]]
        assert values_of_first == [None, None]
        for place, token in enumerate(ids[1:]):
            logprob = scored.token_logprobs[place + 1]
            assert logprob == pytest.approx(values[place, token].item(), abs=0.1)
            likeliest = int(values[place].argmax())
            if not looks_alike(tokenizer, token, likeliest):
                best = max(scored.top_logprobs[place + 1].values())
                assert best == pytest.approx(values[place].max().item(), abs=0.1)
        assert len(scored.token_logprobs) == len(ids) + max_tokens
        if not max_tokens:
            assert [choice.finish_reason for choice in completion.choices] == [
                "length"
            ] * 2
        assert completion.choices[1].text.startswith(tokenizer.decode(ids[:5]))
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 2 * max_tokens


@pytest.mark.long
def test_an_echo_is_scored_as_its_output(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "bundled",
        "prompt": [TEXT, f"x = 1{END}y = 2\n"],
        "echo": True,
        "logprobs": 3,
        "max_tokens": 6,
        "temperature": 0,
        "n": 2,
    }
    completion = client.completions.create(**body)
    streamed: list[dict[str, Any]] = [{"text": ""} for _ in completion.choices]
    with client.completions.create(**body, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                joined = streamed[choice.index]
                joined["text"] += choice.text
                for name, values in choice.logprobs or {}:
                    joined[name] = joined.get(name, []) + values
    for choice, joined in zip(completion.choices, streamed, strict=True):
        scored = choice.logprobs
        assert scored is not None
        assert scored.tokens is not None
        assert scored.text_offset is not None
        assert joined == {"text": choice.text, **scored.model_dump()}
        assert choice.text.startswith(body["prompt"][choice.index // 2])
        for word, place in zip(scored.tokens, scored.text_offset, strict=True):
            whole_word = "\ufffd" not in word
            assert choice.text.startswith(word, place) or not whole_word or word == END
    solo = client.completions.create(**{**body, "echo": False})
    for choice, echoless in zip(completion.choices, solo.choices, strict=True):
        assert choice.text.endswith(echoless.text)
        assert echoless.logprobs is not None
        assert echoless.logprobs.tokens is not None
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert (
            choice.logprobs.tokens[-len(echoless.logprobs.tokens) :]
            == echoless.logprobs.tokens
        )


def line(tokenizer: Tokenizer, ids: list[int]) -> list[dict[int, Logprob]]:
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    return [
        {token: Logprob(-1.0, 1, text)} for token, text in zip(ids, texts, strict=True)
    ]


def test_offsets_are_of_the_text_which_special_tokens_are_not_in(
    tokenizer: Tokenizer,
) -> None:
    (end,) = tokenizer.find_special_ids([END])
    x, y = (tokenizer.encode(text, add_special_tokens=False) for text in ("xs", "yes"))
    ids = [*x, end, *y]
    begins = len(x)
    scores_json = CompletionLogprobs(tokenizer).next_scores(0, line(tokenizer, ids))
    assert scores_json["text_offset"][begins : begins + 2] == [2, 2]
    prompt: PromptLogprobs = [None, *line(tokenizer, ids[1:])]
    for text, place in (("xsyes", 2), (f"xs{END}yes", 2 + len(END))):
        scores = CompletionLogprobs(tokenizer)
        echoed = scores.echo_scores(0, text, ids, prompt, 0)
        assert echoed["text_offset"][begins : begins + 2] == [2, place]
        assert scores.next_scores(0, line(tokenizer, x))["text_offset"][0] == len(text)
    spaced = tokenizer.encode(" a", add_special_tokens=False)
    echoed = CompletionLogprobs(tokenizer).echo_scores(
        0, "a", spaced, [None] * len(spaced), 0
    )
    assert echoed["text_offset"][-1] <= 1, "a tokenizer may put a space before a text"


@pytest.mark.long
def test_prompt_logprobs_have_vllms_format(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    options = {"prompt_logprobs": 2}
    completed: Any = client.completions.create(
        model="bundled", prompt=TEXT, max_tokens=1, extra_body=options
    )
    answered: Any = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=1,
        extra_body=options,
    )
    prompt_logprobs = completed.choices[0].prompt_logprobs
    assert completed.choices[0].logprobs is None
    assert len(prompt_logprobs) == len(ids)
    assert len(answered.prompt_logprobs) == answered.usage.prompt_tokens
    for prompt_scores in (prompt_logprobs, answered.prompt_logprobs):
        assert prompt_scores[0] is None
        for by_id in prompt_scores[1:]:
            assert 2 <= len(by_id) <= 3
            own_score = next(iter(by_id.values()))
            assert set(own_score) == {"logprob", "rank", "decoded_token"}
            assert {1, 2} <= {score["rank"] for score in by_id.values()}
    assert [next(iter(by_id)) for by_id in prompt_logprobs[1:]] == [
        str(token) for token in ids[1:]
    ]
    options = {"prompt_logprobs": 1}
    completed_both: Any = client.completions.create(
        model="bundled",
        prompt=TEXT,
        max_tokens=0,
        echo=True,
        logprobs=4,
        extra_body=options,
    )
    (choice,) = completed_both.choices
    assert all(len(scores) <= 2 for scores in choice.prompt_logprobs[1:])
    for top in choice.logprobs.top_logprobs[4:]:  # parts of characters look alike
        assert 4 <= len(top) <= 5 or ("\ufffd" in top and len(top) < 4)
    assert choice.text == TEXT


@pytest.mark.long
def test_a_prompt_may_be_computed_only_for_the_cache(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "bundled", "prompt": COUNTED}
    body["extra_body"] = {"cache_salt": "warmed"}
    body["extra_body"]["timing"] = True
    for max_tokens, cached in ((0, False), (1, True)):
        completion = client.completions.create(**body, max_tokens=max_tokens)
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert bool(completion.usage.prompt_tokens_details.cached_tokens) == cached
        assert completion.usage.completion_tokens == max_tokens
        assert bool(completion.choices[0].text) == bool(max_tokens)
    with client.completions.create(**body, max_tokens=0, stream=True) as stream:
        chunk, *_ = stream
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("", "length")


@pytest.mark.long
def test_the_best_of_several(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "bundled",
        "prompt": ["def ", "class "],
        "temperature": 1.2,
        "max_tokens": 8,
        "seed": 5,
    }
    all_samples = client.completions.create(**body, n=6, logprobs=0)
    best = client.completions.create(**body, n=2, best_of=6)
    for prompt in (0, 1):
        means = []
        for choice in all_samples.choices[6 * prompt : 6 * prompt + 6]:
            assert choice.logprobs is not None
            logprobs = choice.logprobs.token_logprobs or []
            values = [logprob for logprob in logprobs if logprob is not None]
            means.append((math.fsum(values) / len(values), choice.text))
        best_texts = [text for _, text in sorted(means, reverse=True)[:2]]
        chosen = best.choices[2 * prompt : 2 * prompt + 2]
        assert [choice.text for choice in chosen] == best_texts
        assert [choice.index for choice in chosen] == [2 * prompt, 2 * prompt + 1]
        assert all(choice.logprobs is None for choice in chosen)
    assert best.usage is not None
    assert all_samples.usage is not None
    assert best.usage.completion_tokens == all_samples.usage.completion_tokens


def test_an_answer_may_not_grow_beyond_memory(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "MAX_PROMPT_LOGPROBS", 24)
    body: dict[str, Any] = {"model": "bundled", "prompt": [[5] * 3, [6] * 3]}
    for extra, param in (
        ({"echo": True, "logprobs": 4}, "logprobs"),
        ({"extra_body": {"prompt_logprobs": 4}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "n": 3}, "prompt_logprobs"),
    ):
        with pytest.raises(openai.BadRequestError, match="at most 24") as caught:
            client.completions.create(**body, **extra, max_tokens=1)
        assert caught.value.param == param
    client.completions.create(**body, echo=True, logprobs=3, max_tokens=0)


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
    ],
)
def test_what_a_conversation_may_not_ask_for(
    client: OpenAI, request_fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": "x"}], **request_fields
        )
    assert caught.value.param == param
