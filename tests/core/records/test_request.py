"""Where each parameter's range ends: the last value that is taken, and the first that is
not.
"""

import math
from typing import Any

import pytest
from attrs import evolve

from minfer.records.request import (
    Continuation,
    KvTransfer,
    ParameterError,
    PromptOnly,
    Request,
    SamplingParams,
)
from minfer.sampling.beam import BeamRound
from minfer.values.checks import check_number


def ask(**more: Any) -> Request:
    return Request(**{"id": "a", "prompt": (1,), "max_tokens": 1, **more})


SAMPLING: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 128], [0, 129, 1.5, True]),
    (
        "temperature",
        [0, 0.0, 1.5, 100],
        [-1e-9, 100.1, math.nan, math.inf, "1", None, True],
    ),
    ("top_p", [1e-9, 0.5, 1, 1.0], [0, 0.0, -1, 1.0001, math.nan]),
    ("top_k", [-1, 0, 2**31], [-2, 2**31 + 1, 0.5]),
    ("min_p", [0, 0.5, 1], [-0.001, 1.001, math.nan, True]),
    ("seed", [None, -(2**63), 2**63 - 1, 0], [-(2**63) - 1, 2**63, "x"]),
    ("max_tokens", [None, 0, 1, 2**31], [-1, 2**31 + 1, 2.5]),
    ("prompt_logprobs", [None, 0, 20], [-1, 21, True]),
    ("best_of", [None, 1, 128], [0, 129, 1.0]),
    ("logprobs", [None, 0, 20], [-1, 21, 1.5, True]),
    (
        "stop",
        ["a", ("a",) * 64, ("b" * 1024,), None, ()],
        [("a",) * 65, ("b" * 1025,), ("",)],
    ),
    ("stop", [["a", "b"]], [("a", 1), 7]),
    (
        "stop_token_ids",
        [None, (), [0], (2**31,), tuple(range(256))],
        [(-1,), (2**31 + 1,), tuple(range(257)), (1.0,), 7, (True,)],
    ),
    ("ignore_eos", [True, False], [1, 0, None]),
    ("include_stop_str_in_output", [True, False], [1, "yes"]),
    ("skip_special_tokens", [True, False], [0, None]),
    ("detokenize", [True, False], [0, None]),
    ("output_kind", ["DELTA", "final_only"], ["x", 1, None]),
    ("typical_p", [1e-9, 1], [0, 1.01]),
    ("repetition_penalty", [1e-9, 2], [0, -1, 2.01, math.nan]),
    ("frequency_penalty", [-2, 2], [-2.01, 2.01, None]),
    ("presence_penalty", [-2, 2], [-2.01, 2.01, None, "x"]),
    ("min_tokens", [0, 16], [-1, 17, 1.0, None, True]),
    ("logit_bias", [{}, {0: -100, 2**31: 100}], [{0: -101}, {2**31 + 1: 0}, {0.5: 0}]),
    ("logit_bias", [None], [5, [5], {5: 101}, {5: math.nan}, {-1: 1}, {"5": 1}]),
    ("logit_bias", [[(5, 1)]], [[(5, 1), (5, 2)], {True: 1}]),
    ("logit_bias", [dict.fromkeys(range(1024), 1)], [dict.fromkeys(range(1025), 1)]),
    ("allowed_token_ids", [[0, 2**31], range(2**16)], [[2**31 + 1], range(2**16 + 1)]),
    ("allowed_token_ids", [None, [5]], [[], 5, [-1], [5, 2**31 + 1], [True]]),
    ("bad_words", [["x" * 128], ["x"] * 128], [["x" * 129], ["x"] * 129]),
    ("bad_words", ["x"], [5, [5], [""]]),
]


