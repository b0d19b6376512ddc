"""The distribution is the target's: every outcome enumerated, and by statistics; rules
that are wrong, and noise that is shared, are noticed by the same tests.
"""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from attrs import evolve

from minfer.sampling.reference_sampler import (
    RowSampling,
    draw,
    draw_key,
    noise_bits,
    pick,
    scores,
    uniform,
)
from minfer.speculate.accept import TargetOutput, Verdict, same_noise
from minfer.speculate.rejection import (
    Chances,
    Noise,
    Streams,
    accepts,
    chances,
    rejection,
    residual,
    sample_draft,
)
from tests.circles import claimed
from tests.core.sampling.test_reference_sampler import PINNED_STREAM, chi_square, critical
from tests.core.speculate.tiny import (
    PROMPT,
    VOCAB,
    Model,
    Rule,
    Scripted,
    Setting,
    largest_error,
)

EXACT = 1e-5
MANY = [("plain", 100_000), ("top-p", 100_000)]  # draws
PINNED_DRAFT = 0xC16129ECD0DC5B93
PINNED_COINS = 0x723AD4CBD7C9B07B
WAYS = {
    "plain": RowSampling(seed=0, sample=0),
    "cold": RowSampling(seed=0, sample=0, temperature=0.5),
    "top-k": RowSampling(seed=0, sample=0, top_k=2),
    "top-p": RowSampling(seed=0, sample=0, temperature=1.5, top_p=0.7),
    "min-p": RowSampling(seed=0, sample=0, min_p=0.35),
    "penalties": RowSampling(
        seed=0,
        sample=0,
        frequency_penalty=0.8,
        presence_penalty=0.5,
        repetition_penalty=1.6,
    ),
    "greedy": RowSampling(seed=0, sample=0, temperature=0.0),
}


def setting_of(how: str, *, grammar: bool = False) -> Setting:
    return Setting(Model(1), Model(9), WAYS[how], grammar)


# --- exactly ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "found"])
@pytest.mark.parametrize("grammar", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("how", WAYS)
def test_the_distribution_is_the_targets(how: str, grammar: bool, certain: bool) -> None:
    setting = setting_of(how, grammar=grammar)
    assert largest_error(rejection, setting, 2, certain=certain) < EXACT


@pytest.mark.long
def test_three_drafts_as_well() -> None:
    setting = setting_of("penalties")
    assert largest_error(rejection, setting, 3, certain=False) < EXACT


def careless(
    target: TargetOutput, drafts: Sequence[int], qs: Sequence[Chances], noise: Noise
) -> Verdict:
    """A draft is accepted with its probability, however likely it was to be drawn."""
    return rejection(target, drafts, [dict.fromkeys(q, 1.0) for q in qs], noise)


def forgetful(
    target: TargetOutput, drafts: Sequence[int], qs: Sequence[Chances], noise: Noise
) -> Verdict:
    """What takes the place of a rejected draft is drawn from all of the target's."""
    verdict = rejection(target, drafts, qs, noise)
    kept = verdict.tokens[:-1]
    scored = scores(target.shape_logits(kept), target.sampling)
    return Verdict((*kept, noise.pick(scored, 0)), len(drafts))


def uncounting(
    target: TargetOutput, drafts: Sequence[int], qs: Sequence[Chances], noise: Noise
) -> Verdict:
    """Penalties do not see the drafts that were accepted."""
    plain = evolve(target, sampling=evolve(target.sampling, frequency_penalty=0.0))
    return rejection(plain, drafts, qs, noise)


def eager(
    target: TargetOutput, drafts: Sequence[int], qs: Sequence[Chances], noise: Noise
) -> Verdict:
    """A draft is accepted a little too often."""
    some = [{t: share * 0.9 for t, share in q.items()} for q in qs]
    return rejection(target, drafts, some, noise)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [careless, forgetful, uncounting, eager])
def test_a_wrong_rule_is_noticed(wrong: Rule) -> None:
    error = largest_error(wrong, setting_of("penalties"), 2, certain=False)
    assert error > 100 * EXACT


