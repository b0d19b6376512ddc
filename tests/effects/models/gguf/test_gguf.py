"""Models in GGUF files, beside transformers' models of what their numbers mean."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from attrs import field, fields, frozen, has
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import AutoModelForCausalLM

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.gguf.config import gguf_config
from minfer.effects.models.gguf.container import GgufError
from minfer.effects.models.json_files import CorruptFileError
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.prepare import prepare
from tests.circles import long
from tests.effects.models.formats.test_formats import leaves
from tests.effects.models.gguf.written import add_tokenizer, write, write_split
from tests.effects.tiny_families import ROPES, VARIANTS, save

PROMPT: Final = [*range(3, 60, 2)]
TOKENS: Final = 24
# Inputs of all matrices are multiples of a block.
WIDE: Final = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
# The file has neither the factor of scores nor the pattern of windows.
GEMMA: Final = {
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
}
# The file has one factor for both.
MSCALE: Final = ROPES["yarn"] | {"mscale": 0.8, "mscale_all_dim": 0.8}


# What files do not say.
OWN: Final[dict[str, dict[str, Any]]] = {
    "Gemma2": {"query_pre_attn_scalar": 16, "num_hidden_layers": 4, "layer_types": None},
    "Granite": {"head_dim": 16},
    "SmolLM3": {"num_hidden_layers": 5, "layer_types": None, "no_rope_layers": None},
    "Llama4": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "no_rope_layer_interval": 4,
        "num_hidden_layers": 5,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
    },
    "Gemma4": {"attention_bias": False, "moe_intermediate_size": 32},
}
SCOUT: Final = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
# Rows of all matrices of Gemma 4 are multiples of a block.
UNTIED: Final = {"tie_word_embeddings": False}
WIDE_INPUTS: Final = UNTIED | {"hidden_size_per_layer_input": 32}
ALL_FULL: Final = {
    "layer_types": ["full_attention"] * 5,
    "no_rope_layers": [1] * 5,
    "interleave_moe_layer_step": 1,
}
EACH_FOURTH: Final = {
    "num_hidden_layers": 5,
    "layer_types": None,
    "sliding_window_pattern": 4,
}
GROWTH: Final = MSCALE | {
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.7,
}
ALIKE: Final = {"mscale": 1.0, "mscale_all_dim": 1.0}
Change = Callable[[gguf.GGUFWriter], object]


@frozen(kw_only=True)
class Case:
    """A model, and how its matrices are stored."""

    family: str
    variant: str
    kind: Type
    kinds: Mapping[str, Type] = field(factory=dict)  # by a part of a tensor's name
    arch: str = ""  # another than most files of the family have
    changes: Mapping[str, Any] = field(factory=dict)  # of the variant's config

    @property
    def text(self) -> str:
        return f"{self.arch or self.family} {self.variant} {self.kind.name}"

    def save(self, folder: Path, change: Change = lambda _writer: None) -> Any:
        """Write the model as model.gguf; returns transformers' model of it."""
        is_scaled = self.variant != "not scaled"
        config = VARIANTS[self.family, self.variant if is_scaled else "scaled queries"]
        config = config | WIDE
        config |= GEMMA if self.family == "Gemma3" else {}
        config |= OWN.get(self.family, {})
        if self.family.startswith("Deepseek") and self.variant == "yarn":
            config["rope_parameters"] = MSCALE
        if self.family == "Ministral3" and self.variant != "own rope":
            own = ALIKE if is_scaled else ALIKE | {"llama_4_scaling_beta": 0.0}
            config["rope_parameters"] = config["rope_parameters"] | own
        if self.family == "Mistral4":
            # Files of Mistral Small 4 say nothing of either.
            own = {} if self.arch else {"llama_4_scaling_beta": 0.1, "mscale": 1.0}
            config["rope_parameters"] = GROWTH | own
        config |= self.changes
        model = save(str(folder), self.family, config)
        path = folder / "model.gguf"
        write(path, self.family, model, self.kinds, self.kind, change, self.arch)
        return model


