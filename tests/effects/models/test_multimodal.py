"""The text halves of multimodal checkpoints, against the classes of transformers that run
the whole with text alone.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.quantization import requested
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import Weights, named_parts
from minfer.effects.models.checkpoint.checkpoint import (
    TensorMismatchError,
    eos_ids,
    load_weights,
)
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.config_reader import (
    CheckpointError,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.families.multimodal import MULTIMODAL, TEXT_SIZES
from minfer.effects.models.families.text_halves import TEXT_HALVES
from minfer.effects.models.fields import INERT, INERT_OF, NEUTRAL_OF
from minfer.effects.models.ranks import Parallel, RankInfo
from tests.effects.models.test_fields import OTHER, other, reading
from tests.effects.tiny_model import (
    cache_with_states,
    read_spec,
    state_tables,
    write_tokenizer,
)
from tests.effects.tiny_multimodal import (
    HALVES,
    TOWERS,
    VARIANTS_OF_HALVES,
    hf_config,
    save_multimodal,
)

BLOCK = 4
PROMPT = [(37 * i + 11) % 160 for i in range(40)]
FURTHER = 8  # tokens after it


def greedy(spec: ModelSpec, weights: Weights) -> tuple[list[int], Tensor]:
    """The tokens that minfer continues the prompt with, in chunks, and the logprobs after
    each token of all.
    """
    table, ids = list(range(12)), [*PROMPT]
    [state] = state_tables(spec, BLOCK, 12, 1)
    cache, computed, logprobs = cache_with_states(spec, 12, BLOCK, [state]), 0, []
    for end in (27, *range(len(PROMPT), len(PROMPT) + FURTHER)):
        row = BatchRow(ids[computed:end], computed, table, end - computed, state)
        logits = forward(spec, weights, make_batch([row], BLOCK), cache)
        logprobs.append(logits.log_softmax(-1))
        computed = end
        if end >= len(PROMPT):
            ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :], torch.cat(logprobs)


@pytest.mark.parametrize(("name", "variant"), VARIANTS_OF_HALVES)
def test_tokens_and_logprobs_are_those_of_the_multimodal_class(
    tmp_path: Path, name: str, variant: str
) -> None:
    hf_model = save_multimodal(tmp_path, name, variant, published=True)
    spec = read_spec(tmp_path)
    tokens, logprobs = greedy(spec, load_weights(tmp_path, spec, "float32"))
    with torch.inference_mode():
        if MULTIMODAL[hf_model.config.model_type].text_class:
            hf_model = hf_model.language_model
        hf_logits = hf_model(input_ids=torch.tensor([PROMPT + tokens[:-1]])).logits[0]
    expected = hf_logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=4e-4)
    assert tokens == expected[len(PROMPT) - 1 :].argmax(-1).tolist()


def same(spec: ModelSpec, weights: Weights, other_weights: Weights) -> bool:
    pairs = zip(named_parts(spec, weights), named_parts(spec, other_weights), strict=True)
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


@pytest.mark.parametrize("name", HALVES)
def test_names_of_the_class_and_published_ones_are_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minfer.start")
    variant = next(iter(HALVES[name]))
    loaded = []
    for published in (False, True):
        folder = tmp_path / str(published)
        save_multimodal(folder, name, variant, published=published)
        spec = read_spec(folder)
        loaded.append(load_weights(folder, spec, "float32"))
        [line] = [r.getMessage() for r in caplog.records if r.name == "minfer.start"]
        caplog.clear()
        names = {*load_file(folder / "model.safetensors")}
        skipped = [key for key in names if key.startswith(spec.skipped_prefixes)]
        assert f"not read are {len(skipped)} tensors of other parts: " in line
        counts = re.findall(r"(\S+)\* \((\d+)\)", line)
        assert sum(int(count) for _, count in counts) == len(skipped)
        assert all(
            re.search("vis|vid|aud|proj|image|connector", prefix) for prefix, _ in counts
        )
        assert not any("layers" in key and "lang" in key for key in skipped)
    assert same(spec, *loaded)


@pytest.mark.parametrize("mode", ["tensor", "expert"])
def test_ranks_read_their_parts_of_transposed_experts(tmp_path: Path, mode: str) -> None:
    by_rank: list[list[Weights]] = []
    parallel = Parallel(tensor=2, by_expert=mode == "expert")
    for published in (False, True):
        folder = tmp_path / str(published)
        save_multimodal(folder, "Qwen3VLMoe", "sections", published=published)
        spec = read_spec(folder)
        ranks = [RankInfo(rank, parallel) for rank in range(2)]
        by_rank.append(
            [load_weights(folder, spec, "float32", rank_info=rank) for rank in ranks]
        )
    for rank, weights, transposed in zip(ranks, *by_rank, strict=True):
        assert same(spec.for_rank(rank), weights, transposed)


@pytest.mark.parametrize("level", ["fp8", "int8"])
def test_transposed_experts_are_quantized_as_they_are_loaded(
    tmp_path: Path, level: str
) -> None:
    """To the same numbers as those that are not transposed."""
    results = []
    for published in (False, True):
        folder = tmp_path / str(published)
        save_multimodal(folder, "Qwen3VLMoe", "sections", published=published)
        spec = evolve(read_spec(folder), quantization=requested(level, None))
        spec = as_stored(spec, folder)
        results.append(greedy(spec, load_weights(folder, spec, "float32")))
    (tokens, logprobs), (others, other_logprobs) = results
    assert tokens == others
    assert torch.equal(logprobs, other_logprobs)


def with_text_files(folder: Path, name: str, variant: str) -> Path:
    """A published checkpoint with a tokenizer, and embeddings for all its tokens."""
    save_multimodal(folder, name, variant, published=True, vocab_size=260)
    write_tokenizer(folder)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_engine_runs_a_text_half(tmp_path: Path, quantization: str | None) -> None:
    folder = with_text_files(tmp_path / "model", "Qwen2VL", "tied")
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 20, "block_size": 16}
    greedily = SamplingParams(max_tokens=6, temperature=0)
    settings: dict[str, Any] = {"dtype": "float32", **sizes}
    with LLM(model=str(folder), quantization=quantization, **settings) as llm:
        [answer] = llm.generate({"prompt_token_ids": PROMPT}, greedily)
        part = {"type": "image_url", "image_url": {"url": "x"}}
        with pytest.raises(ValueError, match="models read text here"):
            llm.chat([{"role": "user", "content": [part]}], greedily)
    if quantization is None:
        spec = read_spec(folder)
        tokens, _ = greedy(spec, load_weights(folder, spec, "float32"))
        assert [*answer.outputs[0].token_ids] == tokens[:6]
    assert len(answer.outputs[0].token_ids) == 6


def test_plan_and_quantize_name_what_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_text_files(tmp_path / "model", "LlavaNext", "mistral window")
    assert main(["plan", "--model", str(folder), "--max-model-len", "64"]) == 0
    [line] = [
        row for row in capsys.readouterr().out.splitlines() if row.startswith("not read")
    ]
    assert "28 tensors of other parts: image_newline* (1), multi_modal_" in line
    output = tmp_path / "quantized"
    options = ["--model", str(folder), "--output", str(output)]
    assert main(["quantize", *options, "--quantization", "int8"]) == 0
    spec = as_stored(read_spec(output), output)
    assert spec.quantization is not None
    assert load_weights(output, spec, "float32").layers
    before = {*load_file(folder / "model.safetensors")}
    after = {*load_file(output / "model.safetensors")}
    towers = {name for name in before if name.startswith(spec.skipped_prefixes)}
    assert towers <= after


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["LlavaNext", "Kimi_K25", "Qwen3VLMoe", "Llama4", "Gemma4"]
)
def test_verify_compares_with_the_multimodal_class(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers reads the same files, with the names of published ones."""
    folder = with_text_files(tmp_path / "model", name, next(iter(HALVES[name])))
    small = ["--prompts", "2", "--tokens", "2", "--dtype", "float32", "--json"]
    main(["verify", "--model", str(folder), *small])
    checks = json.loads(capsys.readouterr().out)["checks"]
    by_name = {check["name"]: check for check in checks}
    assert by_name["logits float32"]["state"] == by_name["greedy text"]["state"] == "pass"
    assert "not read are" in by_name["tensors"]["figures"]


