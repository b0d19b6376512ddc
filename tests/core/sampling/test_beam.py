"""Which beams go on. That choices are those of transformers is asked where a model is,
in tests/effects/live/test_beam_search.py.
"""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest

from minfer.sampling.beam import (
    MAX_CANDIDATES,
    NEVER,
    BeamCandidate,
    BeamSearch,
    Candidates,
    Hypothesis,
    RoundContext,
    Search,
    choose_beams,
    num_candidates,
)
from minfer.values.checks import ParameterError

Output = tuple[int, ...]
Model = Callable[[Output], list[float]]  # log-probabilities of all tokens


def this_round(
    how: BeamSearch, length: int, most: int, outs: list[Output]
) -> RoundContext:
    return RoundContext(how, frozenset({0}), length, most, outs.__getitem__)


def offers(*each: dict[int, float]) -> tuple[Candidates, ...]:
    return tuple(
        Candidates(beam, tuple(one), tuple(one.values())) for beam, one in enumerate(each)
    )


def test_of_the_best_those_that_end_are_kept_and_those_that_do_not_go_on() -> None:
    search = Search((-1.0, -2.0), offers({0: -0.1, 1: -1.0, 2: -3.0}, {1: -0.2, 0: -0.3}))
    choice = choose_beams(search, this_round(BeamSearch(), 3, 9, [(7, 8), (8, 7)]))
    assert choice.next_beams == (BeamCandidate(0, 1, -2.0), BeamCandidate(1, 1, -2.2))
    (done,) = choice.hypotheses
    assert done == Hypothesis((7, 8, 0), -1.1, -1.1 / 3, "stop")


def test_what_ends_behind_the_best_is_no_hypothesis() -> None:
    search = Search((-1.0, -2.0), offers({1: -0.1, 2: -0.2, 0: -0.3}, {1: -9.0, 2: -9.5}))
    choice = choose_beams(search, this_round(BeamSearch(), 3, 9, [(), ()]))
    assert [(one.parent, one.token) for one in choice.next_beams] == [(0, 1), (0, 2)]
    assert not choice.hypotheses


def test_the_last_round_ends_the_best_whatever_they_are() -> None:
    search = Search((-1.0, -2.0), offers({1: -0.1, 0: -0.2}, {1: -0.1, 2: -0.2}))
    choice = choose_beams(search, this_round(BeamSearch(), 2, 2, [(7,), (8,)]))
    assert not choice.next_beams
    assert [(one.tokens, one.reason) for one in choice.hypotheses] == [
        ((7, 1), "length"),
        ((7, 0), "stop"),
    ]


@pytest.mark.parametrize(
    ("early", "penalty", "over"),
    [
        (True, 1.0, True),
        (False, 1.0, False),  # -1 / 4 is above -0.3
        (False, 0.0, True),  # -1 is not
        (NEVER, 0.0, True),
        (NEVER, 1.0, False),  # -1 / 8 is
        (NEVER, -1.0, True),  # longer is worse: -1 * 4
    ],
)
def test_when_a_search_is_over_that_has_its_hypotheses(
    early: bool | str, penalty: float, over: bool
) -> None:
    done = (Hypothesis((1,), -0.1, -0.1, "stop"), Hypothesis((2,), -0.3, -0.3, "stop"))
    search = Search((-0.9, -2.0), offers({1: -0.1, 2: -3.0}, {1: -1.0, 2: -3.0}), done)
    how = BeamSearch(length_penalty=penalty, early_stopping=early)
    choice = choose_beams(search, this_round(how, 4, 8, [(), ()]))
    assert bool(choice.next_beams) is not over
    assert choice.hypotheses == done
    fewer = Search(search.logprobs, search.candidates, done[:1])
    assert choose_beams(fewer, this_round(how, 4, 8, [(), ()])).next_beams, (
        "one is missing"
    )