PLAIN: Final = Case(family="Llama", variant="biases, tied", kind=Type.Q8_0)
INT4: Final = Case(family="Qwen2", variant="plain", kind=Type.Q4_0)
MIXED: Final = Case(
    family="Llama",
    variant="head_dim 32",
    kind=Type.Q4_0,
    kinds={"attn_v": Type.Q5_0, "blk.1.ffn_down": Type.Q4_1, "embd": Type.Q8_0},
)
MXFP4: Final = Case(
    family="GptOss", variant="alternate", kind=Type.Q8_0, kinds={"_exps": Type.MXFP4}
)
# Their rows are no multiples of a block.
LATENTS: Final = dict.fromkeys(("attn_k_b", "attn_v_b", "attn_output"), Type.F32)
EXPERTS: Final = Case(family="Mixtral", variant="experts", kind=Type.Q4_0)
FUSED: Final = Case(family="Phi3", variant="window", kind=Type.Q4_0)
SHARED: Final = Case(
    family="Gemma4", variant="shared keys", kind=Type.Q4_0, changes=WIDE_INPUTS
)
GATED_UP: Final = Case(family="Gemma4", variant="experts", kind=Type.Q4_0, changes=UNTIED)
MORE: Final = (
    FUSED,
    MIXED,
    EXPERTS,
    Case(family="Llama", variant="plain", kind=Type.Q4_0),
    Case(family="Llama", variant="rope yarn", kind=Type.F16),
    Case(family="Llama", variant="rope linear", kind=Type.BF16),
    Case(family="Mistral", variant="window", kind=Type.Q8_0),
    Case(family="Mixtral", variant="experts, windows", kind=Type.F16),
    Case(family="Qwen3", variant="attention_bias", kind=Type.Q5_1),
    Case(family="Gemma3", variant="pattern", kind=Type.Q8_0),
    Case(family="Gemma3", variant="pattern", kind=Type.Q4_0),
    Case(family="Gemma3", variant="ropes", kind=Type.F32),
    Case(family="Qwen3Moe", variant="normalised", kind=Type.F16),
    Case(family="Qwen3Moe", variant="normalised", kind=Type.Q4_0),
    Case(family="Qwen2Moe", variant="experts", kind=Type.Q8_0),
    Case(family="Qwen2", variant="plain", kind=Type.MXFP4),
    Case(family="GptOss", variant="alternate", kind=Type.F16),
    MXFP4,
    Case(family="Glm4Moe", variant="experts", kind=Type.F32),
    Case(family="Glm4Moe", variant="groups", kind=Type.Q4_0),
    Case(family="Glm4Moe", variant="not normalised", kind=Type.Q8_0),
    Case(family="DeepseekV2", variant="greedy", kind=Type.F32),
    Case(family="DeepseekV2", variant="groups", kind=Type.F32),
    Case(family="DeepseekV2", variant="yarn", kind=Type.F16),
    Case(family="DeepseekV3", variant="groups", kind=Type.F32),
    Case(family="DeepseekV3", variant="yarn", kind=Type.F32),
    Case(family="DeepseekV3", variant="groups", kind=Type.Q4_0, kinds=LATENTS),
    Case(family="Youtu", variant="tied", kind=Type.F32),
    Case(family="Gemma2", variant="caps", kind=Type.F32),
    Case(family="Gemma2", variant="caps", kind=Type.Q8_0),
    Case(family="Gemma2", variant="caps", kind=Type.Q4_0),
    Case(family="Phi3", variant="fused", kind=Type.F32),
    Case(family="Phi3", variant="partial", kind=Type.Q8_0),
    Case(family="Phi3", variant="longrope", kind=Type.F16),
    Case(family="Phi3", variant="longrope, partial", kind=Type.MXFP4),
    Case(family="Ministral3", variant="scaled queries", kind=Type.F32),
    Case(family="Ministral3", variant="own rope", kind=Type.Q4_0),
    Case(family="Ministral3", variant="not scaled", kind=Type.F32),
    Case(family="Granite", variant="plain", kind=Type.F32),
    Case(family="Granite", variant="multipliers", kind=Type.Q4_0),
    Case(family="Granite", variant="biases", kind=Type.F32),
    Case(family="SmolLM3", variant="every fourth", kind=Type.Q8_0),
    Case(family="Olmo2", variant="norms behind", kind=Type.Q4_0),
    Case(family="Olmo2", variant="all key heads", kind=Type.F32),
    Case(family="Glm4", variant="more eps", kind=Type.F32),
    Case(family="Glm4", variant="more eps", kind=Type.Q4_0),
    Case(family="SeedOss", variant="plain", kind=Type.Q8_0),
    Case(family="SeedOss", variant="biases", kind=Type.F32),
    Case(family="SeedOss", variant="no biases", kind=Type.Q4_0),
    Case(family="Ernie4_5", variant="tied", kind=Type.Q4_0),
    Case(family="Ernie4_5", variant="biases", kind=Type.F32),
    Case(family="HunYuanDenseV1", variant="alpha", kind=Type.Q8_0),
    Case(family="HunYuanDenseV1", variant="biases, tied", kind=Type.F32),
    Case(family="MiniMaxM2", variant="half turn", kind=Type.Q4_0),
    Case(family="MiniMaxM2", variant="yarn", kind=Type.F32),
    Case(family="Mistral", variant="plain", kind=Type.Q8_0, arch="mistral3"),
    Case(family="Qwen2", variant="plain", kind=Type.Q4_0, arch="qwen2vl"),
    Case(family="Qwen3", variant="attention_bias", kind=Type.F32, arch="qwen3vl"),
    Case(family="Qwen3Moe", variant="normalised", kind=Type.Q8_0, arch="qwen3vlmoe"),
    Case(family="Llama4", variant="chunks", kind=Type.F32),
    Case(family="Llama4", variant="chunks", kind=Type.Q4_0),
    Case(
        family="Llama4",
        variant="no chunks",
        kind=Type.Q8_0,
        changes={"rope_parameters": SCOUT},
    ),
    Case(family="Llama4", variant="chunks", kind=Type.F32, changes=ALL_FULL),
    Case(family="Gemma4", variant="plain", kind=Type.F32),
    Case(family="Gemma4", variant="keys are values", kind=Type.Q4_0),
    Case(family="Gemma4", variant="inputs of layers", kind=Type.F16),
    SHARED,
    GATED_UP,
    Case(family="Gemma4", variant="all", kind=Type.F32),
    Case(family="Mistral4", variant="experts", kind=Type.F32),
    Case(family="Mistral4", variant="groups", kind=Type.F32),
    Case(family="Mistral4", variant="experts", kind=Type.Q4_0, kinds=LATENTS),
    Case(family="Mistral4", variant="groups", kind=Type.F16, arch="deepseek2"),
    Case(family="Cohere2", variant="pattern", kind=Type.F32, changes=EACH_FOURTH),
    Case(family="Cohere2", variant="pattern", kind=Type.Q4_0, changes=EACH_FOURTH),
    Case(family="Cohere2", variant="windows alternate", kind=Type.Q8_0),
)


