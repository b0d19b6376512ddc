"""What cannot run is refused by name, before weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.models.config_reader import (
    ConfigReader,
    ModelConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.fallback import fallback_spec
from minfer.effects.models.fallback.classes import resolve

# model_type, architecture, what else the config says, what the refusal says
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "encoder": (
        "t5",
        "T5ForConditionalGeneration",
        {},
        "it is an encoder with a decoder",
    ),
    "recurrent": ("rwkv", "RwkvForCausalLM", {}, "it is recurrent"),
    "state space": (
        "mamba",
        "MambaForCausalLM",
        {},
        r"other than attention \((linear|mamba)",
    ),
    "hybrid": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {},
        r"attention \(linear_attention\)",
    ),
    "chunked": (
        "llama4_text",
        "Llama4ForCausalLM",
        {},
        r"attention \(chunked_attention\)",
    ),
    "multimodal": ("gemma3", "Gemma3ForConditionalGeneration", {}, "it is multimodal"),
    "images": (
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        {"vision_config": {}},
        "multimodal",
    ),
    "ALiBi": ("bloom", "BloomForCausalLM", {}, "not reached through"),
    "own attention": (
        "stablelm",
        "StableLmForCausalLM",
        {},
        "transformers' attention interface",
    ),
    "softcap": ("gemma2", "Gemma2ForCausalLM", {}, r"asks for capped scores \(softcap\)"),
    "sinks": ("gpt_oss", "GptOssForCausalLM", {}, r"asks for attention sinks \(s_aux\)"),
    "MLA": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 2},
        "differ in|tracing",
    ),
    "heads by layer": (
        "gemma4_text",
        "Gemma4ForCausalLM",
        {},
        "attention heads, keys|tracing",
    ),
    "shared keys": (
        "gemma3n_text",
        "Gemma3nForCausalLM",
        {},
        r"layers share keys \(num_kv_shared",
    ),
    "twice a layer": (
        "diffllama",
        "DiffLlamaForCausalLM",
        {},
        "exactly once in|not reached",
    ),
    "bidirectional": (
        "bert",
        "BertLMHeadModel",
        {},
        "attends to other tokens than the last ones",
    ),
    "embeds": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True},
        "other tokens|later tokens",
    ),
    "ignored cap": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping 50.0 is not",
    ),
    "another model's cap": (
        "olmo2",
        "Olmo2ForCausalLM",
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping 30.0 is not",
    ),
    "another head": (
        "gpt2",
        "GPT2ForSequenceClassification",
        {},
        "no causal language model of",
    ),
    "quantized": (
        "gpt2",
        "GPT2LMHeadModel",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config",
    ),
    "unknown": (
        "nobody",
        "NobodyLM",
        {},
        r"transformers \S+ has no model_type 'nobody'$",
    ),
    "own code": (
        "nobody",
        "NobodyLM",
        {"auto_map": {"AutoModelForCausalLM": "code.Nobody"}},
        "is never executed",
    ),
    "another type of rotary scaling": (
        "olmo2",
        "Olmo2ForCausalLM",
        {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'ntk' is not known",
    ),
    "another model's class": (
        "qwen2",
        "MambaForCausalLM",
        {},
        "it is a state space model",
    ),
    "another model's layers": (
        "olmo2",
        "Olmo2ForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types .* is not supported",
    ),
    "windows and other layers": (
        "mixtral",
        "MixtralForCausalLM",
        {
            "num_hidden_layers": 2,
            "sliding_window": 8,
            "layer_types": ["full_attention"] * 2,
        },
        "layer_types .* is not supported",
    ),
}

OF_FIELDS = {
    "another type of rotary scaling",
    "quantized",
    "ignored cap",
    "another model's cap",
    "another model's layers",
    "windows and other layers",
}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **LAYERS},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "mistral", "layer_types": None, "num_hidden_layers": 2.0},
        {"model_type": "olmo2", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "cohere2", **LAYERS},
    ],
)
def test_the_class_is_that_of_auto_model(config: dict[str, Any], tmp_path: Path) -> None:
    written = {key: int(v) if isinstance(v, float) else v for key, v in config.items()}
    (tmp_path / "config.json").write_text(json.dumps(written))
    expected: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    hf_model = resolve(ConfigReader(config, "config.json"))
    assert type(hf_model.config) is type(expected)
    assert hf_model.model is transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(expected)]
    assert getattr(hf_model.config, "layer_types", None) == getattr(
        expected, "layer_types", None
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "initializer_range"])
def test_numbers_that_are_not_finite_are_named(key: str, value: float) -> None:
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(ModelConfigError, match=f"{key} must be a finite number"):
        fallback_spec({**config, key: value})
    with pytest.raises(ModelConfigError, match=f"{key} must be a finite number"):
        fallback_spec({**config, "rope_parameters": {key: value}})


def test_rotary_scalings_of_kinds_of_layers_without_such_are_named() -> None:
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    table = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ModelConfigError, match="rope_parameters: full_attention is no"):
        fallback_spec({**config, "rope_parameters": {"full_attention": table}})


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name_before_weights_are_read(name: str) -> None:
    kind, architecture, changes, message = REFUSED[name]
    config = {"model_type": kind, "architectures": [architecture], **changes}
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        fallback_spec(config, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert architecture in str(caught.value) or name in OF_FIELDS


def test_a_config_that_transformers_cannot_read_is_named() -> None:
    config = {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": "many",
    }
    with pytest.raises(ModelConfigError, match="transformers cannot read it"):
        fallback_spec(config)
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(
        ModelConfigError, match="max_position_embeddings must be an integer"
    ):
        fallback_spec({**config, "max_position_embeddings": 8})


def test_a_config_may_leave_out_its_architectures_and_write_whole_numbers_as_floats(
    neox: Path,
) -> None:
    config = read_config(neox)
    expected = fallback_spec(config)
    sizes = ("hidden_size", "num_attention_heads", "vocab_size")
    floats = {name: float(config[name]) for name in sizes}
    names: list[Any] = [None, [], config["architectures"][0]]
    for architectures in names:
        emitted = {**config, **floats, "architectures": architectures}
        assert fallback_spec(emitted) == expected
    with pytest.raises(
        ModelConfigError, match=r"dtype must be one of .* found 'float64'"
    ):
        fallback_spec({**config, "dtype": "float64"})
    for odd in ("float64", "auto", "torch.float16", 16):
        for key in ("dtype", "torch_dtype"):
            assert fallback_spec({**config, key: odd}, dtype="float32") == expected
    del config["dtype"]
    assert fallback_spec({**config, "torch_dtype": "torch.float32"}) == expected
