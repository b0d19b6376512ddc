import json
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minfer.journal.codec import RECORDS, CodecError, dump, load
from minfer.policies.builtin import Ageing
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Finish
from minfer.records.plan import Grow
from minfer.records.request import Request, SamplingParams
from minfer.values.log import Log
from minfer.values.pmap import Map
from tests.circles import seeds
from tests.core.recorded import recorded

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.frozensets(st.integers())
    | st.dictionaries(st.binary(), st.text()).map(Map),
    lambda inner: st.lists(inner, max_size=30).map(tuple),
)


@pytest.mark.long
@given(plain | st.lists(st.integers(), min_size=16, max_size=40).map(tuple))
def test_values_come_back_from_strict_json(value: object) -> None:
    text = json.dumps(dump(value), allow_nan=False)
    assert load(json.loads(text)) == value


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32))
def test_long_tuples_are_packed_whatever_is_in_them(one: int, other: int) -> None:
    value = (one, other) * 10
    assert load(json.loads(json.dumps(dump(value)))) == value
    odd = (True, *value)
    back = load(json.loads(json.dumps(dump(odd))))
    assert back == odd
    assert back[0] is True


@pytest.mark.parametrize("bits", [8, 16, 32, 63])
def test_numbers_at_the_end_of_a_width_come_back(bits: int) -> None:
    for last in (2**bits - 1, 2**bits):
        value = (0, last) * 10
        assert load(json.loads(json.dumps(dump(value)))) == value


@pytest.mark.long
@seeds(5, 20)
def test_states_come_back(seeds: range) -> None:
    for seed in seeds:
        config, turns = recorded(seed, 30)
        assert load(json.loads(json.dumps(dump(config)))) == config
        state = turns[len(turns) // 2].before
        text = json.dumps(dump(state), allow_nan=False)
        again = load(json.loads(text))
        assert again == state
        assert json.dumps(dump(again)) == text


def test_defaults_are_left_out_and_come_back() -> None:
    request = Request(id="a", prompt=(1, 2), max_tokens=3)
    assert dump(request) == {
        "is": "Request",
        "id": "a",
        "prompt": [1, 2],
        "max_tokens": 3,
    }
    assert load(dump(request)) == request
    assert dump(request, without=("prompt",)).keys() == {"is", "id", "max_tokens"}
    assert load(dump(evolved := Ageing(3.0))) == evolved
    assert type(load(dump(Ageing(10))).seconds) is int  # the default is a float
    assert load(dump(SamplingParams(stop=("a",), top_p=0.5))).top_p == 0.5
    assert math.isinf(load(dump(math.inf)))


@pytest.mark.parametrize(
    "value",
    [
        {"is": "Popen", "args": ["rm"]},
        {"odd": 1},
        {"ints": "AAAA", "wide": 3},
        {"is": "Cancel"},
        {"is": "Cancel", "id": "a", "more": 1},
        {"is": 7},
        {},
    ],
)
def test_what_is_no_value_is_refused(value: object) -> None:
    with pytest.raises(CodecError):
        load(value)


WRONG: Any = ([1],)  # no blocks


@pytest.mark.parametrize("value", [object(), [1], {1: 2}, (object(),), Grow(1, 2, WRONG)])
def test_what_has_no_place_is_refused(value: object) -> None:
    with pytest.raises(CodecError, match="cannot be written"):
        dump(value)


def test_only_known_records_are_built() -> None:
    assert load(dump(Cancel("a"))) == Cancel("a")
    with pytest.raises(CodecError, match="no record 'Finish'"):
        load(dump(Finish("a", 0, 1)), {"Cancel": Cancel})
    assert {"EngineState", "Submit", "Plan", "FirstCome"} <= RECORDS.keys()
    assert load(dump(Log((1,), (2,)))) == Log((1, 2))
    assert load(dump(EngineConfig(num_blocks=3))) == EngineConfig(num_blocks=3)


@pytest.mark.parametrize(
    "entries",
    [
        tuple(f"name {number}" for number in range(40)),
        tuple(bytes((number,)) for number in range(40)),
        tuple(7919 * number % 10007 for number in range(40)),
        tuple((f"name {number}", 0) for number in range(40)),
    ],
    ids=["texts", "bytes", "numbers", "tuples"],
)
def test_sets_and_maps_are_written_in_order_whatever_their_hashes(entries: Any) -> None:
    """So equal values have equal bytes, in each process."""
    ordered = [dump(one) for one in sorted(entries)]
    assert dump(frozenset(entries)) == {"set": ordered}
    pairs = [[one, True] for one in ordered]
    assert dump(Map(dict.fromkeys(entries, True))) == {"map": pairs}