def test_the_share_that_is_accepted_is_the_most_that_can_be() -> None:
    p, q = {0: 0.5, 1: 0.25, 2: 0.25}, {0: 0.25, 1: 0.5, 3: 0.25}
    taken = sum(share * turning(p.get(token, 0.0), share) for token, share in q.items())
    assert taken == pytest.approx(
        1 - sum(abs(p.get(t, 0) - q.get(t, 0)) for t in range(4)) / 2
    )


def turning(p: float, q: float) -> float:
    """The share of a thousand coins by which a draft is accepted."""
    return sum(accepts((i + 0.5) / 1000, p, q) for i in range(1000)) / 1000


# --- by statistics ----------------------------------------------------------------------


def sampled(setting: Setting, count: int, shared: str = "") -> Counter[tuple[int, ...]]:
    """The next two tokens, by a draft each and by seeds from 0 on; `shared` names two
    streams that are made one.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        how = evolve(setting.how, seed=seed)
        here = evolve(setting, how=how)
        noise = Streams.of(seed, 0)
        if shared:
            one, other = shared.split()
            noise = evolve(noise, **{one: getattr(noise, other)})
        known = PROMPT
        while len(known) < len(PROMPT) + 2:
            draft = sample_draft(setting.draft(known), how, known, len(PROMPT), noise)
            target = here.at((draft.token,), known)
            known += rejection(target, (draft.token,), [draft.chances], noise).tokens
        found[known[len(PROMPT) : len(PROMPT) + 2]] += 1
    return found


def chi_of(setting: Setting, found: Counter[tuple[int, ...]]) -> tuple[float, float]:
    """The statistic, and what chance exceeds once in ten thousand."""
    pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    due = {pair: setting.share_of(pair) * found.total() for pair in pairs}
    some = [pair for pair in pairs if due[pair]]
    assert set(found) <= set(some)
    seen = chi_square([found[pair] for pair in some], [due[pair] for pair in some])
    return seen, critical(len(some) - 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("plain", 4000),
        ("top-p", 4000),
        *claimed(MANY),
    ],
)
def test_draws_have_the_distribution_of_the_target(how: str, count: int) -> None:
    setting = setting_of(how)
    seen, most = chi_of(setting, sampled(setting, count))
    assert seen < most


FLAT = Setting(
    lambda _: [math.log(p) for p in (0.3, 0.1, 0.3, 0.3)],
    lambda _: [math.log(q) for q in (0.005, 0.9, 0.09, 0.005)],
    WAYS["plain"],
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shared", "setting"),
    [
        ("coins draft", setting_of("plain")),
        ("picks draft", FLAT),
        ("picks coins", FLAT),
    ],
)
def test_a_shared_stream_is_noticed(shared: str, setting: Setting) -> None:
    seen, most = chi_of(setting, sampled(setting, 4000, shared))
    assert seen > 1.5 * most
    seen, most = chi_of(setting, sampled(setting, 4000))
    assert seen < most


@pytest.mark.parametrize(
    ("how", "count"),
    [("top-p", 3000), *claimed(MANY)],
)
@pytest.mark.parametrize("rule", ["same noise", "rejection"])
def test_found_drafts_keep_the_distribution(rule: str, how: str, count: int) -> None:
    """Two drafts that always are the same, as one that looks them up has them."""
    setting, found = setting_of(how), Counter[tuple[int, ...]]()
    for seed in range(count):
        here = evolve(setting, how=evolve(setting.how, seed=seed))
        known = PROMPT
        while len(known) < len(PROMPT) + 2:
            drafts = (1, 3)
            target = here.at(drafts, known)
            same = rule == "same noise"
            verdict = (
                same_noise(target, drafts) if same else rejection(target, drafts, [])
            )
            known += verdict.tokens
        found[known[len(PROMPT) : len(PROMPT) + 2]] += 1
    seen, most = chi_of(setting, found)
    assert seen < most


# --- single decisions -------------------------------------------------------------------


def test_what_the_target_excludes_is_never_accepted_and_what_is_as_likely_always() -> (
    None
):
    for coin in (2.0**-33, 0.5, 1 - 2.0**-24):
        assert not accepts(coin, 0.0, 1.0)
        assert not accepts(coin, 0.0, 1e-45)
        assert accepts(coin, 0.3, 0.3)
        assert accepts(coin, 1e-38, 1e-38)
    assert accepts(0.25, 0.25, 1.0)
    assert not accepts(0.26, 0.25, 1.0)


def test_what_is_left_of_equal_distributions_is_the_targets() -> None:
    p = {0: 0.75, 2: 0.25}
    equal = {0: pytest.approx(math.log(0.75)), 2: pytest.approx(math.log(0.25))}
    assert residual(p, p) == equal
    assert residual(p, {0: 1.0}) == {2: pytest.approx(math.log(0.25))}
    assert residual(p, {0: 0.25, 1: 0.75}).keys() == {0, 2}


def test_noise_is_of_the_position_that_it_decides() -> None:
    low, high = 2.0**-33, 1 - 2.0**-24
    setting, drafts = setting_of("plain"), (0, 1)
    qs = [{t: 0.999 if t == draft else 0.0 for t in range(VOCAB)} for draft in drafts]
    for coins, places, accepted in (
        ([low, low], [2, 3, 4], 2),
        ([low, high], [2, 3, 3], 1),
        ([high], [2, 2], 0),
    ):
        noise = Scripted([*coins])
        verdict = rejection(setting.at(drafts), drafts, qs, noise)
        assert (noise.places, verdict.accepted) == (places, accepted)
        assert verdict.proposed == 2


def test_every_draft_says_what_it_was_drawn_from() -> None:
    setting = setting_of("plain")
    with pytest.raises(ValueError, match="zip"):
        rejection(setting.at((0, 1)), (0, 1), [{0: 1.0}])


def test_the_coin_and_the_pick_are_of_streams_of_their_own() -> None:
    noise, scored = Streams(1, 2, 3), {0: 0.0, 1: 0.0, 2: 0.0}
    for position in range(20):
        assert noise.coin(position) == uniform(noise_bits(draw_key(2, position), 0))
        assert noise.pick(scored, position) == pick(scored, 3, position)


def test_what_underflows_is_not_picked_from() -> None:
    assert residual({0: 1.0, 1: 0.0}, {0: 1.0}) == {0: 0.0}
    assert chances({0: 0.0, 1: -200.0}) == {0: 1.0, 1: 0.0}


def test_without_drafts_the_token_is_the_one_without_speculation() -> None:
    for seed in range(200):
        how = RowSampling(seed=seed, sample=seed % 3, top_p=0.9)
        setting = Setting(Model(1), Model(9), how)
        due = draw(setting.target(PROMPT), how, seed, how.sample, len(PROMPT))
        assert rejection(setting.at(()), (), []).tokens == (due,)


def test_a_draft_of_an_id_that_the_target_lacks_is_rejected() -> None:
    setting = setting_of("plain")
    verdict = rejection(setting.at((0,)), (VOCAB + 5,), [])
    assert verdict.accepted == 0
    assert verdict.tokens[0] < VOCAB


def test_streams_are_what_they_were() -> None:
    """Pinned, as the noise is: or equal seeds would draw otherwise in another version."""
    assert Streams.of(42, 1) == Streams(PINNED_DRAFT, PINNED_COINS, PINNED_STREAM)


def test_the_three_streams_differ_by_seed_and_sample() -> None:
    every = set[int]()
    for seed in range(40):
        for sample in range(5):
            made = Streams.of(seed, sample)
            every |= {made.draft, made.coins, made.picks}
    assert len(every) == 40 * 5 * 3


def test_a_draft_says_what_it_was_drawn_from() -> None:
    how, model = WAYS["top-k"], Model(9)
    noise = Streams.of(4, 0)
    one = sample_draft(model(PROMPT), how, PROMPT, len(PROMPT), noise)
    assert one.chances == chances(scores(model(PROMPT), how))
    assert len(one.chances) == 2
    assert sum(one.chances.values()) == pytest.approx(1)
    assert one.token == pick(scores(model(PROMPT), how), noise.draft, len(PROMPT))


def test_penalties_of_a_draft_are_by_the_output() -> None:
    how = RowSampling(seed=0, sample=0, temperature=0.0, frequency_penalty=1.0)
    noise, logits = Streams.of(0, 0), (1.5, 1.0, 0.0, -1.0)
    assert sample_draft(logits, how, (0, 0, 2), 2, noise).token == 0
    assert sample_draft(logits, how, (0, 0, 2), 1, noise).token == 1