def test_a_tensor_of_no_part_is_an_error(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "Qwen2VL", "sections", published=True)
    spec, file = read_spec(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file) | {"audio_tower.proj.weight": torch.ones(2, 2)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(TensorMismatchError, match=r"unexpected tensor audio_tower\.proj"):
        load_weights(tmp_path, spec, "float32")


def config_of(name: str, variant: str | None = None, **changes: Any) -> dict[str, Any]:
    """A config as transformers writes it; ... removes a field."""
    config: dict[str, Any] = hf_config(
        name, variant or next(iter(HALVES[name]))
    ).to_dict()
    config |= {"architectures": [f"{name}ForConditionalGeneration"], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def with_text(name: str, **changes: Any) -> dict[str, Any]:
    """A config with changes of its text half."""
    config = config_of(name)
    text = config["text_config"] | changes
    text = {key: value for key, value in text.items() if value is not ...}
    return config | {"text_config": text}


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_flat_configs_are_read_as_nested_ones(name: str) -> None:
    """As Qwen2-VL's were published: the text half's fields beside `vision_config`."""
    nested = config_of(name)
    text = nested["text_config"]
    rope = text.pop("rope_parameters")
    flat = {**text, **nested, "text_config": None}
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    nested["text_config"] = text | {"rope_parameters": rope}
    assert parse_spec(flat) == parse_spec(nested)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_embeddings_are_tied_as_in_transformers(
    name: str, outer: bool | None, inner: bool | None
) -> None:
    """Where only the class's default ties them, transformers looks whether the files have
    an output head.
    """
    spec = parse_spec(
        with_text(name, tie_word_embeddings=... if inner is None else inner)
        | {"tie_word_embeddings": outer}
    )
    if outer is None:
        assert spec.tie_word_embeddings == (
            name in ("Gemma3", "Gemma3n", "Gemma4") if inner is None else inner
        )
        return
    text = {} if inner is None else {"tie_word_embeddings": inner}
    text |= {"model_type": config_of(name)["text_config"]["model_type"]}
    config_class: Any = getattr(transformers, f"{name}Config")
    row = MULTIMODAL[config_class.model_type]
    config = config_class(text_config=text, tie_word_embeddings=outer)
    deciding = config.text_config if row.tied_by_text else config
    assert spec.tie_word_embeddings == deciding.tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        (
            with_text("Llava", model_type="granite"),
            UnsupportedModelError,
            "text_config: model_type 'granite'.*llama, mistral, qwen2, qwen3 are",
        ),
        (
            config_of("Kimi_K25", text_config={"model_type": "qwen3_next"}),
            UnsupportedModelError,
            "model_type 'qwen3_next'.*deepseek_v3 is",
        ),
        (config_of("Qwen3VL", text_config=None), ModelConfigError, "text_config must"),
        (config_of("Qwen2VL", text_config=[1]), ModelConfigError, "text_config must"),
        (
            with_text("Gemma3", final_logit_softcapping=2.0),
            UnsupportedModelError,
            "final_logit_softcapping 2.0",
        ),
        (
            config_of("Gemma3", architectures=["Gemma3ForSequenceClassification"]),
            UnsupportedModelError,
            "Gemma3ForSequenceClassification.*Gemma3ForConditionalGeneration is",
        ),
        (
            config_of("Llava", model_type="llava_new", architectures=["LlavaNew"]),
            UnsupportedModelError,
            "LlavaNew is multimodal.*text halves of gemma3, qwen2_vl",
        ),
        (
            {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}},
            UnsupportedModelError,
            "'internvl_chat' is multimodal",
        ),
        *(
            (
                with_text(
                    name, rope_parameters={"rope_type": "default", "mrope_section": sizes}
                ),
                ModelConfigError,
                "mrope_section must be a list of 3 numbers.*the sum 8",
            )
            for name in ("Qwen2VL", "Qwen3VL")
            for sizes in ([2, 3, 4], [4, 4], [-1, 4, 5], "2, 3, 3", [2.0, 3, 3])
        ),
        (
            with_text("Qwen3VL", rope_parameters={"mrope_interleaved": 1}),
            ModelConfigError,
            "mrope_interleaved must be true or false",
        ),
        (
            with_text("Llava", rope_parameters={"mrope_section": [2, 3, 3]}),
            ModelConfigError,
            "mrope_section is not a key",
        ),
        (
            with_text("Qwen2VL", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            UnsupportedModelError,
            "'dynamic'",
        ),
        (
            with_text("Qwen3VLMoe", norm_topk_prob=False),
            UnsupportedModelError,
            "norm_topk_prob",
        ),
        (with_text("Glm4vMoe", use_qk_norm=True), UnsupportedModelError, "use_qk_norm"),
        (with_text("Qwen3VL", hidden_act="gelu"), UnsupportedModelError, "hidden_act"),
        (
            with_text("Qwen3VL", sliding_window=8, use_sliding_window=True),
            UnsupportedModelError,
            "sliding_window",
        ),
        (
            with_text(
                "Llava",
                model_type="mistral",
                sliding_window=8,
                layer_types=["full_attention", *["sliding_attention"] * 2],
            ),
            UnsupportedModelError,
            "layer_types",
        ),
        (
            with_text("Llava", final_logit_softcapping=30.0, model_type="mistral"),
            UnsupportedModelError,
            "final_logit_softcapping",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    config: dict[str, Any], error: type[CheckpointError], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse_spec(config)


def test_a_text_half_has_the_defaults_of_its_class() -> None:
    for name in TOWERS:
        config_class: Any = getattr(transformers, f"{name}Config")
        row = MULTIMODAL[config_class.model_type]
        for kind in row.texts:
            gemmas = {"gemma3_text", "gemma3n_text", "gemma4_text"}
            if kind not in gemmas | {*TEXT_SIZES, *TEXT_HALVES}:
                continue
            text: dict[str, Any] = {"model_type": kind}
            if kind == "glm4v_moe_text":
                text["head_dim"] = 128  # hidden_size is no multiple of the heads
            written = config_class(text_config=text).text_config.to_dict()
            parts = {"vision_config": {}, "tie_word_embeddings": False}
            config = {"model_type": row.model_type, **parts}
            assert parse_spec({**config, "text_config": text}) == parse_spec(
                {**config, "text_config": written}
            )


def test_other_names_of_classes_and_of_text_models_are_read() -> None:
    """Kimi K2.5 as it was published, for code of its own."""
    spec = parse_spec(config_of("Kimi_K25"))
    published = with_text("Kimi_K25", model_type="kimi_k2")
    published["architectures"] = ["KimiK25ForConditionalGeneration"]
    assert parse_spec(published) == spec
    for names in ([], ["Kimi_K25Model"], ["DeepseekV3ForCausalLM"]):
        assert parse_spec(published | {"architectures": names}) == spec


def test_a_dtype_and_ends_of_the_whole_hold_for_the_text_half(tmp_path: Path) -> None:
    config = with_text("Mistral3", dtype="float16", eos_token_id=7)
    config |= {"dtype": None, "torch_dtype": "bfloat16", "eos_token_id": None}
    assert parse_spec(config).dtype == "bfloat16"
    assert parse_spec(config | {"torch_dtype": None}).dtype == "float16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (parse_spec(config).eos_ids, eos_ids(tmp_path)) == ((7,), (7,))
    config["eos_token_id"] = [8, 9]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (parse_spec(config).eos_ids, eos_ids(tmp_path)) == ((8, 9), (8, 9))


def test_quantization_may_be_described_in_the_text_half() -> None:
    """As Kimi K2.5's is."""
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec = parse_spec(with_text("Kimi_K25", quantization_config=quantized))
    assert spec.quantization is not None
    assert spec.quantization.format.method == "fp8"


# Text halves that are no families: a config in which every field is in use.
RICH = {
    "Qwen2VL": "windows",
    "Qwen2_5_VL": "windows",
    "Qwen3VL": "tied",
    "Qwen3VLMoe": "every second",
    "Glm4v": "tied",
    "Glm4vMoe": "groups",
}


@pytest.mark.parametrize("name", RICH)
def test_every_field_of_a_text_half_is_read_refused_or_inert(name: str) -> None:
    config = config_of(name, RICH[name])
    text = config["text_config"]
    text["rope_parameters"].pop("mrope_section", None)  # fits one number of dimensions
    text.pop("layer_types", None)  # has priority over `max_window_layers`
    kind = str(text["model_type"])
    plain = transformers.PretrainedConfig().to_dict()
    inert = INERT | INERT_OF.get(kind, frozenset())
    spec = parse_spec(config)
    for field in sorted(text.keys() - plain.keys() - inert):
        value = text[field]
        changed = OTHER["rope_parameters"] if field == "rope_parameters" else None
        changed = other(field, value) if changed is None else changed
        if field == "tie_word_embeddings":
            continue  # see above: the whole's counts
        changed_config = {**config, "text_config": {**text, field: changed}}
        assert reading(changed_config, field) != spec, field


def test_rows_of_the_tables_are_tested_and_known_to_transformers() -> None:
    for name in TOWERS:
        config_class: Any = getattr(transformers, f"{name}Config")
        row = MULTIMODAL[config_class.model_type]
        assert row.architecture == f"{name}ForConditionalGeneration"
        assert len(HALVES[name]) >= (4 if name != "Gemma3" else 2)
        kinds = {
            str(config_of(name, variant)["text_config"]["model_type"])
            for variant in HALVES[name]
        }
        assert kinds == {*row.texts}
    assert len(TOWERS) == len(MULTIMODAL)
    assert TEXT_HALVES.keys() <= {
        kind for row in MULTIMODAL.values() for kind in row.texts
    }
    assert NEUTRAL_OF.keys() >= {"qwen3_vl_moe_text", "glm4v_moe_text"}
