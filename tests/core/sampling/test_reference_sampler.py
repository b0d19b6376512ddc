"""What sampling means: filters by example, draws by statistics, noise by its quality."""

import math
import random
import struct
from collections import Counter
from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from minfer.records.request import SamplingParams, row_sampling
from minfer.sampling.logits import f32
from minfer.sampling.reference_sampler import (
    GREEDY_BELOW,
    NotFiniteError,
    draw,
    draw_key,
    filter_tokens,
    gumbel,
    is_greedy,
    noise_bits,
    pick,
    scores,
    stream,
)
from tests.circles import claimed
from tests.core.records.test_request import ask

PINNED_STREAM = 0x57E1FABA65107204
PINNED_KEY = 0xD57E07847A4E7936
PINNED_BITS = [2634192930, 1299553888, 3845800451]
LOGITS = (1.0, -0.5, 2.25, 0.0, 1.5, -3.0)


def critical(freedom: int, z: float = 3.7) -> float:
    """Chi-square's value that chance exceeds once in ten thousand (Wilson and Hilferty
    1931).
    """
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def shares(
    logits: Sequence[float], temperature: float, ids: Sequence[int]
) -> list[float]:
    weights = [math.exp(logits[t] / temperature) for t in ids]
    return [w / sum(weights) for w in weights]


KEPT = [
    (SamplingParams(), [0, 1, 2, 3, 4, 5]),
    (SamplingParams(temperature=0.6), [0, 1, 2, 3, 4, 5]),
    (SamplingParams(temperature=2.5), [0, 1, 2, 3, 4, 5]),
    (SamplingParams(top_k=3), [0, 2, 4]),
    (SamplingParams(top_p=0.7), [2, 4]),
    (SamplingParams(temperature=2.0, top_k=4, top_p=0.8), [0, 2, 4]),
    (SamplingParams(min_p=0.2), [0, 2, 4]),
    (SamplingParams(typical_p=0.5), [2, 4]),
    (SamplingParams(temperature=2.0, typical_p=0.7), [0, 2, 4]),
]


@pytest.mark.parametrize(
    ("params", "ids", "vary"),
    [
        *((*case, "seed") for case in KEPT),
        *((*KEPT[0], vary) for vary in ("sample", "position")),
        *claimed((*case, vary) for case in KEPT[1:] for vary in ("sample", "position")),
    ],
)
def test_draws_have_the_distribution_of_the_softmax(
    params: SamplingParams, ids: list[int], vary: str
) -> None:
    count = 4000
    drawn = Counter(
        draw(
            LOGITS,
            params,
            *(i if vary == name else 3 for name in ("seed", "sample", "position")),
        )
        for i in range(count)
    )
    assert set(drawn) <= set(ids)
    expected = [count * share for share in shares(LOGITS, params.temperature, ids)]
    assert chi_square([drawn[t] for t in ids], expected) < critical(len(ids) - 1)


def test_a_draw_is_by_the_noise_of_its_seed_its_sample_and_its_position() -> None:
    params = SamplingParams()
    drawn = [draw(LOGITS, params, seed, 1, 5) for seed in range(20)]
    scored = scores(LOGITS, params)
    assert drawn == [pick(scored, stream(seed, 1), 5) for seed in range(20)]
    for seed, token in enumerate(drawn):
        key = draw_key(stream(seed, 1), 5)
        noisy = {t: score + gumbel(noise_bits(key, t)) for t, score in scored.items()}
        assert token == max(noisy, key=noisy.__getitem__)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1)
    assert draw((0.0, 2.0, 1.0, 2.0), params, 1, 2, 3) == 1
    assert draw((-math.inf, -1.0), params, 1, 2, 3) == 1


def test_temperatures_near_zero_are_greedy() -> None:
    assert is_greedy(SamplingParams(temperature=GREEDY_BELOW / 2))
    assert not is_greedy(SamplingParams(temperature=GREEDY_BELOW))
    cold = SamplingParams(temperature=GREEDY_BELOW)
    assert {draw(LOGITS, cold, seed, 0, 1) for seed in range(50)} == {2}


def test_a_low_temperature_with_huge_logits_does_not_overflow() -> None:
    cold = SamplingParams(temperature=GREEDY_BELOW)
    assert draw((3e38, -3e38, 1.0), cold, 0, 0, 1) == 0


def test_top_k_keeps_all_ties_at_its_edge() -> None:
    assert filter_tokens((1.0, 3.0, 2.0, 2.0, 0.0), 2, 1.0) == [1, 2, 3]
    assert (
        filter_tokens((1.0, 3.0, 2.0), 0, 1.0)
        == filter_tokens((1.0, 3.0, 2.0), -1, 1.0)
        == [0, 1, 2]
    )
    assert filter_tokens((1.0, 3.0, 2.0), 99, 1.0) == [0, 1, 2]


