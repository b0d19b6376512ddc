"""Outputs are as was asked, whatever else goes on: the bundled model, on the CPU."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputs
from minfer.effects.live.constraints import grammar_masks
from minfer.records.messages import Preempted
from tests.effects.live.stuck import stick_at_the_end

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 10, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPTS = ["def read(path):\n", "class Stack", "import os\n", "x = "]
EACH = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"[a-z]{3,9}(_[a-z]{2,5}){2,3}"),
    StructuredOutputs(grammar='start: "(" start ")" | /[0-9]{2,4}/ | start "+" start'),
    None,
]


def params(requested: StructuredOutputs | None, **settings: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 40, "seed": 5, **settings}
    return SamplingParams(structured_outputs=requested, **fields)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as engine:
        yield engine


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(completion.token_ids) for completion in output.outputs]
        for output in outputs
    ]


def serve(llm: LLM, **settings: Any) -> list[RequestOutput]:
    return llm.generate(
        PROMPTS,
        [params(constraint, n=2, **settings) for constraint in EACH],
        use_tqdm=False,
    )


def complete(llm: LLM, requested: StructuredOutputs, **settings: Any) -> Any:
    (output,) = llm.generate(PROMPTS[0], params(requested, **settings), use_tqdm=False)
    return output.outputs[0]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[int, ...]]]:
    return tokens(serve(llm))


@pytest.mark.long
def test_what_ends_matches_its_constraint_and_stops(llm: LLM) -> None:
    for seed in range(3):
        completion = complete(
            llm, StructuredOutputs(json=SCHEMA), seed=seed, max_tokens=80
        )
        if completion.finish_reason == "stop":
            parsed = json.loads(completion.text)
            assert {"name", "size"} <= parsed.keys() <= SCHEMA["properties"].keys()  # type: ignore[attr-defined]
            assert len(parsed["name"]) <= 12
            assert 10 <= parsed["size"] <= 999
    completion = complete(llm, StructuredOutputs(choice=["yes", "no"]))
    assert completion.text in ("yes", "no")
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in llm.setup.stop_ids
    assert not len(llm.worker.driver.deferred.masks)  # type: ignore[arg-type]  # which it has


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_in_flight": 1},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"enable_prefix_caching": False},
        {"block_size": 16, "num_gpu_blocks_override": 6, "max_model_len": 96},
    ],
    ids=["depth 1", "chunked", "uncached", "preempted"],
)
def test_neither_depth_nor_chunks_nor_preemption_changes_a_token(
    settings: dict[str, Any], expected: list[list[tuple[int, ...]]]
) -> None:
    with LLM(**{**SETTINGS, **settings}) as changed:
        reasons = list[Any]()
        driver = changed.worker.driver
        turn = driver.turn

        def noting(before: Any = None) -> Any:
            turned = turn(before)
            reasons.extend(turned.reasons)
            return turned

        driver.turn = noting  # type: ignore[method-assign]  # to see what it decided
        assert tokens(serve(changed)) == expected
        assert tokens(serve(changed)) == expected  # with all prompts cached, if they are
        if "block_size" in settings:
            assert any(isinstance(reason, Preempted) for reason in reasons)


@pytest.mark.long
def test_a_stop_string_ends_an_output_within_its_grammar(llm: LLM) -> None:
    constraint = StructuredOutputs(regex="aaaa;bbbb;cccc")
    completion = complete(llm, constraint, stop=[";bb"])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "aaaa",
        "stop",
        ";bb",
    )


@pytest.mark.long
def test_an_output_whose_end_is_ignored_is_as_long_as_its_grammar_lets_it(
    llm: LLM,
) -> None:
    constraint = StructuredOutputs(regex="a{1,9}")
    completion = complete(llm, constraint, ignore_eos=True)
    assert (completion.text, completion.finish_reason) == ("a" * 9, "stop")
    assert llm.setup.stop_ids.isdisjoint(completion.token_ids)


@pytest.mark.long
def test_an_output_that_is_cut_is_a_beginning(llm: LLM) -> None:
    completion = complete(llm, StructuredOutputs(regex="(abc){9,}"), max_tokens=5)
    assert completion.finish_reason == "length"
    assert ("abc" * 20).startswith(completion.text)


@pytest.mark.long
def test_a_greedy_row_takes_the_likeliest_that_is_allowed(llm: LLM) -> None:
    completion = complete(
        llm, StructuredOutputs(regex="[01]{8}"), temperature=0, logprobs=2
    )
    assert len(completion.text) == 8
    assert set(completion.text) <= {"0", "1"}
    assert len(completion.logprobs) == len(completion.token_ids)


def test_what_cannot_be_compiled_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed group") as caught:
        complete(llm, StructuredOutputs(regex="("))
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.long
def test_a_grammar_that_turns_out_too_much_work_ends_its_own_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = StructuredOutputs(regex="a{3,9}x?")
    llm.grammars.get(constraint)
    stick_at_the_end(monkeypatch)
    params_list = [
        params(constraint, temperature=0),
        params(None, temperature=0, max_tokens=9),
    ]
    ended, plain = (
        out.outputs[0] for out in llm.generate(PROMPTS[:2], params_list, use_tqdm=False)
    )
    assert ended.finish_reason == "error"
    assert ended.error == f"{grammar_masks.STUCK_ERROR}: took too long"
    assert ended.text.startswith("aaa")
    monkeypatch.undo()
    solo = llm.generate(PROMPTS[1], params_list[1], use_tqdm=False)[0].outputs[0]
    assert plain.token_ids == solo.token_ids


@pytest.mark.long
@pytest.mark.parametrize("executor", ["dry", "oracle"])
def test_executors_that_compute_nothing_keep_to_it_too(executor: str) -> None:
    with LLM(executor=executor) as bare:
        completion = complete(
            bare, StructuredOutputs(choice=["yes", "no"]), temperature=0
        )
        assert completion.text in ("yes", "no")
        assert completion.finish_reason == "stop"


REPLAY = """
import sys
for name in ("llguidance", "torch", "tokenizers"):
    sys.modules[name] = None
from minfer.__main__ import main
sys.exit(main(["replay", sys.argv[1]]))
"""


@pytest.mark.long
def test_a_journal_replays_without_library_model_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for redact in (False, True):
        folder = tmp_path / str(redact)
        with LLM(journal=folder, journal_redact=redact, **SETTINGS) as recorded:
            serve(recorded)
            with monkeypatch.context() as patched:
                stick_at_the_end(patched)
                completion = complete(recorded, StructuredOutputs(choice=["yes", "no"]))
                assert completion.finish_reason == "error"
        replayed = subprocess.run(
            [sys.executable, "-c", REPLAY, str(folder)], capture_output=True, text=True
        )
        assert replayed.returncode == 0, replayed.stderr
        assert b"took too long" not in b"".join(
            file.read_bytes() for file in folder.iterdir() if redact
        )