@pytest.mark.parametrize(
    ("early", "penalty", "worst", "over"),
    [
        (NEVER, -1.0, -3.9, True),  # the best beam's score is -1 * 4 now,
        (NEVER, -1.0, -4.1, False),
        (NEVER, -1.0, -7.9, False),  # and -1 * 8 at the end, which is worse
        (NEVER, 1.0, -0.13, False),  # -1 / 8 at the end, which is better than -1 / 4
        (NEVER, 1.0, -0.12, True),
        (False, -1.0, -3.9, True),
        (False, -1.0, -4.1, False),
        (False, 1.0, -0.2, True),
        (False, 1.0, -0.3, False),
        (False, 1.0, -0.25, True),  # as good is not better
    ],
)
def test_a_search_ends_by_the_best_that_a_beam_can_come_to(
    early: bool | str, penalty: float, worst: float, over: bool
) -> None:
    done = (Hypothesis((1,), -0.1, -0.1, "stop"), Hypothesis((2,), -0.3, worst, "stop"))
    search = Search((-0.9, -2.0), offers({1: -0.1, 2: -3.0}, {1: -1.0, 2: -3.0}), done)
    stopping = {"early_stopping": early} if early else {}  # False is the default
    how = BeamSearch(length_penalty=penalty, **stopping)
    choice = choose_beams(search, this_round(how, 4, 8, [(), ()]))
    assert bool(choice.next_beams) is not over


def test_of_few_tokens_on_offer_some_beams_count_for_nothing() -> None:
    search = Search((0.0, -inf, -inf), offers({1: -0.1, 0: -3.0}, {1: -0.1}, {1: -0.1}))
    choice = choose_beams(search, this_round(BeamSearch(), 2, 9, [()] * 3))
    assert [one.logprob for one in choice.next_beams] == [-0.1, -inf, -inf]


def test_the_only_beam_of_the_first_round_has_all_children() -> None:
    search = Search((0.0, 0.0), (*offers({1: -0.1, 2: -3.0, 3: -9.0}), None))
    choice = choose_beams(search, this_round(BeamSearch(), 1, 9, [()]))
    assert choice.next_beams == (BeamCandidate(0, 1, -0.1), BeamCandidate(0, 2, -3.0))


def test_children_too_few_for_the_beams_are_made_up_for() -> None:
    search = Search((-1.0, -2.0), offers({1: -0.1, 0: -3.0}, {0: -0.1}))
    choice = choose_beams(search, this_round(BeamSearch(), 2, 9, [(), ()]))
    assert choice.next_beams == (BeamCandidate(0, 1, -1.1), BeamCandidate(0, 1, -inf))


def test_a_search_is_over_if_nothing_on_offer_goes_on() -> None:
    search = Search((-1.0, -2.0), offers({0: -0.1}, {0: -0.2}))
    choice = choose_beams(search, this_round(BeamSearch(), 2, 9, [(7,), (8,)]))
    assert not choice.next_beams
    assert [one.tokens for one in choice.hypotheses] == [(7, 0), (8, 0)]