@pytest.mark.parametrize(("name", "good", "bad"), SAMPLING)
def test_sampling_parameters_end_where_they_say(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert str(caught.value).startswith(f"{name}: ")


HUGE = 10**5000  # too long for Python to write out
REQUEST: list[tuple[str, list[Any], list[Any]]] = [
    ("id", ["", "x"], [1, None, b"x"]),
    ("client", ["", "x"], [1, None]),
    ("prompt_only", [None], ["last", 1]),
    ("needs_host_mask", [True, False], [1, None]),
    ("max_tokens", [1, 2**63 - 1], [2**63, HUGE, 0, -1, 1.0, None, True]),
    ("n", [0, 2**63 - 1], [2**63, "1", True]),
    ("seed", [-(2**63), 2**63 - 1], [2**63, None]),
    ("priority", [-(2**53), 2**53], [2**53 + 1, -(2**53) - 1, 10**400, 0.5, math.nan]),
    ("deadline", [0, 0.5, math.inf], [-0.5, math.nan, "1", True]),
    ("sampling", [SamplingParams(n=2)], [None, {}]),
    ("stop_ids", [frozenset(), frozenset((0, 2**32 - 1))], [{1}, frozenset((-1,))]),
    ("stop_ids", [], [frozenset((2**32,)), frozenset((1.0,)), frozenset("a"), (1,), [1]]),
    ("bad_words", [(), ((1,), (2, 3))], [[], ((),), ((-1,),), ((1.0,),), (1,)]),
    ("bad_words", [((1,) * 1024,)], [((1,) * 1025,), ((1,),) * 1025]),
    ("root", [b"", b"x"], ["", None]),
    ("keys", [(), (b"x", b"y")], [[b"x"], ("x",), (b"x", 1), None]),
    ("continuation", [Continuation()], [None, {}]),
    ("kv_transfer", [None, KvTransfer()], [Continuation(), {}]),
]


@pytest.mark.parametrize(("name", "good", "bad"), REQUEST)
def test_fields_of_a_request_end_where_they_say(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert getattr(ask(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ParameterError) as caught:
            ask(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["num_stored_blocks", "first_block"])
def test_blocks_of_a_transfer_are_counted_in_whole_numbers(name: str) -> None:
    good: list[Any] = [0, 2**63 - 1]
    for value in good:
        assert getattr(KvTransfer(**{name: value}), name) == value
    bad: list[Any] = [-1, 2**63, 1.0, 0.5, None, True]
    for value in bad:
        with pytest.raises(ParameterError) as caught:
            KvTransfer(**{name: value})
        assert caught.value.param == f"kv_transfer.{name}"
    push_to: Any = 1
    with pytest.raises(ParameterError, match="push_to"):
        KvTransfer(push_to=push_to)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"n": 2},
        {"n": 0},
        {"output": (1,)},
        {"needs_host_mask": True},
    ],
)
def test_a_request_of_its_prompt_only_yields_no_token(more: dict[str, Any]) -> None:
    prompt_only: dict[str, Any] = {"max_tokens": 0, "prompt_only": PromptOnly()}
    assert ask(**prompt_only).most_known(16) == len(ask().prompt) + 1
    with pytest.raises(ParameterError) as caught:
        ask(**prompt_only | more)
    assert caught.value.param == "prompt_only"


def test_what_is_needed_of_each_position_is_not_read_from_the_cache() -> None:
    scored = SamplingParams(prompt_logprobs=0)
    for pooling, recomputes in (("", False), ("last", False), ("mean", True)):
        request = ask(max_tokens=0, prompt_only=PromptOnly(pooling))
        assert request.reads_cache == (not recomputes)
        assert request.recomputes_prompt == recomputes
        assert not evolve(request, sampling=scored).reads_cache
    assert ask().reads_cache
    assert not ask(sampling=scored).reads_cache
    with pytest.raises(ParameterError, match=r"prompt_only\.pooling"):
        PromptOnly(1)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "wrong", [[b"", b""], (b"x",), (b"", b"", b""), ("", "x"), (b"x", 1)]
)
def test_keys_of_a_partial_block_are_two(wrong: Any) -> None:
    assert Continuation(tail_keys=(b"", b"x")).tail_keys == (b"", b"x")
    with pytest.raises(ParameterError) as caught:
        Continuation(tail_keys=wrong)
    assert caught.value.param == "continuation.tail_keys"


