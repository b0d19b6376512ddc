"""The library: what goes in, what comes out, and that nothing a caller does harms the
others.
"""

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import pytest

import minfer
from minfer import LLM, AsyncLLM, ConfigError, ParameterError, SamplingParams
from minfer.effects.live import llm as llm_module
from minfer.effects.live.engine import open_engine as opening
from minfer.effects.live.errors import EngineDeadError, RequestError, TooLongError
from minfer.effects.live.input_processing.prompts import Prompt
from minfer.effects.setup.memory import NotEnoughMemoryError
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.effects.text.outputs import RequestOutput
from minfer.records.messages import Executed, Failed
from minfer.records.plan import Plan
from minfer.simulation.oracle import Oracle
from tests.effects.tiny_model import EOS, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as engine:
        yield engine


def ids(output: RequestOutput, sample: int = 0) -> tuple[int, ...]:
    return tuple(output.outputs[sample].token_ids)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


# --- what goes in -----------------------------------------------------------------------


@pytest.mark.long
def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode("hello")
    prompts: list[Any] = [
        "hello",
        ["hello"],
        tokens,
        [tokens],
        tuple(tokens),
        {"prompt": "hello"},
        {"prompt_token_ids": tokens},
        [{"prompt_token_ids": tokens}],
    ]
    outputs = [llm.generate(prompt, GREEDY) for prompt in prompts]
    assert {len(output) for output in outputs} == {1}
    assert len({ids(output[0]) for output in outputs}) == 1
    assert outputs[0][0].prompt == outputs[5][0].prompt == "hello"
    assert outputs[2][0].prompt is None
    assert {output[0].prompt_ids for output in outputs} == {tuple(tokens)}


def test_numpy_ids_are_token_ids(llm: LLM) -> None:
    numpy = pytest.importorskip("numpy")
    outputs = llm.generate({"prompt_token_ids": numpy.array([1, 2, 3])}, GREEDY)
    assert ids(outputs[0]) == ids(llm.generate([1, 2, 3], GREEDY)[0])


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []


@pytest.mark.long
def test_outputs_come_in_the_order_of_prompts_each_with_its_parameters(llm: LLM) -> None:
    prompts = [[i + 1] * (1 + 5 * (i % 4)) for i in range(20)]
    params = [
        SamplingParams(temperature=0, max_tokens=20 - i, ignore_eos=True)
        for i in range(20)
    ]
    outputs = llm.generate(prompts, params)
    assert [list(o.prompt_token_ids) for o in outputs] == prompts
    assert [len(ids(o)) for o in outputs] == [20 - i for i in range(20)]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    solo = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    assert [ids(o) for o in outputs] == [ids(o) for o in solo]


def test_parameters_default_to_sixteen_tokens(llm: LLM) -> None:
    assert len(ids(llm.generate([7, 8, 9])[0])) <= 16
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    assert len(ids(llm.generate([7, 8, 9], greedy)[0])) == 16


