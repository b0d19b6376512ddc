"""Architectures outside the family table: the same tokens as transformers, or refused by
name.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minfer import LLM, SamplingParams
from minfer.config import ConfigError as SettingError
from minfer.effects.cli.main import main
from minfer.effects.execution.attention import make_cache
from minfer.effects.models import fallback
from minfer.effects.models.batch import Row, make_batch
from minfer.effects.models.checkpoint import (
    CorruptFileError,
    TensorMismatchError,
    read_config,
)
from minfer.effects.models.config_reader import (
    CheckpointError,
    ConfigError,
    UnsupportedModelError,
)
from minfer.effects.models.fallback import fallback_spec, load_fallback
from minfer.effects.models.model import Model
from minfer.effects.setup.options import EngineArgs, prepare
from tests.effects.tiny_fallback import CONFIGS, VOCAB, save, tiny_config

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 12,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 19,
}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "neox"
    save(folder, "gpt_neox")
    return folder


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy continuation."""
    ids = torch.tensor([prompt])
    how = {
        "do_sample": False,
        "max_new_tokens": count,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind)
    rng = random.Random(kind)
    prompts = [
        [rng.randrange(1, VOCAB) for _ in range(n)] for n in (1, 3, 9, 14, 21, 30, 5, 17)
    ]
    wanted = [generated(model, prompt, 12) for prompt in prompts]
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.setup.spec.parameters == sum(p.numel() for p in model.parameters())
        for turn in range(2):
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
            assert turn == 0 or any(output.num_cached_tokens for output in outputs)


def test_windows_are_read_off_the_masks(tmp_path: Path) -> None:
    seen = {}
    for kind in ("gemma3_text", "mixtral", "cohere2", "olmo2"):
        config = {**tiny_config(kind).to_dict()}
        config["architectures"] = [ARCHITECTURES[kind]]
        seen[kind] = fallback_spec(config).windows
    assert seen == {
        "gemma3_text": (6, 6, None),
        "mixtral": (8, 8),
        "cohere2": (8, 8, 8, None),
        "olmo2": (None, None),
    }
    save(tmp_path, "mixtral")
    assert prepare(EngineArgs(model=str(tmp_path), executor="dry")).config.window == 8
    # A window that no sequence can outgrow is none.
    config = {**tiny_config("mixtral", sliding_window=128).to_dict()}
    assert fallback_spec({**config, "architectures": ["MixtralForCausalLM"]}).windows == (
        None,
        None,
    )


ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}


@pytest.mark.parametrize("kind", ["olmo2", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_checked_in_float32_and_left_as_it_was(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    setup = prepare(EngineArgs(model=str(tmp_path), dtype=dtype, executor="dry"))
    kept: list[Any] = []
    real = fallback._self_check

    def check(spec: Any, model: Any, make_cache: Any) -> float:
        kept.append(model)
        error = real(spec, model, make_cache)
        assert error < 1e-4  # far below what roundings of half precision do
        return error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "_self_check", check)
        load_fallback(tmp_path, read_config(tmp_path), setup.spec, make_cache)
    assert {str(p.dtype) for p in kept[0].parameters()} == {f"torch.{dtype}"}


# --- refusals ---------------------------------------------------------------------------

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
        "quantized checkpoints",
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
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name_before_weights_are_read(name: str) -> None:
    kind, architecture, more, message = REFUSED[name]
    config = {"model_type": kind, "architectures": [architecture], **more}
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        fallback_spec(config, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert architecture in str(caught.value) or name == "quantized"


def test_a_config_that_transformers_cannot_read_is_named() -> None:
    config = {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": "many",
    }
    with pytest.raises(ConfigError, match="transformers cannot read it"):
        fallback_spec(config)
    config = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(ConfigError, match="max_position_embeddings must be an integer"):
        fallback_spec({**config, "max_position_embeddings": 8})


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "later tokens"),
        ({"anything_new": 1}, "anything_new"),
    ],
)
def test_attention_refuses_what_it_does_not_know(
    extras: dict[str, Any], message: str
) -> None:
    part = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModelError, match=message):
        fallback._attention(object(), part, part, part, None, **extras)
    with pytest.raises(UnsupportedModelError, match="masks attention"):
        fallback._attention(object(), part, part, part, torch.zeros(1, 1, 1, 1))