@pytest.mark.parametrize(
    "case", [PLAIN, INT4, *long(MORE)], ids=lambda case: str(case.text)
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    model = case.save(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    file = str(tmp_path / "model.gguf")
    with LLM(file, dtype="float32", skip_tokenizer_init=True) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
    written = [*output.token_ids]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + written])).logits[0, len(PROMPT) - 1 : -1]
    expected, best = logits.log_softmax(-1).max(-1)
    assert written == best.tolist()
    assert output.logprobs is not None
    steps = zip(output.logprobs, written, strict=True)
    logprobs = [step[token].logprob for step, token in steps]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.long
def test_llama_4s_chunks_are_those_of_published_models(tmp_path: Path) -> None:
    """A prompt longer than a chunk, after which queries grow, too: files say neither."""
    sizes = {"num_attention_heads": 2, "head_dim": 8, "max_position_embeddings": 16384}
    case = Case(family="Llama4", variant="chunks", kind=Type.F32, changes=sizes)
    model = case.save(tmp_path)
    prompt = torch.randint(160, (1, 8200), generator=torch.manual_seed(0))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
    file = str(tmp_path / "model.gguf")
    with LLM(file, dtype="float32", skip_tokenizer_init=True) as llm:
        ids = prompt[0].tolist()
        output = llm.generate([{"prompt_token_ids": ids}], params)[0].outputs[0]
    with torch.inference_mode():
        expected = model(prompt, logits_to_keep=1).logits[0, 0].log_softmax(-1)
    (token,) = output.token_ids
    assert token == expected.argmax()
    assert output.logprobs is not None
    assert output.logprobs[0][token].logprob == pytest.approx(
        float(expected.max()), abs=1e-3
    )


