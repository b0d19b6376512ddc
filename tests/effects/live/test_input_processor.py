"""Requests as the engine takes them: everything is decided, or refused and why."""

import math
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.effects.live.input_processing.input_processor import (
    RequestError,
    RequestInput,
    SchedulingHints,
    TokenizedPrompt,
    TooLongError,
    make_request,
    params_for,
    scheduling_hints_for,
)
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import Setup, prepare
from minfer.records.request import Request, SamplingParams
from tests.effects.tiny_model import write_checkpoint


@pytest.fixture(scope="module")
def setup(folder: str) -> Setup:
    return prepare(
        EngineArgs(
            model=folder,
            executor="oracle",
            max_model_len=64,
            num_gpu_blocks_override=8,
            block_size=8,
        )
    )


def request_of(setup: Setup, ids: int = 20, count: int = 0, **options: Any) -> Request:
    fields = {name: options.pop(name) for name in ("name", "resets") if name in options}
    salt = options.pop("salt", b"")
    requested = TokenizedPrompt(None, [5] * ids, salt)
    inputs = RequestInput(setup=setup, prompt=requested, count=count, **fields)
    return make_request(inputs, SamplingParams(**options))


def test_a_request_names_itself_by_its_number(setup: Setup) -> None:
    assert request_of(setup, count=7).id == "7"
    assert request_of(setup, count=7, name="mine").id == "mine"


def test_seeds_follow_from_the_engines_and_the_number(setup: Setup) -> None:
    seeds = [request_of(setup, count=i).seed for i in range(50)]
    assert len(set(seeds)) == 50
    assert seeds == [request_of(setup, count=i).seed for i in range(50)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    other_setup = evolve(setup, args=evolve(setup.args, seed=1))
    assert request_of(other_setup).seed != seeds[0]
    assert request_of(setup, seed=-3).seed == -3


def test_output_takes_what_was_requested_or_the_room_there_is(setup: Setup) -> None:
    assert request_of(setup, max_tokens=9).max_tokens == 9
    assert request_of(setup, max_tokens=None).max_tokens == 44
    assert request_of(setup, max_tokens=1000).max_tokens == 44
    small = evolve(setup, config=evolve(setup.config, num_blocks=4))
    assert (
        request_of(small, max_tokens=None).max_tokens == 13
    )  # the last token needs no slot


def test_ends_are_the_models_and_the_callers(setup: Setup) -> None:
    stop_ids = setup.stop_ids
    assert stop_ids
    assert request_of(setup, stop_token_ids=[9]).stop_ids == stop_ids | {9}
    assert request_of(setup, stop_token_ids=[9], ignore_eos=True).stop_ids == {9}


def test_prompts_share_what_is_cached_by_default(setup: Setup) -> None:
    first, second = request_of(setup, count=1), request_of(setup, count=2)
    assert first.root == second.root
    assert first.keys == second.keys == block_keys(first.root, (5,) * 20, 8)
    assert len(first.keys) == 2
    roots = [first.root]
    roots += [request_of(setup, salt=salt).root for salt in (b"a", b"b")]
    roots += [request_of(setup, resets=resets).root for resets in (1, 2)]
    roots += [request_of(setup, salt=b"a", resets=1).root]
    separate = evolve(setup, args=evolve(setup.args, enable_prefix_caching=False))
    roots += [request_of(separate, count=count).root for count in (1, 2)]
    assert len(set(roots)) == len(roots)


def test_urgency_travels(setup: Setup) -> None:
    urgency = SchedulingHints(priority=3, client="me", deadline=2)
    prompt = TokenizedPrompt(None, [1])
    inputs = RequestInput(setup=setup, prompt=prompt, count=0, urgency=urgency)
    request = make_request(inputs, SamplingParams())
    assert (request.priority, request.client, request.deadline) == (3, "me", 2.0)


@pytest.mark.parametrize(
    ("ids", "options", "kind", "says"),
    [
        (
            64,
            {},
            TooLongError,
            "the prompt has 64 tokens; this model's maximum context length is 64 tokens",
        ),
        (64, {}, TooLongError, r"or raise max_model_len \(this model can do 256\)"),
        (1, {"stop_token_ids": [260]}, RequestError, "260 is outside the vocabulary"),
        (1, {"logprobs": 1}, RequestError, "the oracle executor has no model"),
    ],
)
def test_what_can_never_run_is_refused(
    setup: Setup, ids: int, options: Any, kind: type[RequestError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        request_of(setup, ids, **options)


def test_what_the_cache_cannot_hold_is_refused(setup: Setup) -> None:
    small = evolve(setup, config=evolve(setup.config, num_blocks=3))
    with pytest.raises(TooLongError, match=r"need 4 KV blocks of 8 tokens; .* has 3"):
        request_of(small, max_tokens=9)


def test_the_engine_has_the_last_word(setup: Setup) -> None:
    full = evolve(setup, config=evolve(setup.config, max_waiting=1))
    with pytest.raises(RequestError, match="the waiting line is full"):
        request_of(full, n=2)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("priority", 1.5, "priority must be a whole number"),
        ("priority", 2**53, "priority must be a whole number"),
        ("priority", True, "priority must be a whole number"),
        ("client", 5, "client must be a string"),
        ("client", "x" * 513, "up to 512 characters"),
        ("deadline", 0, "deadline must be a number above 0"),
        ("deadline", math.nan, "deadline must be a number above 0"),
        ("deadline", True, "deadline must be a number above 0"),
    ],
)
def test_urgencies_out_of_range(field: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SchedulingHints(**{field: value})


def test_parameters_are_one_for_all_or_one_for_each() -> None:
    first, second = SamplingParams(), SamplingParams(n=2)
    assert params_for(first, 3) == [first] * 3
    assert params_for([first, second], 2) == [first, second]
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        params_for([first, second], 3)
    with pytest.raises(RequestError, match=r"sampling_params\[1\]") as caught:
        params_for([first, 5], 2)  # type: ignore[list-item]  # the point
    assert caught.value.index == 1


def test_priorities_are_one_for_each() -> None:
    assert scheduling_hints_for(None, 2) == [SchedulingHints()] * 2
    assert scheduling_hints_for([3, -1], 2) == [
        SchedulingHints(priority=3),
        SchedulingHints(priority=-1),
    ]
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        scheduling_hints_for([1], 2)
    with pytest.raises(RequestError, match=r"priority\[1\] must be") as caught:
        scheduling_hints_for([1, 0.5], 2)  # type: ignore[list-item]  # the point
    assert caught.value.index == 1


def test_a_folder_is_all_it_takes(tmp_path: Path) -> None:
    """Weights and tokenizer are not needed to make requests."""
    folder = write_checkpoint(tmp_path / "bare", tokenizer=False)
    bare = prepare(EngineArgs(model=str(folder), executor="dry"))
    assert request_of(bare).max_tokens == 16
