"""Drafts change no token, whatever they are; and of a good model's many stand."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.sampling.reference_sampler import (
    NotFiniteError,
    RowSampling,
    draw,
    next_token,
    scores,
)
from minfer.speculate.accept import TargetOutput, mask_logits, same_noise
from minfer.speculate.rejection import chances
from tests.core.speculate.tiny import PROMPT, VOCAB, Model, Setting, mask_after

SETTINGS = st.builds(
    RowSampling,
    seed=st.integers(-5, 2**40),
    sample=st.integers(0, 3),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 0, 2)),
    top_p=st.sampled_from((1.0, 0.6)),
    min_p=st.sampled_from((0.0, 0.2)),
    typical_p=st.sampled_from((1.0, 0.7)),
    frequency_penalty=st.sampled_from((0.0, 1.5)),
    presence_penalty=st.sampled_from((0.0, -0.7)),
    repetition_penalty=st.sampled_from((1.0, 1.8)),
    min_tokens=st.sampled_from((0, 3)),
    stop_ids=st.sampled_from((frozenset[int](), frozenset({1}))),
    bad_words=st.sampled_from(((), ((3, 0), (1,)))),
)
DRAFTS = st.lists(st.integers(0, VOCAB + 1), max_size=5)


def solo(setting: Setting, count: int) -> list[int]:
    """What comes without drafts."""
    known = list(PROMPT)
    for _ in range(count):
        logits = setting.target(known)
        if setting.grammar:
            logits = list(mask_logits(logits, mask_after(known)))
        known.append(next_token(logits, setting.how, known, len(PROMPT)))
    return known[len(PROMPT) :]


@given(SETTINGS, DRAFTS, st.booleans(), st.data())
def test_drafts_change_no_token(
    how: RowSampling, wild: list[int], grammar: bool, data: st.DataObject
) -> None:
    setting = Setting(Model(1), Model(2), how, grammar)
    right = solo(setting, len(wild) + 1)
    good = data.draw(st.integers(0, len(wild)))
    drafts = (*right[:good], *wild[good:])
    verdict = same_noise(setting.at([min(d, VOCAB - 1) for d in drafts]), drafts)
    assert list(verdict.tokens) == right[: len(verdict.tokens)]
    assert verdict.accepted >= good
    assert verdict.proposed == len(drafts)
    agreed = [d == r for d, r in zip(drafts, right, strict=False)]
    first_wrong = agreed.index(False) if False in agreed else len(drafts)
    assert verdict.accepted == first_wrong


@settings(max_examples=30)
@given(SETTINGS, st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_neither_number_nor_cut_of_drafts_matters(
    how: RowSampling, counts: list[int]
) -> None:
    """Step by step, with a draft model's drafts, the output is the one without."""
    setting, known = Setting(Model(3), Model(4), how), PROMPT
    for count in counts:
        guessed = list(known)
        for _ in range(count):
            guessed.append(next_token(setting.draft(guessed), how, guessed, len(PROMPT)))
        drafts = tuple(guessed[len(known) :])
        known += same_noise(setting.at(drafts, known), drafts).tokens
    assert list(known[2:]) == solo(setting, len(known) - 2)


def test_counts_move_with_every_accepted_token() -> None:
    """With a penalty, the fourth of four equal drafts meets a count of three."""
    how = RowSampling(seed=0, sample=0, temperature=0.0, frequency_penalty=1.0)
    flat = ((2.5, 0.0, -1.0, -9.0),) * 5
    target = TargetOutput(sampling=how, tokens=(3,), num_prompt_tokens=1, logits=flat)
    assert same_noise(target, (0, 0, 0, 0)).tokens == (0, 0, 0, 1)


def test_masks_are_those_of_their_places() -> None:
    how = RowSampling(seed=0, sample=0, temperature=0.0)
    flat = ((3.0, 2.0, 1.0, 0.0),) * 3
    masks = (b"", b"\x0c", b"\x08")
    target = TargetOutput(
        sampling=how, tokens=(3,), num_prompt_tokens=1, logits=flat, masks=masks
    )
    assert same_noise(target, (0, 2)).tokens == (0, 2, 3)
    assert same_noise(target, (0, 0)).tokens == (0, 2)
    assert mask_logits((1.0, 2.0), b"") == (1.0, 2.0)
    assert mask_logits((1.0,) * 9, b"\x01") == [1.0, *[-math.inf] * 8], (
        "short masks allow less"
    )


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    how = RowSampling(seed=0, sample=0)
    target = TargetOutput(
        sampling=how,
        tokens=(3,),
        num_prompt_tokens=1,
        logits=((0.0,) * 4,),
        masks=(b"\x00",),
    )
    with pytest.raises(NotFiniteError):
        same_noise(target, ())


@pytest.mark.long
@pytest.mark.parametrize("near", [1.0, 0.5, 0.0])
def test_with_the_same_noise_near_models_draw_alike(near: float) -> None:
    """At least (1 - TV) / (1 + TV) of the draws agree (Daliri et al. 2024), and never
    more than 1 - TV.
    """
    one = (1.0, 0.2, -0.5, 0.4)
    other = tuple(
        near * x + (1 - near) * y for x, y in zip(one, (0, 1.5, 0, 0), strict=True)
    )
    count, how = 3000, RowSampling(seed=0, sample=0)
    same = sum(draw(one, how, i, 0, 5) == draw(other, how, i, 0, 5) for i in range(count))
    p, q = (chances(scores(logits, how)) for logits in (one, other))
    far = sum(abs(p[t] - q[t]) for t in range(VOCAB)) / 2
    slack = 4 / (2 * math.sqrt(count)) * (far > 0)
    assert (1 - far) / (1 + far) - slack <= same / count <= 1 - far + slack
    separate = sum(
        draw(one, how, i, 0, 5) == draw(other, how, i, 0, 6) for i in range(count)
    )
    assert separate < same, "independent noise agrees less often"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_of_the_language(temperature: float) -> None:
    """All sequences of three drafts: exactly those that agree are accepted, so far."""
    how = RowSampling(seed=3, sample=0, temperature=temperature)
    setting = Setting(Model(5), Model(6), how)
    right = solo(setting, 4)
    for drafts in product(range(VOCAB), repeat=3):
        tokens = same_noise(setting.at(drafts), drafts).tokens
        assert list(tokens) == right[: len(tokens)]
        assert len(tokens) == 4 or tokens[-1] != drafts[len(tokens) - 1]