def test_top_p_keeps_the_shortest_prefix_lower_ids_first_among_equals() -> None:
    even = (0.0, 0.0, 0.0, 0.0)
    assert filter_tokens(even, 0, 0.5) == [0, 1]  # exactly half is enough
    assert filter_tokens(even, 0, 0.51) == [0, 1, 2]
    assert filter_tokens((0.0, 1.0, 0.0), 0, 0.6) == [0, 1]
    assert filter_tokens(even, 0, 1e-9) == [0]  # at least one


def test_top_p_works_on_what_top_k_left_renormalised() -> None:
    logits = tuple(map(math.log, (0.4, 0.3, 0.2, 0.1)))
    assert filter_tokens(logits, 0, 0.55) == [0, 1]
    assert filter_tokens(logits, 2, 0.55) == [0]  # 0.4 of 0.7 is more than 0.55


def test_min_p_is_a_share_of_the_likeliest_and_top_p_works_on_what_it_leaves() -> None:
    logits = tuple(map(math.log, (0.4, 0.3, 0.2, 0.1)))
    assert filter_tokens(logits, 0, 1.0, 0.49) == [0, 1, 2]
    assert filter_tokens(logits, 0, 1.0, 0.51) == [0, 1]
    assert filter_tokens(logits, 0, 0.55, 0.51) == [0]  # 0.4 of 0.7 is more than 0.55
    assert filter_tokens(logits, 1, 1.0, 0.51) == [0]
    assert filter_tokens((1.0, 3.0, 3.0), 0, 1.0, 1.0) == [1, 2]
    assert filter_tokens((0.0, -math.inf), 0, 1.0, 0.0) == [0, 1]
    assert filter_tokens((0.0, -300.0), 0, 1.0, 1e-300) == [
        0,
        1,
    ]  # below float32: keeps all


def test_typical_tokens_are_as_surprising_as_one_expects() -> None:
    logits = tuple(map(math.log, (0.5, 0.2, 0.15, 0.15)))
    # Surprises are 0.69, 1.61, 1.90 and 1.90; 1.24 is expected.
    assert filter_tokens(logits, 0, 1.0, typical_p=0.1) == [1]
    assert filter_tokens(logits, 0, 1.0, typical_p=0.2) == [0, 1]
    assert filter_tokens(logits, 0, 1.0, typical_p=0.71) == [0, 1, 2]
    assert filter_tokens(logits, 0, 1.0, typical_p=0.9) == [0, 1, 2, 3]
    assert filter_tokens(logits, 0, 1.0, typical_p=1.0) == [0, 1, 2, 3]


def test_what_cannot_come_does_not_change_what_is_typical() -> None:
    logits = (*map(math.log, (0.5, 0.2, 0.15, 0.15)), -math.inf)
    assert filter_tokens(logits, 0, 1.0, typical_p=0.1) == [1]


def test_typical_tokens_lower_ids_first_among_equals() -> None:
    even = (0.0, 0.0, 0.0, -math.inf)
    assert filter_tokens(even, 0, 1.0, typical_p=0.5) == [0, 1]
    assert filter_tokens(even, 0, 1.0, typical_p=1e-9) == [0]


def test_typical_works_on_what_the_others_left_renormalised() -> None:
    logits = tuple(map(math.log, (0.5, 0.2, 0.15, 0.15)))
    # Of 5/7 and 2/7 the first is nearer to the 0.60 that is expected: 0.34 and 1.25.
    assert filter_tokens(logits, 2, 1.0, typical_p=0.1) == [0]
    assert filter_tokens(logits, 0, 0.65, typical_p=0.1) == [0]
    assert filter_tokens(logits, 0, 1.0, 0.39, typical_p=0.1) == [0]
    assert filter_tokens(logits, 2, 1.0, typical_p=0.72) == [0, 1]


@pytest.mark.parametrize(
    "bad", [(math.nan, 0.0), (0.0, math.nan), (math.inf, 0.0), (-math.inf,)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(
    bad: tuple[float, ...], temperature: float
) -> None:
    with pytest.raises(NotFiniteError):
        draw(bad, SamplingParams(temperature=temperature), 0, 0, 0)


@pytest.mark.long
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 127),
    st.integers(0, 2**31),
    st.integers(-1, 25),
    st.floats(0.01, 1),
)
@example([0.0, 0.0, 1.0, 7.478496675892543e-23], 0, 0, 0, 0, 0.5)
def test_a_draw_is_always_of_a_kept_token(
    logits: list[float], seed: int, sample: int, position: int, top_k: int, top_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p)
    # As a draw sees them: what differs by less than float32 shows is equal, and the lower
    # id first.
    ids = filter_tokens([f32(logit - max(logits)) for logit in logits], top_k, top_p)
    assert ids == sorted(set(ids))
    assert logits.index(max(logits)) in ids
    assert draw(logits, params, seed, sample, position) in ids


