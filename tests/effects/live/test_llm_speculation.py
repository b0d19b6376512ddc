"""Drafts change no output: the bundled models, with everything at once that an engine
does.

Prompts in small chunks, cached prefixes, rows that give way, several samples, stop
strings, penalties, filters, biases, lengths, grammars beside, log-probabilities; drafts
of every method, steps one and two ahead. In float32 tokens are equal, on the CPU and on
a GPU. In bfloat16 the shape of a batch decides last bits: where a text differs from the
one without drafts, the two tokens must have been as good as equal.
"""

import argparse
import inspect
import optparse
from collections.abc import Sequence
from functools import cache
from itertools import chain, product
from typing import Any, Final

import pytest
import torch
from attrs import frozen

from minfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.speculation_settings import WITHOUT_HEADS
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Admitted
from minfer.sampling.reference_sampler import draw_key, gumbel, noise_bits, stream
from tests.circles import claimed
from tests.effects.watched import Watched

NEEDS_GPU: Final = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU"
)
DEVICES: Final = ("cpu", pytest.param("cuda", marks=NEEDS_GPU))
FEW, SOME, ALL = 24, 80, 500  # prompts
# Methods, steps in flight, and whether lengths adapt.
EVERY_WAY = [*product(WITHOUT_HEADS, (1, 2), (False, True))]
SHARED: Final = 40  # tokens with which every third prompt begins
ROOMY: Final[dict[str, Any]] = {"max_num_seqs": 12, "num_gpu_blocks_override": 128}
TIGHT: Final[dict[str, Any]] = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "num_gpu_blocks_override": 56,
    "max_model_len": 256,
}
# What last bits may make of a log-probability in bfloat16. Texts that part for another
# reason do so at gaps as large as those between tokens.
ROUNDING: Final = 0.3
# What is asked, in turn.
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 1, "top_k": 20, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0, "min_tokens": 9, "stop": "("},
    {"temperature": 0.7, "stop": ["self", "\n\n"], "ignore_eos": False},
    {"temperature": 1, "structured_outputs": StructuredOutputs(regex="[a-z_]{4,30}")},
    {"temperature": 1.2, "typical_p": 0.8, "logit_bias": {300: 3.0, 301: -5.0}},
    {"temperature": 0, "repetition_penalty": 1.3, "bad_words": ["self"], "logprobs": 2},
    {"temperature": 0.9, "allowed_token_ids": [*range(20, 400)], "n": 2},
    {"temperature": 0, "min_tokens": 12, "ignore_eos": False},
)


def prompts(count: int) -> list[list[int]]:
    """Stretches of Python's own library, of 5 to 100 tokens."""
    ids = _text()
    chosen = list[list[int]]()
    for i in range(count):
        begin = 97 * i % (len(ids) - 99)
        suffix = ids[begin : begin + 5 + 41 * i % 60]
        chosen.append([*ids[:SHARED], *suffix] if i % 3 == 0 else suffix)
    return chosen


@cache
def _text() -> list[int]:
    source = inspect.getsource(argparse) + inspect.getsource(optparse)
    return Tokenizer(bundled_folder()).encode(source)


def requested(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            **{
                "max_tokens": 12 + 7 * i % 33,
                "ignore_eos": True,
                **KINDS[i % len(KINDS)],
            },
            seed=i,
        )
        for i in range(count)
    ]


def emitted(method: str, *, adaptive: bool = False) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": 4, "adaptive": adaptive}


@frozen
class Reported:
    """What a sample is, but for the last bits of its log-probabilities, and what they
    make of ranks.
    """

    tokens: tuple[int, ...]
    text: str
    reason: str | None
    stopped_by: int | str | None
    listed: tuple[int, ...]  # tokens that have log-probabilities

    @classmethod
    def of(cls, completion: CompletionOutput) -> "Reported":
        listed = chain.from_iterable(completion.logprobs or ())
        return cls(
            tuple(completion.token_ids),
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
            tuple(listed),
        )


def reported(outputs: Sequence[RequestOutput]) -> list[list[Reported]]:
    return [
        [Reported.of(completion) for completion in output.outputs] for output in outputs
    ]


