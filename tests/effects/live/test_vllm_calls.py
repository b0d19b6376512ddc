"""Programs written for vLLM call methods with its names and arguments."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minfer
from minfer import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    LoRARequest,
    ParameterError,
    PoolingParams,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from minfer.effects.live.absent_features import METHODS
from minfer.effects.live.engine_metrics import Counter, Gauge, Histogram, Vector
from minfer.sampling.vllm_names import BEAMS
from tests.effects.setup.vllm_usage import KEYWORD_SETS
from tests.effects.tiny_model import write_checkpoint

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TALK = [{"role": "user", "content": "hi"}]
CALLS: dict[str, tuple[Any, ...]] = {
    "generate": ("abc", GREEDY),
    "chat": (TALK, GREEDY),
    "embed": ("abc",),
    "encode": ("abc",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, device="cpu", num_gpu_blocks_override=20, block_size=16) as llm:
        yield llm


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        (name, keywords)
        for name, keywords, outcome in KEYWORD_SETS
        if name in CALLS and outcome != "refused"
    ],
)
def test_methods_take_what_vllm_users_pass(
    llm: LLM, method: str, keywords: dict[str, Any]
) -> None:
    (output,) = getattr(llm, method)(*CALLS[method], **keywords)
    assert output.finished


@pytest.mark.parametrize(
    ("keywords", "outcome"),
    [(words, outcome) for name, words, outcome in KEYWORD_SETS if name[0] == "S"],
)
def test_parameters_take_what_vllm_users_pass(
    llm: LLM, keywords: dict[str, Any], outcome: str
) -> None:
    if outcome == "refused":
        with pytest.raises(ParameterError, match=r"is not supported: .*; "):
            SamplingParams(**keywords)
        return
    (output,) = llm.generate("abc", SamplingParams(**keywords))
    assert output.finished


def test_what_is_not_there_is_refused_with_what_would_do(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^tokenization_kwargs: .*; "):
        llm.generate("abc", GREEDY, tokenization_kwargs={"a": 1})
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, not obj"):
        llm.generate("abc", GREEDY, lora_request=object())  # type: ignore[arg-type]  # it
    with pytest.raises(RequestError, match="adapters are not enabled; set enable_lora"):
        llm.generate("abc", GREEDY, lora_request=LoRARequest("a", 1, "/nowhere"))
    with pytest.raises(RequestError, match="pooling_task: 'classify' is not supported"):
        llm.encode("abc", pooling_task="classify")
    for name in METHODS:
        with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(llm, "nothing")  # noqa: B009 - type checkers know that it is not there
    with pytest.raises(ImportError, match=r"no LLMEngine: .* use LLM\.stream"):
        from minfer import LLMEngine  # noqa: F401 - the fault


def test_a_beam_search_takes_neutral_parameters() -> None:
    make: Callable[..., BeamSearchParams] = BeamSearchParams
    plain = make(beam_width=2)
    for name, absent in BEAMS.items():
        for value in absent.neutral:
            assert make(beam_width=2, **{name: value}) == plain
        with pytest.raises(ParameterError, match=f"{name}: is not supported"):
            make(beam_width=2, **{name: "other"})


def test_a_call_may_bring_a_chat_template(llm: LLM, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}!"
    file = tmp_path / "own.jinja"
    file.write_text(template)
    for value in (template, file, str(file)):
        (output,) = llm.chat(TALK, GREEDY, chat_template=value)
        assert output.prompt == "hi!"
    (output,) = llm.chat(TALK, GREEDY)
    assert output.prompt == "<user>hi"
    with pytest.raises(minfer.ConfigError, match="correct the template"):
        llm.chat(TALK, GREEDY, chat_template="{{ broken")


def test_without_detokenizing_there_are_token_ids_alone(llm: LLM) -> None:
    (full,) = llm.generate("abc", GREEDY)
    (bare,) = llm.generate(
        "abc",
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False),
    )
    assert bare.outputs[0].text == ""
    assert bare.outputs[0].token_ids == full.outputs[0].token_ids
    with pytest.raises(RequestError, match="stop strings are found in text"):
        llm.generate("abc", SamplingParams(stop="x", detokenize=False))


def test_vectors_have_vllms_names(llm: LLM) -> None:
    (whole,) = llm.embed("abc")
    (raw,) = llm.encode("abc", PoolingParams(use_activation=False))
    (short,) = llm.embed("abc", pooling_params=PoolingParams(dimensions=3))
    (mean,) = llm.embed("abc", pooling_params=PoolingParams(pooling="mean"))
    vector, numbers = whole.outputs.embedding, raw.outputs.data.tolist()
    length = sum(number**2 for number in numbers) ** 0.5
    assert vector == pytest.approx([number / length for number in numbers], rel=1e-5)
    length = sum(number**2 for number in numbers[:3]) ** 0.5
    short_vector = short.outputs.embedding
    assert short_vector == pytest.approx([n / length for n in numbers[:3]], rel=1e-5)
    assert mean.embedding == llm.embed("abc", pooling="mean")[0].outputs.embedding
    assert mean.embedding != vector
    each = [PoolingParams(dimensions=3), PoolingParams(pooling="mean")]
    first, second = llm.encode(["abc", "abc"], each)
    assert first.embedding == pytest.approx(short_vector, abs=1e-5)
    assert second.embedding == pytest.approx(mean.embedding, abs=1e-5)
    size = len(vector)
    refused: tuple[tuple[Any, str], ...] = (
        (each, "2 pooling_params for 1 prompts"),
        (SamplingParams(), "must be PoolingParams, not a SamplingParams"),
        (PoolingParams(dimensions=size + 1), f"this model's vectors have {size}"),
    )
    for params, reason in refused:
        with pytest.raises(RequestError, match=reason):
            llm.embed("abc", pooling_params=params)
    assert whole.outputs.hidden_size == len(vector)


def test_metrics_have_vllms_kinds_and_names(llm: LLM) -> None:
    (output,) = llm.generate("abc", GREEDY)
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    generated = by_name["vllm:generation_tokens"]
    assert isinstance(generated, Counter)
    assert generated.value >= 8
    running = by_name["vllm:num_requests_running"]
    assert isinstance(running, Gauge)
    assert running.value == 0
    accepted = by_name["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(accepted, Vector)
    assert accepted.values == []
    latency = by_name["vllm:time_to_first_token_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] > 0
    metrics = output.metrics
    assert metrics.num_generation_tokens == 8
    assert metrics.num_preemptions == 0
    assert metrics.first_token_latency == metrics.ttft
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts


def test_the_tokenizer_can_be_called(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("abc")
    assert tokenizer("abc")["input_ids"] == ids
    both = tokenizer(["abc", "ab"])
    assert both["input_ids"] == [ids, tokenizer.encode("ab")]
    assert both["attention_mask"] == [[1] * len(row) for row in both["input_ids"]]
    with pytest.raises(TypeError, match="return_tensors is not supported"):
        tokenizer("abc", return_tensors="pt")


def outputs_of(
    engine: AsyncLLM, kind: RequestOutputKind, name: str
) -> list[RequestOutput]:
    async def read() -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, n=1, output_kind=kind
        )
        return [output async for output in engine.generate("abc", params, name)]

    return asyncio.run(read())


def test_outputs_grow_in_an_event_loop_unless_their_kind_is_another(folder: str) -> None:
    args = AsyncEngineArgs(
        model=folder, device="cpu", num_gpu_blocks_override=20, block_size=16
    )
    engine = AsyncLLM.from_engine_args(args)
    with contextlib.closing(engine):
        (final,) = outputs_of(engine, RequestOutputKind.FINAL_ONLY, "a")
        *earlier, grown = outputs_of(engine, RequestOutputKind.CUMULATIVE, "b")
        deltas = outputs_of(engine, RequestOutputKind.DELTA, "c")
    whole = final.outputs[0]
    assert all(whole.text.startswith(output.outputs[0].text) for output in earlier)
    assert grown.outputs[0].text == whole.text
    assert grown.outputs[0].token_ids == whole.token_ids
    assert (grown.request_id, grown.finished) == ("b", True)
    # A reader that is slower than the engine gets several deltas as one.
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    ids = [token for delta in deltas for token in delta.outputs[0].token_ids]
    assert ids == [*whole.token_ids]
    engine.shutdown()  # once more


def test_settings_come_from_a_command_line_of_vllms(folder: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model=folder, device="cpu", num_gpu_blocks_override=20)
    args = parser.parse_args(["--max_model_len", "64", "--block-size=16"])
    assert EngineArgs.from_cli_args(args).max_model_len == 64
    with LLM(**vars(args)) as llm:
        assert llm.setup.config.max_model_len == 64