# --- the check against itself -----------------------------------------------------------


def ignore_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *given: Any, position_ids: Any = None, **more: Any) -> Any:
        del position_ids
        return forward(self, *given, **more)

    return call


def mix_neighbours(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Every token also sees its predecessor in the packed batch, past attention."""

    def call(self: Any, ids: Any, *given: Any, **more: Any) -> Any:
        out = forward(self, ids, *given, **more)
        return out + out.roll(1, -2)

    return call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("owner", "change"),
    [
        (transformers.GPTNeoXModel, ignore_positions),
        (torch.nn.Embedding, mix_neighbours),
    ],
)
def test_a_model_that_does_not_say_the_same_when_paged_is_refused(
    owner: Any, change: Any, dtype: str, neox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepare(EngineArgs(model=str(neox), dtype=dtype, executor="dry"))
    monkeypatch.setattr(owner, "forward", change(owner.forward))
    with pytest.raises(
        UnsupportedModelError, match="with paged attention its logits differ"
    ):
        load_fallback(neox, read_config(neox), setup.spec, make_cache)


# --- loading ----------------------------------------------------------------------------


def copied(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def load(folder: Path) -> Model:
    config = read_config(folder)
    return load_fallback(folder, config, fallback_spec(config), make_cache)


NORM = "gpt_neox.final_layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: t.pop(NORM), TensorMismatchError, f"missing tensor {NORM}"),
        (
            lambda t: t.update(extra=t[NORM].clone()),
            TensorMismatchError,
            "unexpected tensor extra",
        ),
        (
            lambda t: t.update({NORM: t[NORM][:-1].clone()}),
            TensorMismatchError,
            "do not fit",
        ),
        (lambda t: t[NORM].fill_(torch.nan), CheckpointError, "not finite"),
    ],
)
def test_damaged_weights_are_named(
    change: Any, kind: type[Exception], message: str, neox: Path, tmp_path: Path
) -> None:
    folder = copied(neox, tmp_path, change)
    with pytest.raises(kind, match=message):
        load(folder)


def test_truncated_and_pickled_weights_are_refused(neox: Path, tmp_path: Path) -> None:
    folder = copied(neox, tmp_path, lambda _: None)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(CorruptFileError, match="truncated or corrupt"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickled weights can execute code"):
        load(folder)


def test_code_beside_a_checkpoint_is_not_executed(neox: Path, tmp_path: Path) -> None:
    folder, proof = copied(neox, tmp_path, lambda _: None), tmp_path / "executed"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(proof)!r}, 'w')\n")
    load(folder)
    assert not proof.exists()


def test_random_weights_come_from_the_seed_alone(neox: Path) -> None:
    spec, state = fallback_spec(read_config(neox)), torch.random.get_rng_state()
    batch = make_batch([Row([5, 6, 7], 0, [0])], 4)
    models = [
        load_fallback(neox, read_config(neox), spec, make_cache, seed)
        for seed in (1, 1, 2)
    ]
    made = [model(batch, make_cache(spec, 1, 4)) for model in models]
    assert made[0].equal(made[1])
    assert not made[0].equal(made[2])
    assert torch.random.get_rng_state().equal(state)


def test_longrope_is_run_as_far_as_it_does_not_depend_on_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    model = save(
        tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32
    )
    prompt = list(range(3, 20))
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.setup.config.max_model_len == 32
        params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == generated(model, prompt, 15)
    with pytest.raises(SettingError, match="longer than the 32 tokens"):
        prepare(EngineArgs(model=str(tmp_path), max_model_len=64, executor="dry"))


def test_dynamic_rope_is_at_rest_below_its_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = save(tmp_path, "olmo2", rope_parameters=rope)
    prompts = [list(range(3, 120)), [5, 6, 7]]
    with LLM(str(tmp_path), **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == generated(model, prompt, 11)


def test_options_of_a_known_family_that_minfer_lacks_run_too(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", hidden_act="gelu")
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.setup.spec.parameters
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        output = llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == generated(model, [7, 8, 9], 8)


def test_plan_counts_parameters(neox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(neox), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    count = sum(t.numel() for t in load_file(neox / "model.safetensors").values())
    assert f"{4 * count / 2**10:.2f} KiB" in out