def logprobs(outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """All of them [2, tokens], with their ranks."""
    entries = (
        (lp.logprob, lp.rank)
        for output in outputs
        for completion in output.outputs
        for place in completion.logprobs or ()
        for lp in place.values()
    )
    return torch.tensor([*entries], dtype=torch.float64).T


@cache
def without(device: str, count: int) -> list[RequestOutput]:
    """What there is without drafts, in an engine with room for all."""
    with LLM(device=device, dtype="float32", **ROOMY) as llm:
        return llm.generate(prompts(count), requested(count), use_tqdm=False)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("method", "depth", "adaptive", "count"),
    [
        ("ngram", 1, False, FEW),
        ("suffix", 2, False, FEW),
        ("draft_model", 1, True, FEW),
        ("draft_model", 2, False, FEW),
        *claimed((*way, SOME) for way in EVERY_WAY),
        *claimed((*way, ALL) for way in EVERY_WAY),
    ],
)
def test_whatever_else_goes_on_tokens_are_those_without(
    method: str, depth: int, adaptive: bool, count: int, device: str
) -> None:
    config = emitted(method, adaptive=adaptive)
    expected = without(device, count)
    with LLM(
        device=device,
        dtype="float32",
        steps_in_flight=depth,
        speculative_config=config,
        **TIGHT,
    ) as llm:
        turns = Watched(llm)
        outputs = llm.generate(prompts(count), requested(count), use_tqdm=False)
    assert reported(outputs) == reported(expected)
    (values, ranks), (right, expected_ranks) = logprobs(outputs), logprobs(expected)
    torch.testing.assert_close(values, right, rtol=0, atol=2e-4)
    # Unlikely tokens are so many that last bits decide which of two is before the other.
    torch.testing.assert_close(ranks, expected_ranks, rtol=0.02, atol=0)
    # ... and it did happen.
    all_metrics = [output.metrics for output in outputs]
    drafts = sum(metrics.draft_tokens for metrics in all_metrics)
    accepted = sum(metrics.accepted_draft_tokens for metrics in all_metrics)
    assert sum(metrics.preemptions for metrics in all_metrics) > 0
    reasons = [reason for turn in turns for reason in turn.reasons]
    assert any(isinstance(reason, Admitted) and reason.hit for reason in reasons)
    assert {completion.finish_reason for o in outputs for completion in o.outputs} == {
        "stop",
        "length",
    }
    assert adaptive or 0 < accepted < drafts


# --- in bfloat16 ------------------------------------------------------------------------


@frozen
class Parting:
    """Where a text first differs from the one without drafts."""

    place: int  # of its output
    gap: float  # between what the two tokens scored, noise included


@frozen
class Compared:
    """Texts with drafts beside those without."""

    partings: list[Parting]
    error: float  # of log-probabilities, where texts were still the same


def compared(
    plain: Sequence[RequestOutput],
    drafted: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
) -> Compared:
    partings, error = list[Parting](), 0.0
    for request, (plain_output, drafted_output) in enumerate(
        zip(plain, drafted, strict=True)
    ):
        completions = [output.outputs[0] for output in (plain_output, drafted_output)]
        for place, tokens in enumerate(
            zip(*(o.token_ids for o in completions), strict=True)
        ):
            values = [
                (o.logprobs or ())[place][token].logprob
                for o, token in zip(completions, tokens, strict=True)
            ]
            if tokens[0] == tokens[1]:
                error = max(error, abs(values[0] - values[1]))
                continue
            if params[request].temperature:
                position = len(plain_output.prompt_token_ids or ()) + place
                key = draw_key(stream(request, 0), position)
                noise = [gumbel(noise_bits(key, token)) for token in tokens]
                values = [a + b for a, b in zip(values, noise, strict=True)]
            partings.append(Parting(place, abs(values[0] - values[1])))
            break
    return Compared(partings, error)


@cache
def in_bfloat16(
    device: str, count: int, method: str | None
) -> tuple[list[SamplingParams], list[RequestOutput]]:
    """What was requested, and the outputs with drafts by `method`, if any."""
    params = [
        SamplingParams(
            temperature=i % 2, max_tokens=48, ignore_eos=True, logprobs=0, seed=i
        )
        for i in range(count)
    ]
    config = emitted(method) if method else None
    with LLM(device=device, dtype="bfloat16", speculative_config=config, **ROOMY) as llm:
        return params, llm.generate(prompts(count), params, use_tqdm=False)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [FEW // 2, *claimed([FEW, SOME, ALL])])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_in_bfloat16_texts_part_only_where_two_tokens_are_as_good(
    method: str, count: int, device: str
) -> None:
    params, plain = in_bfloat16(device, count, None)
    _, drafted = in_bfloat16(device, count, method)
    comparison = compared(plain, drafted, params)
    gaps = [parting.gap for parting in comparison.partings]
    largest = max(gaps, default=0.0)
    print(
        f"{len(gaps)} of {count} texts part, at gaps up to {largest:.2g}; "
        f"log-probabilities differ by up to {comparison.error:.2g}"
    )
    # Of processors that add up in one order for every shape of batch, there is no error.
    assert comparison.error < ROUNDING
    assert largest < ROUNDING