@pytest.mark.parametrize("name", ["prompt", "output"])
def test_token_ids_are_of_32_bits_without_a_sign(name: str) -> None:
    assert ask(**{name: (0, 2**32 - 1)}).largest == 2**32 - 1
    no_ids: tuple[Any, ...] = ((-1,), (2**32,), (1.0,), ("a",), (1, -1), (1, "a"))
    for wrong in no_ids:
        with pytest.raises(ParameterError, match="token ids must be whole numbers"):
            ask(**{name: wrong})
    for wrong in (*no_ids, None, 5, [1], "abc", b"abc"):
        with pytest.raises(ParameterError) as caught:
            ask(**{name: wrong})
        assert caught.value.param == name


def test_the_largest_id_is_that_of_prompt_and_output() -> None:
    assert ask(prompt=(3, 7, 2), output=(1,)).largest == 7
    assert ask(prompt=(3,), output=(9, 1)).largest == 9
    assert ask(prompt=()).largest == -1


def test_one_string_is_one_stop_and_several_stay_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)


def test_numbers_that_are_too_long_are_not_written_out() -> None:
    with pytest.raises(ParameterError, match="a number that large"):
        check_number(10**400, "x", 0, 1)
    with pytest.raises(ParameterError, match=str(2**199)):
        check_number(2**199, "x", 0, 1)
    with pytest.raises(ParameterError, match="not a list"):
        check_number([10**400], "x", 0, 1)
    with pytest.raises(ParameterError, match="whole number, not 'a'"):
        check_number("a", "x", 0, 1, whole=True)


def test_a_value_of_a_wrong_type_is_quoted_if_it_is_plain() -> None:
    for value, quoted in ((True, "True"), (1.5, "1.5"), ("a", "'a'"), ([], "a list")):
        with pytest.raises(ParameterError, match=f"not {quoted}$"):
            check_number(value, "x", 0, 1, whole=True)


def test_a_pooled_request_may_come_to_know_one_token_more_than_it_gets() -> None:
    assert ask(prompt=(1,) * 5, max_tokens=3).most_known(16) == 8
    assert ask(prompt=(1,) * 5, max_tokens=30).most_known(16) == 16
    assert (
        ask(prompt=(1,) * 5, max_tokens=0, prompt_only=PromptOnly("last")).most_known(16)
        == 6
    )
    assert (
        ask(prompt=(1,) * 16, max_tokens=0, prompt_only=PromptOnly("last")).most_known(16)
        == 17
    )


def test_what_a_client_has_given_is_the_prompt_of_its_search() -> None:
    beam = BeamRound(id="s", width=1, prompt=2, most=4)
    assert ask(prompt=(1, 2, 3)).num_prompt_tokens == 3
    assert (
        ask(
            prompt=(1, 2, 3), continuation=Continuation(beam_round=beam)
        ).num_prompt_tokens
        == 2
    )


def test_biases_stop_ids_and_bad_words_have_to_fit_together() -> None:
    biased = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1), min_tokens=1)
    words = ((1, 2), (3,))
    fits: dict[str, Any] = {"sampling": biased, "bad_words": words}
    ask(**fits, stop_ids=frozenset(range(21)))
    with pytest.raises(ParameterError, match="1025 single tokens"):
        ask(**fits, stop_ids=frozenset(range(22)))
    ask(sampling=evolve(biased, min_tokens=0), stop_ids=frozenset(range(99)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 3),
        ("width", "2"),
        ("prompt", -1),
        ("most", 1.5),
        ("beam", True),
        ("how", {}),
    ],
)
def test_a_field_of_a_beam_s_round_is_refused_by_its_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"id": "s", "width": 1, "prompt": 2, "most": 4} | {
        field: value
    }
    with pytest.raises(ParameterError, match=rf"beam_round\.{field}"):
        BeamRound(**fields)