def test_samples_that_are_chosen_from_say_how_likely_their_tokens_are() -> None:
    for n, best_of, logprobs, reported in (
        (1, 2, None, 0),
        (1, 2, 3, 3),
        (2, 2, None, None),
    ):
        params = SamplingParams(n=n, best_of=best_of, logprobs=logprobs)
        request = ask(sampling=params)
        assert row_sampling(request, 0).logprobs == reported


def test_results_of_a_prompt_come_with_its_first_sample_before_it_has_output() -> None:
    request = ask(sampling=SamplingParams(n=2, prompt_logprobs=3))
    assert [row_sampling(request, i).prompt_logprobs for i in (0, 1)] == [3, None]
    resumed = evolve(request, output=(5,))
    assert row_sampling(resumed, 0).prompt_logprobs is None


# --- the noise --------------------------------------------------------------------------


def test_noise_is_what_it_was() -> None:
    """Pinned: if this changes, journals of older versions no longer replay to the same
    tokens.
    """
    key = draw_key(stream(42, 1), 1000)
    assert (stream(42, 1), key) == (PINNED_STREAM, PINNED_KEY)
    assert [noise_bits(key, token) for token in (0, 1, 151_935)] == PINNED_BITS


def test_gumbel_noise_at_the_ends_is_finite() -> None:
    assert gumbel(0) == pytest.approx(22.8739, abs=1e-4)
    assert gumbel(2**32 - 1) == pytest.approx(-2.8115, abs=1e-4)
    for bits in (0, 1, 2**31, 2**32 - 1):
        noise = gumbel(bits)
        assert struct.unpack("f", struct.pack("f", noise))[0] == noise


@pytest.mark.long
def test_gumbel_noise_has_the_moments_of_the_distribution() -> None:
    key, count = draw_key(stream(7, 0), 0), 40_000
    noise = [gumbel(noise_bits(key, token)) for token in range(count)]
    mean = sum(noise) / count
    variance = sum((x - mean) ** 2 for x in noise) / count
    assert mean == pytest.approx(0.5772157, abs=4 * 1.2825 / math.sqrt(count))
    assert variance == pytest.approx(math.pi**2 / 6, rel=0.05)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("vary", ["token", "position", "sample", "seed"])
def test_every_byte_of_the_noise_is_uniform(vary: str, shift: int) -> None:
    count, buckets = 16_384, Counter[int]()
    for i in range(count):
        at = {"token": 5, "position": 5, "sample": 5, "seed": 5} | {vary: i}
        key = draw_key(stream(at["seed"], at["sample"]), at["position"])
        buckets[noise_bits(key, at["token"]) >> shift & 255] += 1
    assert chi_square([buckets[b] for b in range(256)], [count / 256] * 256) < critical(
        255
    )


@pytest.mark.long
def test_one_changed_bit_of_token_or_key_changes_half_of_the_noise() -> None:
    rng, rounds = random.Random(0), 2_000
    for bit in range(96):
        flips = [0] * 32
        for _ in range(rounds):
            token, key = rng.getrandbits(32), rng.getrandbits(64)
            other = (token ^ 1 << bit, key) if bit < 32 else (token, key ^ 1 << bit - 32)
            changed = noise_bits(key, token) ^ noise_bits(other[1], other[0])
            for at in range(32):
                flips[at] += changed >> at & 1
        # 3,072 frequencies, each within five standard deviations of a half
        assert all(abs(f / rounds - 0.5) < 5 * 0.5 / math.sqrt(rounds) for f in flips), (
            bit
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 0, 9), (1, 0, 10)),  # the next position
        ((1, 0, 9), (1, 1, 9)),  # the next sample
        ((1, 0, 9), (2, 0, 9)),  # the next seed
        ((0, 1, 0), (1, 0, 0)),
        ((0, 0, 1), (0, 1, 0)),
    ],
)
def test_neighbouring_streams_are_uncorrelated(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    count = 10_000
    for lag in (0, 1):
        a = draw_key(stream(*one[:2]), one[2])
        b = draw_key(stream(*other[:2]), other[2])
        pairs = [
            (noise_bits(a, t) / 2**32 - 0.5, noise_bits(b, t + lag) / 2**32 - 0.5)
            for t in range(count)
        ]
        correlation = 12 * sum(x * y for x, y in pairs) / count
        assert abs(correlation) < 4 / math.sqrt(count)


def test_keys_of_a_stream_do_not_repeat() -> None:
    keys = {
        draw_key(stream(seed, k), p)
        for seed in range(30)
        for k in range(10)
        for p in range(99)
    }
    assert len(keys) == 30 * 10 * 99


def test_the_noise_is_a_bijection_of_token_ids() -> None:
    """So two tokens never tie by their noise alone."""
    key = draw_key(stream(3, 0), 17)
    assert len({noise_bits(key, token) for token in range(50_000)}) == 50_000


@given(st.integers(), st.integers(0, 127))
def test_seeds_count_modulo_64_bits(seed: int, sample: int) -> None:
    assert stream(seed, sample) == stream(seed % 2**64, sample)