@pytest.mark.parametrize(
    ("case", "packed"),
    [
        # Queries, keys and values are one matrix here, of which values are not Q4_0.
        (MIXED, [False, True, True, True, False, True, True, False]),
        *long(
            [
                (EXPERTS, [True] * 12),
                (FUSED, [True] * 12),
                # Some layers have queries alone, and gates and ups of experts are one.
                (SHARED, [True] * 36),
                (GATED_UP, [True] * 18),
            ]
        ),
    ],
)
def test_q4_0_stays_in_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, packed: list[bool]
) -> None:
    monkeypatch.setattr(layers, "in_kernel_layout", lambda leaf: leaf)
    case.save(tmp_path)
    setup = prepare(EngineArgs(model=str(tmp_path / "model.gguf"), dtype="float16"))
    weights = load_weights(setup.folder, setup.spec, setup.spec.dtype)
    is_int4 = [leaf.scheme.is_int4 for leaf in leaves(weights.layers)]
    assert is_int4[: len(packed)] == packed
    assert sum(tensor.nbytes for tensor in tensors(weights)) == weight_bytes(
        setup.spec, cuda=True
    )


def keyed(kind: str, key: str, *values: Any) -> Change:
    """A change of a file: a value of a key, whatever it had."""

    def apply(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if values:
            getattr(writer, f"add_{kind}")(key, *values)

    return apply


def with_factors(name: str, pairs: int) -> Change:
    """A change of a file: factors of frequencies."""
    factors = np.ones(pairs, np.float32)
    return lambda writer: writer.add_tensor(f"{name}.weight", factors)


def with_array(key: str, *values: Any) -> Change:
    """A change of a file: an array, whatever it had."""

    def apply(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_array(key, [*values])

    return apply


@pytest.mark.parametrize(
    ("family", "variant", "change", "named"),
    [
        (
            "Phi3",
            "fused",
            keyed("uint32", "phi3.attention.sliding_window"),
            r"phi3\.attention\.sliding_window is missing",
        ),
        (
            "Phi3",
            "fused",
            with_factors("rope_factors_long", 8),
            r"tensor rope_factors_short\.weight must hold 8 factors",
        ),
        (
            "Phi3",
            "fused",
            with_factors("rope_factors_long", 7),
            r"tensor rope_factors_long\.weight must hold 8 factors",
        ),
        (
            "Phi3",
            "fused",
            keyed("string", "phi3.rope.scaling.type", "longrope"),
            r"phi3\.rope\.scaling\.type must be none, or longrope with tensors",
        ),
        (
            "Phi3",
            "longrope",
            keyed("string", "phi3.rope.scaling.type", "yarn"),
            r"phi3\.rope\.scaling\.type must be none, or longrope with tensors",
        ),
        (
            "Phi3",
            "fused",
            keyed("float32", "phi3.rope.scaling.attn_factor", 1.5),
            r"attn_factor must be 1, without longrope",
        ),
        (
            "Phi3",
            "longrope",
            keyed("float32", "phi3.rope.scaling.factor", 4.0),
            r"scaling\.factor must be 1",
        ),
        (
            "Phi3",
            "fused",
            with_factors("rope_freqs", 8),
            r"rope_freqs\.weight of shape \[8\] does not fit .* phi3",
        ),
        (
            "Llama",
            "plain",
            with_factors("rope_factors_long", 8),
            r"rope_factors_long\.weight of shape \[8\] does not fit .* llama",
        ),
        (
            "Llama",
            "plain",
            keyed("float32", "llama.attention.temperature_scale", 0.1),
            r"temperature_scale = 0\.1.* is not supported",
        ),
        (
            "Ministral3",
            "own rope",
            keyed("float32", "mistral3.rope.scaling.yarn_log_multiplier", 0.5),
            "yarn_log_multiplier must be 0 or 1",
        ),
        (
            "Ministral3",
            "own rope",
            keyed("string", "mistral3.rope.scaling.type", "linear"),
            r"scaling\.type must be yarn",
        ),
        (
            "Ministral3",
            "own rope",
            keyed("uint32", "mistral3.attention.temperature_length", 77),
            "temperature_length must be the original context, 16384",
        ),
        (
            "Granite",
            "plain",
            keyed("bool", "granite.rope.scaling.finetuned", False),
            r"finetuned must be true",
        ),
        (
            "Granite",
            "plain",
            keyed("float32", "granite.attention.scale"),
            r"granite\.attention\.scale is missing",
        ),
        (
            "Olmo2",
            "norms behind",
            keyed("uint32", "olmo2.attention.sliding_window", 8),
            "windows are not supported",
        ),
        (
            "MiniMaxM2",
            "half turn",
            keyed("uint32", "minimax-m2.expert_gating_func", 1),
            r"expert_gating_func must be 2",
        ),
        (
            "MiniMaxM2",
            "half turn",
            keyed("uint32", "minimax-m2.expert_gating_func"),
            r"expert_gating_func is missing",
        ),
        (
            "Llama4",
            "chunks",
            keyed("uint32", "llama4.attention.sliding_window", 20),
            r"sliding_window must be 0 or 8192",
        ),
        (
            "Llama4",
            "chunks",
            keyed("uint32", "llama4.attention.sliding_window_pattern", 3),
            r"sliding_window_pattern must be 4",
        ),
        (
            "Llama4",
            "chunks",
            keyed("float32", "llama4.rope.freq_base_swa", 5.0),
            r"freq_base_swa must be that of all layers, 500000",
        ),
        (
            "Llama4",
            "chunks",
            keyed("uint32", "llama4.expert_gating_func", 1),
            r"expert_gating_func must be 2",
        ),
        (
            "Llama4",
            "chunks",
            keyed("uint32", "llama4.interleave_moe_layer_step"),
            r"interleave_moe_layer_step is missing",
        ),
        (
            "Llama4",
            "chunks",
            with_factors("rope_freqs", 7),
            r"rope_freqs\.weight holds RoPE factors other than",
        ),
        (
            "Gemma4",
            "plain",
            with_array("gemma4.attention.sliding_window_pattern", True, False, True),
            r"pattern must be an array of 3 elements, of which the last is false",
        ),
        (
            "Gemma4",
            "plain",
            keyed("uint32", "gemma4.attention.sliding_window_pattern", 3),
            r"sliding_window_pattern must be an array",
        ),
        (
            "Gemma4",
            "plain",
            with_array("gemma4.attention.head_count_kv", 2, 1, 1),
            r"head_count_kv must be the same in all layers, as there is blk\.1\.attn_v",
        ),
        (
            "Gemma4",
            "plain",
            with_array("gemma4.attention.head_count_kv", 2, 1, 2),
            r"head_count_kv must be above 0, and one number for each kind of layers",
        ),
        (
            "Gemma4",
            "shared keys",
            with_array("gemma4.feed_forward_length", *[96] * 5, 192),
            r"feed_forward_length must be 3 times 96, and then 3 times 192",
        ),
        (
            "Gemma4",
            "plain",
            keyed("uint32", "gemma4.rope.dimension_count_swa", 8),
            r"dimension_count_swa must be a head's dimensions, 16",
        ),
        (
            "Gemma4",
            "plain",
            keyed("float32", "gemma4.rope.scaling.factor", 2.0),
            r"rope\.scaling\.factor must be 1",
        ),
        (
            "Gemma4",
            "plain",
            lambda writer: writer.tensors[0].pop("rope_freqs.weight"),
            r"tensor rope_freqs\.weight must hold 16 factors in float32",
        ),
        (
            "Gemma4",
            "plain",
            keyed("uint32", "gemma4.embedding_length_per_layer_input", 12),
            r"per_layer_token_embd\.weight is missing, though gemma4\.embedding_len",
        ),
        (
            "Mistral4",
            "experts",
            keyed("string", "mistral4.rope.scaling.type", "linear"),
            r"scaling\.type must be yarn in Mistral 4",
        ),
        (
            "Mistral4",
            "experts",
            keyed("uint32", "mistral4.attention.temperature_length", 77),
            r"temperature_length must be the original context, 8",
        ),
        (
            "Mistral4",
            "experts",
            keyed("uint32", "mistral4.expert_gating_func", 2),
            r"expert_gating_func must be 1",
        ),
        (
            "Cohere2",
            "windows alternate",
            with_array("cohere2.attention.sliding_window_pattern", True, False),
            r"sliding_window_pattern must be 3 elements",
        ),
        (
            "Cohere2",
            "windows alternate",
            keyed("uint32", "cohere2.rope.dimension_count", 8),
            r"rope\.dimension_count must be a head's dimensions, 16",
        ),
        (
            "Cohere2",
            "windows alternate",
            keyed("float32", "cohere2.logit_scale"),
            r"cohere2\.logit_scale is missing",
        ),
        (
            "Qwen3",
            "attention_bias",
            keyed("uint32", "qwen3.interleave_moe_layer_step", 2),
            r"interleave_moe_layer_step = 2 is not supported",
        ),
        (
            "Glm4",
            "more eps",
            lambda writer: writer.add_rope_dimension_sections([2, 1, 1, 0]),
            "dimension_sections",
        ),
    ],
)
def test_what_an_architecture_does_not_say_is_refused_by_name(
    tmp_path: Path, family: str, variant: str, change: Change, named: str
) -> None:
    Case(family=family, variant=variant, kind=Type.F32).save(tmp_path, change)
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=named):
        load_weights(path, parse_spec(gguf_config(path), str(path)), "float32")


def test_a_split_model_is_read_from_all_files(tmp_path: Path) -> None:
    """Of a model that the `gguf` package writes in several files, as llama.cpp does."""
    PLAIN.save(tmp_path)
    whole = tmp_path / "model.gguf"
    first, *others = write_split(tmp_path / "parts", whole, tensors=8)
    assert len(others) > 1
    setups = [
        prepare(EngineArgs(model=str(path), dtype="float32", skip_tokenizer_init=True))
        for path in (whole, first)
    ]
    one, several = (
        tensors(load_weights(setup.folder, setup.spec, "float32")) for setup in setups
    )
    assert len(one) == len(several)
    for tensor, of_files in zip(one, several, strict=True):
        assert tensor.equal(of_files)
    with pytest.raises(UnsupportedModelError, match=f"give the first one, {first}"):
        gguf_config(others[0])
    renamed = first.with_name("model.gguf")
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(
        GgufError, match=r"split\.count = .*, but by its name it is file 1"
    ):
        gguf_config(renamed)
    others[0].write_bytes(others[1].read_bytes())
    with pytest.raises(GgufError, match=r"split\.no = 2, but by its name it is file 2"):
        gguf_config(first)
    others[0].unlink()
    with pytest.raises(CorruptFileError, match=f"{others[0]}: not found, though"):
        gguf_config(first)


def test_llama_3s_factors_of_rotations_are_recognised(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"head_dim": 64, "rope_parameters": rope, "num_hidden_layers": 1}
    config = VARIANTS["Llama", "plain"] | sizes
    model = save(str(tmp_path), "Llama", config)
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write(
        tmp_path / "model.gguf",
        "Llama",
        model,
        {},
        change=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    assert gguf_config(path)["rope_scaling"] == {
        key: value for key, value in rope.items() if key != "rope_theta"
    }


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
@pytest.mark.parametrize("factor", [4.0, 0.0])
def test_a_factor_without_a_type_is_linear(
    tmp_path: Path, key: str, factor: float
) -> None:
    """As llama.cpp reads it; 0 is none."""
    model = save(str(tmp_path), "Llama", VARIANTS["Llama", "plain"])
    path = write(
        tmp_path / "model.gguf",
        "Llama",
        model,
        {},
        change=lambda writer: writer.add_float32(f"llama.{key}", factor),
    )
    expected = {"rope_type": "linear", "factor": factor} if factor else None
    assert gguf_config(path)["rope_scaling"] == expected


@pytest.mark.long
def test_the_bundled_model_writes_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bundled_folder()
    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype=torch.float32)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]

    def add_more(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, backend, "qwen2", eos=0, eot=2)
        writer.add_chat_template(template)

    family = type(model).__name__.removesuffix("ForCausalLM")
    path = str(write(tmp_path / "toy.gguf", family, model, {}, Type.F32, add_more))
    params = SamplingParams(temperature=0, max_tokens=40)
    talk: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    texts = []
    for name in (None, path):
        with LLM(name, dtype="float32") as llm:
            outputs = [*llm.generate(["def add("], params), *llm.chat(talk, params)]
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert "42" in texts[1][1]
    own_template = "[{{ messages[0].content }}]"
    with LLM(path, executor="dry", chat_template=own_template) as llm:
        assert llm.chat(talk, params)[0].prompt == "[What is 17 + 25?]"
    draft = {
        "method": "draft_model",
        "model": str(bundled_folder("draft")),
        "num_speculative_tokens": 3,
    }
    setup = prepare(EngineArgs(model=path, speculative_config=draft), limit=10**9)
    assert setup.draft is not None  # has the same tokens
    assert main(["plan", "--model", path, "--dtype", "bfloat16"]) == 0
    assert "toy.gguf" in capsys.readouterr().out


def tensors(node: Any) -> list[Tensor]:
    """All tensors of a tree of weights."""
    if isinstance(node, Tensor):
        return [node]
    inner: Any = node if isinstance(node, tuple) else ()
    if has(type(node)):
        inner = [getattr(node, attribute.name) for attribute in fields(type(node))]
    return [tensor for child in inner for tensor in tensors(child)]