def test_without_max_tokens_a_request_takes_what_the_context_holds(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert len(ids(llm.generate([[5] * 200], params)[0])) == 56


def test_without_max_tokens_a_request_takes_what_the_cache_holds(folder: str) -> None:
    settings = SETTINGS | {"num_gpu_blocks_override": 4, "max_model_len": 33}
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with LLM(folder, **settings) as small:
        assert len(ids(small.generate([5] * 20, params)[0])) == 13


def test_a_progress_bar_of_ones_own(llm: LLM) -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            calls.append((total, desc))

        def update(self) -> None:
            calls.append("update")

        def close(self) -> None:
            calls.append("close")

    llm.generate([[1], [2]], GREEDY, use_tqdm=Bar)
    assert calls == [(2, "Processed prompts"), "update", "update", "close"]


def test_the_progress_bar_needs_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate([[1], [2]], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate([[1], [2]], GREEDY)
    assert "Processed prompts" in capsys.readouterr().err


# --- what comes out ---------------------------------------------------------------------


def test_metrics_are_in_order_and_the_cache_is_reported(folder: str) -> None:
    with LLM(folder, **SETTINGS) as fresh:
        first = fresh.generate([[3] * 30], GREEDY)[0]
        second = fresh.generate([[3] * 30], GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
    assert ids(first) == ids(second)
    times = first.metrics
    assert times.first_token_time is not None
    assert times.last_token_time is not None
    assert times.arrival_time <= times.first_token_time <= times.last_token_time
    assert times.output_tokens == 12
    assert times.ttft is not None
    assert times.latency is not None
    assert times.tpot is not None
    assert times.latency == pytest.approx(times.ttft + 11 * times.tpot)


def test_what_samples_share_in_the_cache_counts_once(folder: str) -> None:
    with LLM(folder, **SETTINGS) as fresh:
        fresh.generate([[3] * 30], GREEDY)
        [output] = fresh.generate([[3] * 30], attrs.evolve(GREEDY, temperature=1.0, n=3))
    assert len(output.outputs) == 3
    assert output.num_cached_tokens == 24


def test_prefixes_are_not_shared_without_caching_nor_across_salts(folder: str) -> None:
    with LLM(folder, enable_prefix_caching=False, **SETTINGS) as separate:
        outputs = [separate.generate([[3] * 30], GREEDY)[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0]
    with LLM(folder, **SETTINGS) as shared:
        salted = [
            shared.generate({"prompt_token_ids": [3] * 30, "cache_salt": salt}, GREEDY)[0]
            for salt in ("a", "b", "a")
        ]
    assert [o.num_cached_tokens for o in salted] == [0, 0, 24]
    assert len({ids(o) for o in outputs + salted}) == 1


@pytest.mark.long
def test_samples_of_a_request_differ_and_are_reproducible(folder: str) -> None:
    params = SamplingParams(n=3, max_tokens=10, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        with LLM(folder, seed=seed, **SETTINGS) as engine:
            runs.append([texts(engine.generate("abc", params)) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(runs[0][0] + runs[0][1])) == 6
    assert [len(sample) for sample in runs[0]] == [3, 3]


def test_a_seed_of_its_own_makes_a_request_independent_of_all_else(llm: LLM) -> None:
    params = SamplingParams(seed=-5, max_tokens=10, ignore_eos=True)
    solo = llm.generate("abc", params)[0]
    crowd = llm.generate(["x", "abc", "yy"], params)[1]
    assert ids(solo) == ids(crowd)


def test_the_end_of_sequence_ends_and_is_not_text(folder: str, tmp_path: Path) -> None:
    with LLM(folder, **SETTINGS) as plain:
        tokens = ids(plain.generate([9, 9, 9], GREEDY)[0])
    end = tokens[3]
    ending = write_checkpoint(tmp_path / "ending", eos_token_id=[end, EOS])
    with LLM(str(ending), **SETTINGS) as llm:
        completion = llm.generate(
            [9, 9, 9], SamplingParams(temperature=0, max_tokens=12)
        )[0].outputs[0]
        assert tuple(completion.token_ids) == tokens[: tokens.index(end) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert llm.tokenizer is not None
        assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


def test_stop_token_ids_say_which(llm: LLM) -> None:
    tokens = ids(llm.generate([9, 9, 9], GREEDY)[0])
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[5],)
    )
    for output in (
        llm.generate([9, 9, 9], params)[0],
        *list(llm.stream([9, 9, 9], params))[-1:],
    ):
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason == tokens[5]
        assert output.outputs[0].token_ids[-1] == tokens[5]


def printable(llm: LLM) -> tuple[str, SamplingParams]:
    """A seed whose text has a long run of plain characters, to take stop strings from."""
    for seed in range(50):
        params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True)
        text = llm.generate("abc", params)[0].outputs[0].text
        if "�" not in text[:2] and len(set(text)) > 10:
            return text, params
    raise AssertionError("no seed gives such a text")


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_cuts_the_text_wherever_it_falls(folder: str, depth: int) -> None:
    with LLM(folder, **SETTINGS | {"steps_in_flight": depth}) as llm:
        text, params = printable(llm)
        full_ids = ids(llm.generate("abc", params)[0])
        for start, size in ((0, 1), (4, 2), (20, 3), (len(text) - 1, 1)):
            stop = text[start : start + size]
            cut = SamplingParams(
                seed=params.seed,
                max_tokens=60,
                ignore_eos=True,
                stop=[stop, "never found"],
            )
            completion = llm.generate("abc", cut)[0].outputs[0]
            assert completion.text == text[: text.index(stop)]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert completion.token_ids == [*full_ids][: len(completion.token_ids)]
            keep = attrs.evolve(cut, include_stop_str_in_output=True)
            with_stop = llm.generate("abc", keep)[0].outputs[0]
            assert (with_stop.text, with_stop.stop_reason) == (
                completion.text + stop,
                stop,
            )
            streamed = [p.outputs[0].text for p in llm.stream("abc", keep)]
            assert "".join(streamed) == with_stop.text
            pieces = list(llm.stream("abc", cut))
            assert "".join(p.outputs[0].text for p in pieces) == completion.text
            assert [
                token for p in pieces for token in p.outputs[0].token_ids
            ] == completion.token_ids
    assert not llm.frontend.processors


@pytest.mark.long
def test_text_that_only_begins_a_stop_string_is_not_lost(llm: LLM) -> None:
    text, params = printable(llm)
    stop = text[-1] + "and more"
    stopping = SamplingParams(seed=params.seed, max_tokens=60, ignore_eos=True, stop=stop)
    completion = llm.generate("abc", stopping)[0].outputs[0]
    assert completion.text == text
    assert completion.finish_reason == "length"


def test_streamed_pieces_join_to_what_generate_gives(llm: LLM) -> None:
    prompts: list[Prompt] = ["abc", [1, 2, 3], "x" * 40]
    params = SamplingParams(n=2, seed=3, max_tokens=25, ignore_eos=True)
    joined: dict[tuple[tuple[int, ...], int], tuple[str, tuple[int, ...]]] = {}
    last: dict[tuple[int, ...], RequestOutput] = {}
    for output in llm.stream(prompts, params):
        for completion in output.outputs:
            key = (output.prompt_ids, completion.index)
            text, tokens = joined.get(key, ("", ()))
            joined[key] = (text + completion.text, (*tokens, *completion.token_ids))
        last[output.prompt_ids] = output
    assert all(output.finished for output in last.values())
    for output in llm.generate(prompts, params):
        for completion in output.outputs:
            assert joined[output.prompt_ids, completion.index] == (
                completion.text,
                tuple(completion.token_ids),
            )


def test_leaving_a_stream_early_cancels_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stream = llm.stream(["abc", "def"], params)
    next(stream)
    stream.close()
    assert not llm.frontend.processors
    assert len(ids(llm.generate("abc", GREEDY)[0])) == 12


def test_a_stream_that_is_not_read_runs_nothing(llm: LLM) -> None:
    llm.stream("abc", GREEDY)
    assert not llm.frontend.processors


# --- conversations and the makers' advice -----------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TALK = [{"role": "user", "content": "hi"}]
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if tools %}[{{ tools[0].name }}]{% endif %}{% if mood %}({{ mood }}){% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def talker(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("talker")
    for file in Path(folder).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    advice = (
        '{"temperature": 0.5, "top_k": 7, "top_p": null, '
        '"do_sample": true, "eos_token_id": 9}'
    )
    (path / "generation_config.json").write_text(advice)
    with LLM(str(path), **SETTINGS) as engine:
        yield engine


def test_a_conversation_is_a_prompt(talker: LLM) -> None:
    output = talker.chat(TALK, GREEDY)[0]
    assert output.prompt == "<user>hi<assistant>"
    assert ids(output) == ids(talker.generate("<user>hi<assistant>", GREEDY)[0])
    pieces = list(talker.stream_chat(TALK, GREEDY))
    assert "".join(o.outputs[0].text for o in pieces) == output.outputs[0].text
    assert talker.render(TALK) == list(output.prompt_ids)


def test_conversations_come_back_in_order_each_with_its_parameters(talker: LLM) -> None:
    talks = [[{"role": "user", "content": "x" * i}] for i in range(5)]
    params = [SamplingParams(max_tokens=1 + i, ignore_eos=True) for i in range(5)]
    outputs = talker.chat(talks, params)
    assert [o.prompt for o in outputs] == [
        f"<user>{'x' * i}<assistant>" for i in range(5)
    ]
    assert [len(ids(o)) for o in outputs] == [1, 2, 3, 4, 5]


def test_options_of_the_template(talker: LLM) -> None:
    assert talker.tokenizer is not None
    for options, text in (
        ({"tools": [{"name": "saw"}]}, "<user>hi[saw]<assistant>"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "<user>hi(glad)<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>hi"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>hi"),
    ):
        assert talker.tokenizer.decode(talker.render(TALK, **options)) == text


def test_an_answer_without_parameters_takes_the_room_there_is(talker: LLM) -> None:
    completion = talker.chat([{"role": "user", "content": "y" * 190}])[0].outputs[0]
    assert len(completion.token_ids) > 16 or completion.finish_reason == "stop"
    job = talker._make_chat_batch(TALK, None, {}).processors[0].request
    assert job.max_tokens == 256 - len("<user>hi<assistant>")
    assert job.sampling == SamplingParams(temperature=0.5, top_k=7, max_tokens=None)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "there are no messages"),
        ([[], TALK], {}, "there are no messages"),
        ("hi", {}, "messages must be a list of messages, not a str"),
        ({"role": "user"}, {}, "messages must be a list of messages, not a dict"),
        (5, {}, "messages must be a list of messages, not a int"),
        ([*TALK, "hi"], {}, r"messages\[\d\]: must be an object"),
        (["hi"], {}, r"messages\[0\]: must be an object"),
        ([{"role": "user"}], {}, r"messages\[0\].content: is missing"),
        ([{"role": "usr", "content": "x"}], {}, r"messages\[0\].role: \"usr\" is not"),
        ([{"role": "user", "content": [IMAGE]}], {}, '"image_url" is not supported'),
        (TALK, {"continue_final_message": True}, "exclude each other"),
        (TALK, {"chat_template_kwargs": {"messages": []}}, "cannot set 'messages'"),
    ],
)
def test_conversations_that_make_no_sense(
    talker: LLM, messages: Any, options: Any, message: str
) -> None:
    for ask in (talker.chat, talker.stream_chat):
        with pytest.raises(ChatTemplateError, match=message):
            ask(messages, GREEDY, **options)
    assert not talker.frontend.processors


def test_a_conversation_that_is_too_long_or_not_text(talker: LLM) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(
        RequestError, match=r"prompts\[1\]: the prompt has 317 tokens"
    ) as caught:
        talker.chat([TALK, long], GREEDY)
    assert caught.value.index == 1
    with pytest.raises(RequestError, match="lone surrogate"):
        talker.chat([{"role": "user", "content": "\ud800"}], GREEDY)


def test_chat_needs_a_template_and_a_tokenizer(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="this model has no chat template"):
        llm.chat(TALK)
    bare = str(write_checkpoint(tmp_path / "bare", tokenizer=False))
    mute = LLM(bare, skip_tokenizer_init=True, executor="dry", **SETTINGS)
    with mute, pytest.raises(ChatTemplateError, match="needs the tokenizer"):
        mute.chat(TALK)


def test_the_makers_advice_is_the_default(talker: LLM, llm: LLM) -> None:
    assert talker.get_default_sampling_params() == SamplingParams(
        temperature=0.5, top_k=7
    )
    assert llm.get_default_sampling_params() == SamplingParams()
    requested = talker.setup.default_sampling_params(top_k=3, n=2)
    assert requested == SamplingParams(temperature=0.5, top_k=3, n=2)
    silent = talker._make_checked_batch(["a", "b"], None, None).processors
    assert [job.request.sampling.top_k for job in silent] == [7, 7]
    with pytest.raises(ParameterError, match="top_p"):
        talker.setup.default_sampling_params(top_p=2)


# --- bad input --------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "the prompt is empty; give at least one token"),
    ([[]], "the prompt is empty"),
    (
        [1, 2, 260],
        "token id 260 at position 2 is outside the vocabulary; ids are from 0 to 259",
    ),
    ([-1], "token id -1 at position 0 is outside the vocabulary"),
    ([[1.5]], "token ids must be whole numbers, not 1.5"),
    ([[True]], "token ids must be whole numbers, not True"),
    ([[float("nan")]], "token ids must be whole numbers, not nan"),
    ([1] * 256, "the prompt has 256 tokens; this model's maximum context length is 256"),
    ("a" * 1000, "shorten the prompt"),
    ("bad \ud800", "lone surrogate"),
    (5, "prompts must be a string, token ids, or a list"),
    ([None], "a prompt must be a string or token ids, not a NoneType"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "needs one of the fields"),
    ({}, "needs one of the fields"),
    ({"text": "a"}, "no field 'text'"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a string"),
]


@pytest.mark.parametrize(
    ("prompt", "message"), BAD_PROMPTS, ids=[m for _, m in BAD_PROMPTS]
)
def test_a_bad_prompt_is_named_and_the_llm_goes_on(
    llm: LLM, prompt: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt, GREEDY)
    assert len(ids(llm.generate("fine", GREEDY)[0])) == 12


def test_a_bad_prompt_among_good_ones_is_named_before_anything_runs(llm: LLM) -> None:
    count, turns = llm.count, llm.worker.driver.state.next_step
    with pytest.raises(RequestError, match=r"prompts\[2\]: token id 999 ") as caught:
        llm.generate([[1], [2], [999], [4]], GREEDY)
    assert caught.value.index == 2
    assert (llm.count, llm.worker.driver.state.next_step) == (count, turns)


def test_a_prompt_that_the_cache_cannot_hold(folder: str) -> None:
    settings = SETTINGS | {"num_gpu_blocks_override": 5, "max_model_len": 41}
    with LLM(folder, **settings) as small:
        with pytest.raises(
            TooLongError, match="shorten the prompt, or raise max_model_len"
        ):
            small.generate([[1] * 41], GREEDY)
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        assert len(ids(small.generate([[1] * 40], greedy)[0])) == 1


def test_output_that_the_cache_cannot_hold(folder: str) -> None:
    # The engine refuses a context that the cache cannot hold, so shrink the cache behind
    # its back.
    with LLM(folder, **SETTINGS) as llm:
        llm.setup = attrs.evolve(
            llm.setup, config=attrs.evolve(llm.setup.config, num_blocks=3)
        )
        with pytest.raises(
            RequestError, match="need 6 KV blocks of 8 tokens; the cache has 3"
        ):
            llm.generate([1] * 20, SamplingParams(max_tokens=24))
        unlimited = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
        assert len(ids(llm.generate([1] * 20, unlimited)[0])) == 5


def test_the_best_samples_cannot_be_streamed(llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=3, max_tokens=2)
    with pytest.raises(RequestError, match="best_of: the best samples") as caught:
        llm.stream("x", params)
    assert caught.value.param == "best_of"
    (output,) = llm.generate("x", params)
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.metrics.output_tokens > sum(len(o.token_ids) for o in output.outputs)


def test_parameters_of_the_wrong_kind_or_number(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(
        RequestError, match=r"sampling_params\[1\] must be SamplingParams"
    ):
        llm.generate(["a", "b"], [GREEDY, {"n": 1}])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="must be SamplingParams, not a int"):
        llm.generate("a", 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(RequestError, match=r"priority\[1\] must be a whole number"):
        llm.generate(["a", "b"], GREEDY, priority=[1, float("nan")])  # type: ignore[list-item]
    with pytest.raises(
        RequestError, match="stop_token_ids: 260 is outside the vocabulary"
    ):
        llm.generate("a", SamplingParams(stop_token_ids=(260,)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float64"),
        ("load_format", "pickle"),
        ("max_model_len", 1),
        ("block_size", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 1.5),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_memory_bytes", 0),
        ("num_gpu_blocks_override", True),
        ("seed", "x"),
        ("scheduling_policy", "lottery"),
        ("steps_in_flight", 0),
        ("executor", "gpu"),
        ("model", 5),
        ("max_model_len", 10**6),
    ],
)
def test_settings_out_of_range_are_named(folder: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        LLM(**({"model": folder} | SETTINGS | {name: value}))


def test_a_setting_that_was_removed_is_refused_by_name(folder: str) -> None:
    with pytest.raises(TypeError, match="max_repeat was removed: a step computes one"):
        LLM(folder, max_repeat=4)  # type: ignore[call-arg]  # the point


def test_a_budget_below_the_rows_is_a_contradiction(folder: str) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(folder, **(SETTINGS | {"max_num_batched_tokens": 2}))


def test_a_model_that_does_not_fit(folder: str) -> None:
    with pytest.raises(NotEnoughMemoryError, match="--max-model-len 25"):
        LLM(folder, **(SETTINGS | {"num_gpu_blocks_override": 3}))


# --- executors, failures, interrupts, shutdown ------------------------------------------


@pytest.mark.parametrize("executor", ["dry", "oracle"])
def test_executors_without_weights(folder: str, tmp_path: Path, executor: str) -> None:
    config = Path(folder, "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer.json").write_text(Path(folder, "tokenizer.json").read_text())
    with LLM(str(tmp_path), executor=executor, **SETTINGS) as llm:
        completion = llm.generate("abc", SamplingParams(max_tokens=20, temperature=0))[
            0
        ].outputs[0]
    assert completion.token_ids
    if executor == "dry":
        assert completion.text == " This text was not w"


def test_without_a_tokenizer_there_are_token_ids_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bare", tokenizer=False)
    settings = SETTINGS | {"skip_tokenizer_init": True}
    for executor in ("torch", "dry"):
        with LLM(str(folder), executor=executor, **settings) as llm:
            output = llm.generate([1, 2, 3], GREEDY)[0]
            assert len(ids(output)) == 12
            assert output.outputs[0].text == ""
            pieces = [o.outputs[0].token_ids for o in llm.stream([1, 2, 3], GREEDY)]
            assert tuple(chain.from_iterable(pieces)) == ids(output)
            with pytest.raises(RequestError, match="text prompt needs a tokenizer"):
                llm.generate("abc")


def test_random_weights_need_no_weight_files(folder: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text(Path(folder, name).read_text())
    with LLM(str(tmp_path), load_format="dummy", dtype="half", **SETTINGS) as llm:
        assert len(ids(llm.generate("abc", GREEDY)[0])) == 12
        assert llm.setup.spec.dtype == "float16"


def test_priority_goes_first(folder: str) -> None:
    settings = SETTINGS | {"max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(folder, executor="oracle", **settings) as llm:
        outputs = llm.generate([[1], [2], [3]], GREEDY, priority=[2, 1, 0])
        ends = [o.metrics.last_token_time or 0 for o in outputs]
    assert ends == sorted(ends, reverse=True)


class Flaky(Oracle):
    """Fails every step that a poisoned request (its first token is 13) takes part in."""

    def __init__(self, block_size: int, vocab: int) -> None:
        super().__init__(block_size, vocab)
        self.poisoned: set[int] = set()  # generations

    def launch(self, plan: Plan) -> None:
        bad = (opened.index for opened in plan.opens if opened.known[0] == 13)
        self.poisoned.update(plan.run_ids[index] for index in bad)
        super().launch(plan)

    def collect(self) -> Executed | Failed:
        if self.poisoned.isdisjoint(self.plans[0].run_ids):
            return super().collect()
        return self.fail("device error", halfway=False)


def test_a_request_whose_steps_fail_ends_with_an_error_and_the_others_go_on(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "open_executor", lambda *_: Flaky(8, 260))
    with LLM(folder, **SETTINGS) as llm:
        outputs = llm.generate([[1], [13], [3]], GREEDY)
        assert [o.outputs[0].finish_reason for o in outputs] == [
            "length",
            "error",
            "length",
        ]
        assert "device error" in outputs[1].outputs[0].error
        assert outputs[1].finished


def test_an_interrupt_cancels_and_leaves_the_llm_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [ids(o) for o in llm.generate([[1], [2]], GREEDY)]
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def interrupted(_: object) -> RequestOutput:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm_module, "_take_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8]], endless)
    assert not llm.frontend.processors
    assert [ids(o) for o in llm.generate([[1], [2]], GREEDY)] == expected


@pytest.mark.long
def test_threads_share_the_engine(llm: LLM) -> None:
    expected = {i: ids(llm.generate([i + 1, 2], GREEDY)[0]) for i in range(6)}
    results: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        for _ in range(5):
            results[i] = ids(llm.generate([i + 1, 2], GREEDY)[0])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_closing_is_idempotent_and_leaves_no_thread(folder: str) -> None:
    before = set(threading.enumerate())
    llm = LLM(folder, **SETTINGS)
    stream = llm.stream(
        "abc", SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    )
    next(stream)
    llm.close()
    llm.close()
    assert before.issuperset(threading.enumerate())
    assert list(stream)[-1].outputs[0].finish_reason == "cancelled"
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("abc")


def test_the_package_offers_it_lazily() -> None:
    assert (minfer.LLM, minfer.AsyncLLM) == (LLM, AsyncLLM)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        minfer.LLMM  # noqa: B018 - the access is the test


def test_what_chat_does_not_know_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="add_generation_promt"):
        # The point.
        llm.chat([{"role": "user", "content": "x"}], add_generation_promt=False)  # type: ignore[call-arg]


def test_a_cache_that_cannot_be_had(folder: str) -> None:
    with pytest.raises(ConfigError, match="smaller KV cache"):
        LLM(folder, kv_cache_memory_bytes=2**56)