def test_no_more_hypotheses_are_kept_than_there_are_beams() -> None:
    done = (Hypothesis((1,), -0.3, -0.3, "stop"), Hypothesis((2,), -0.9, -0.9, "stop"))
    search = Search((-0.1, -2.0), offers({0: -0.1, 1: -0.2}, {1: -1.0}), done)
    choice = choose_beams(search, this_round(BeamSearch(), 1, 9, [(), ()]))
    assert [one.tokens for one in choice.hypotheses] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
    ],
)
def test_a_search_that_makes_no_sense(how: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearch(**how)
    assert caught.value.param == param


def test_no_more_candidates_are_wanted_than_there_can_be() -> None:
    assert num_candidates(4, 2) == 6
    assert num_candidates(16, 9) == MAX_CANDIDATES


def searched(
    model: Model, width: int, stops: frozenset[int], how: BeamSearch, most: int
) -> list[Hypothesis]:
    """A search of `model`, with as many candidates as an engine gets."""
    sums: tuple[float, ...] = (0.0, *(-inf,) * (width - 1))
    done: tuple[Hypothesis, ...] = ()
    outs: list[Output] = [()] * width
    length = 0
    while True:
        length += 1
        offered = list[Candidates]()
        for beam, out in enumerate(outs):
            values = model(out)
            best = sorted(range(len(values)), key=lambda t: -values[t])
            ids = tuple(best[: num_candidates(width, len(stops))])
            offered.append(Candidates(beam, ids, tuple(values[t] for t in ids)))
        this = RoundContext(how, stops, length, most, outs.__getitem__)
        choice = choose_beams(Search(sums, tuple(offered), done), this)
        if not choice.next_beams:
            return list(choice.hypotheses)
        outs = [(*outs[one.parent], one.token) for one in choice.next_beams]
        sums, done = tuple(one.logprob for one in choice.next_beams), choice.hypotheses


def exhaustive(
    model: Model, vocab: int, stops: frozenset[int], how: BeamSearch, most: int
) -> list[Hypothesis]:
    """All outputs, the best first."""
    found = list[Hypothesis]()
    live: list[tuple[Output, float]] = [((), 0.0)]
    for length in range(1, most + 1):
        after = [
            ((*out, token), total + model(out)[token])
            for out, total in live
            for token in range(vocab)
        ]
        ends = [one for one in after if one[0][-1] in stops or length == most]
        found += [
            Hypothesis(out, total, total / length**how.length_penalty, "")
            for out, total in ends
        ]
        live = [one for one in after if one[0][-1] not in stops]
    return sorted(found, key=lambda one: -one.score)


def random_model(rng: Random, vocab: int) -> Model:
    """A model that draws what it says of an output when it is first asked."""
    table = dict[Output, list[float]]()

    def model(out: Output) -> list[float]:
        if out not in table:
            table[out] = [-rng.expovariate(0.5) for _ in range(vocab)]
        return table[out]

    return model


def test_a_wide_search_of_a_small_model_finds_the_best_of_all() -> None:
    vocab, most = 3, 3
    for seed in range(40):
        rng = Random(seed)
        model = random_model(rng, vocab)
        how = BeamSearch(length_penalty=rng.choice((0.0, 1.0)), early_stopping=NEVER)
        stops = frozenset({0})
        best = searched(model, 12, stops, how, most)[0]
        due = exhaustive(model, vocab, stops, how, most)[0]
        assert (best.tokens, best.score) == (due.tokens, due.score)


def test_of_equal_continuations_the_earlier_beam_and_the_likelier_token_come_first() -> (
    None
):
    each = ({3: -1.0, 1: -1.0, 2: -1.0}, {9: -1.0, 4: -1.0}, {5: -1.0})
    search = Search((-2.0, -2.0, -2.0), offers(*each))
    choice = choose_beams(search, this_round(BeamSearch(), 3, 9, [(), (), ()]))
    assert [(one.parent, one.token) for one in choice.next_beams] == [
        (0, 3),
        (0, 1),
        (0, 2),
    ]
    offer = offers({}, {}, each[1])[2]
    later = Search((-2.0, -2.0, -2.0), (None, None, offer))
    choice = choose_beams(later, this_round(BeamSearch(), 3, 9, [(), (), ()]))
    assert [(one.parent, one.token) for one in choice.next_beams[:2]] == [(2, 9), (2, 4)]


def test_of_equal_hypotheses_the_earlier_ones_are_kept() -> None:
    """The beams have as many as they may; those that end now are as good, no better."""
    this = this_round(BeamSearch(length_penalty=0.0), 3, 9, [(7,), (8,)])
    known = tuple(Hypothesis((at,), -3.0, -3.0, "stop") for at in (1, 2))
    search = Search((-2.0, -2.5), offers({0: -1.0, 1: -1.1}, {0: -0.5, 1: -0.6}), known)
    assert choose_beams(search, this).hypotheses == known
    better = offers({0: -0.5, 1: -0.6}, {0: -0.5, 1: -0.6})
    done = choose_beams(Search((-2.0, -2.5), better, known), this).hypotheses
    assert [(one.tokens, one.score) for one in done] == [((7, 0), -2.5), ((1,), -3.0)]
