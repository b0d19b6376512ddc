"""Every row of the family table, and every way of writing its options, against
transformers.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve, frozen
from torch import Tensor

from minfer.config import EngineConfig
from minfer.effects.execution.attention import KVCache, make_cache, rope_table
from minfer.effects.models.batch import Batch, Row, make_batch
from minfer.effects.models.checkpoint import load_weights
from minfer.effects.models.config_reader import ConfigError, UnsupportedModelError
from minfer.effects.models.families import FAMILIES
from minfer.effects.models.model import forward
from minfer.effects.models.rope import Rope, inverse_frequencies
from minfer.effects.models.shapes import activation_bytes, mask_bytes, parameter_count
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import parse_spec
from minfer.effects.models.weights import named_parts, random_weights
from tests.effects.tiny_families import ROPES, SIZES, VARIANTS, WINDOW, save
from tests.effects.tiny_model import (
    BesideTheirs,
    decode_batch,
    expected_tensors,
    read_spec,
    with_windows,
)

BLOCK = 4
OPTIONS = {
    key: config for key, config in VARIANTS.items() if not key[1].startswith("rope ")
}
TESTED = [
    key for key in VARIANTS if key in OPTIONS or key[0] == "Llama"
]  # rope is everyone's
WINDOWED = [key for key, config in OPTIONS.items() if config["sliding_window"]]


@frozen(eq=False)
class Pair(BesideTheirs):
    def run(self, held: KVCache, rows: list[Row] | Batch) -> Tensor:
        batch = rows if isinstance(rows, Batch) else make_batch(rows, BLOCK)
        return forward(self.spec, self.weights, batch, held)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, name: str) -> Pair:
        folder = tmp_path_factory.mktemp("model")
        theirs = save(str(folder), family, VARIANTS[family, name])
        spec = read_spec(folder)
        return Pair(spec, load_weights(folder, spec, "float32"), theirs)

    return make


def sequence(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(160), k=length)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def forget(spec: ModelSpec, held: KVCache, table: list[int], position: int) -> None:
    """What the engine does to blocks that no query from `position` on reads: others get
    them.
    """
    if None not in spec.windows:
        for i in range(max(0, position + 1 - WINDOW) // BLOCK):
            if table[i] >= 0:
                held.data[:, table[i]] = torch.nan
                table[i] = -1


@pytest.mark.parametrize("key", TESTED, ids=" ".join)
def test_chunks_and_decodes_give_transformers_logits(
    key: tuple[str, str], pair: Any
) -> None:
    """Chunks that end before, at and after a window's edge, then decodes far past it, all
    mixed.
    """
    model: Pair = pair(*key)
    lengths, cuts = [75, 22, 48, 5], [[19, 20, 21, 62], [7, 9, 21], [40, 41, 45], [4]]
    texts = [sequence(length, seed) for seed, length in enumerate(lengths)]
    ids = list(range(60))
    random.Random(0).shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-length // BLOCK))] for length in lengths]
    held = make_cache(model.spec, 60, BLOCK, "float32", max_model_len=80)
    wanted = [model.logits(text) for text in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        rows, want = [], []
        for i, text in enumerate(texts):
            if done[i] < len(text):
                forget(model.spec, held, tables[i], done[i])
                end = next((cut for cut in cuts[i] if cut > done[i]), done[i] + 1)
                rows.append(Row(text[done[i] : end], done[i], tables[i], end - done[i]))
                want.append(wanted[i][done[i] : end])
                done[i] = end
        close(model.run(held, rows), torch.cat(want))


@pytest.mark.parametrize("key", WINDOWED, ids=" ".join)
def test_device_rows_decode_far_past_their_windows(
    key: tuple[str, str], pair: Any
) -> None:
    model: Pair = pair(*key)
    lengths, steps = [3, 25, 50], 45
    texts = [sequence(length, 9 + seed) for seed, length in enumerate(lengths)]
    tables = [list(range(30 * i, 30 * i + 30)) for i in range(3)]
    held = make_cache(model.spec, 90, BLOCK, "float32", max_model_len=120)
    rows = [Row(text, 0, table) for text, table in zip(texts, tables, strict=True)]
    made = [model.run(held, rows).argmax(-1)]
    for step in range(steps):
        positions = torch.tensor(lengths) + step
        for table, position in zip(tables, positions.tolist(), strict=True):
            forget(model.spec, held, table, position)
        decode = decode_batch(made[-1], positions, torch.tensor(tables), BLOCK)
        made.append(model.run(held, decode).argmax(-1))
    for text, ours in zip(texts, torch.stack(made, 1).tolist(), strict=True):
        whole = model.logits(text + ours)
        assert ours == whole[len(text) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("key", WINDOWED, ids=" ".join)
def test_windows_matter_and_are_transformers_own(key: tuple[str, str], pair: Any) -> None:
    model: Pair = pair(*key)
    layers = model.theirs.model.layers
    kinds = getattr(model.theirs.config, "layer_types", None) or ["sliding_attention"] * 3
    assert model.spec.windows == tuple(
        WINDOW if kind == "sliding_attention" else None
        for _, kind in zip(layers, kinds, strict=True)
    )
    ids, table = sequence(60, 1), list(range(15))
    held = make_cache(model.spec, 15, BLOCK, "float32")
    [ours] = model.run(held, [Row(ids, 0, table)])
    full = evolve(model, spec=with_windows(model.spec, None, None, None))
    [other] = full.run(make_cache(full.spec, 15, BLOCK, "float32"), [Row(ids, 0, table)])
    assert (ours - other).abs().max() > 0.1


@pytest.mark.parametrize("key", OPTIONS, ids=" ".join)
def test_weights_follow_from_the_table(key: tuple[str, str], pair: Any) -> None:
    model: Pair = pair(*key)
    theirs = dict(model.theirs.named_parameters())
    ours = dict(named_parts(model.spec, model.weights))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert expected_tensors(model.spec) == {n: tuple(t.shape) for n, t in theirs.items()}
    assert parameter_count(model.spec) == sum(p.numel() for p in theirs.values())
    random_ones = dict(named_parts(model.spec, random_weights(model.spec, "float32")))
    assert {n: t.shape for n, t in random_ones.items()} == {
        n: t.shape for n, t in theirs.items()
    }
    assert all(t.eq(1).all() for n, t in random_ones.items() if n.endswith("norm.weight"))


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 0.05), ("float16", 0.002)])
def test_half_precision_stays_near_float32(
    tmp_path: Path, dtype: str, worst: float
) -> None:
    config = VARIANTS["Qwen3", "biases, windows"] | {"initializer_range": 0.05}
    theirs = save(str(tmp_path), "Qwen3", config)
    spec = read_spec(tmp_path)
    model = Pair(spec, load_weights(tmp_path, spec, dtype), theirs)
    ids, table = sequence(60, 4), list(range(15))
    held = make_cache(spec, 15, BLOCK, dtype)
    parts = [
        model.run(held, [Row(ids[a:b], a, table, b - a)]) for a, b in ((0, 37), (37, 59))
    ]
    parts.append(model.run(held, [Row(ids[59:], 59, table)]))
    ours = torch.cat(parts).float().log_softmax(-1)
    want = model.logits(ids).log_softmax(-1)
    assert parts[0].dtype is getattr(torch, dtype)
    assert (want.exp() * (want - ours)).sum(-1).mean().item() < worst


# --- rope -------------------------------------------------------------------------------


def config_of(family: str = "Llama", **changes: Any) -> dict[str, Any]:
    """A config as transformers writes it, with `changes`; ... removes a key."""
    made = getattr(transformers, f"{family}Config")(**SIZES).to_dict()
    made |= {"architectures": [f"{family}ForCausalLM"]} | changes
    return {key: value for key, value in made.items() if value is not ...}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_the_rotary_table_is_transformers_own(name: str, head_dim: int) -> None:
    sizes = SIZES | {"head_dim": head_dim, "max_position_embeddings": 32768}
    scaling = ROPES[name] | {"original_max_position_embeddings": 8192}
    if name in ("default", "linear"):
        scaling.pop("original_max_position_embeddings")
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=dict(scaling))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    spec = parse_spec(
        sizes | {"architectures": ["LlamaForCausalLM"], "rope_parameters": scaling}
    )
    assert spec.rope is not None
    assert torch.equal(inverse_frequencies(spec.rope, head_dim), module.inv_freq)
    at = torch.tensor([0, 1, 7, 100, 8191, 8192, 20000, 32767])
    cos, sin = module(torch.zeros(1), at[None])
    table = rope_table(spec, 32768)[at, :, 0]
    torch.testing.assert_close(table[:, 0], cos[0], rtol=0, atol=2e-7)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(
        head_dim // 2
    )  # as `rotate` wants them
    torch.testing.assert_close(table[:, 1] * signs, sin[0], rtol=0, atol=2e-7)


@pytest.mark.parametrize("original", [None, 4, 40])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_rope_at_the_edges_of_its_range(original: int | None, factor: float) -> None:
    """Bands that are empty or lie outside the head; an original context left out."""
    for extra in (
        {},
        {"truncate": None},
        {"beta_fast": 1.0},
        {"mscale": 2, "mscale_all_dim": 0},
    ):
        scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, **extra}
        if original:
            scaling["original_max_position_embeddings"] = original
        theirs = transformers.LlamaConfig(**SIZES, rope_parameters=dict(scaling))
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
        rope = parse_spec(config_of(rope_parameters=scaling)).rope
        assert rope is not None
        assert torch.equal(inverse_frequencies(rope, 16), module.inv_freq)
        assert rope.attention_factor == module.attention_scaling


@pytest.mark.parametrize("name", ROPES)
def test_old_and_new_forms_of_rope_are_the_same(name: str) -> None:
    new = {"rope_theta": 5e5, **ROPES[name]}
    old: dict[str, Any] = dict(new)
    theta = old.pop("rope_theta")
    wanted = parse_spec(config_of(rope_parameters=new))
    assert wanted.rope is not None
    assert wanted.rope.theta == theta
    for kind in ("rope_type", "type"):
        scaling = {
            kind: old["rope_type"],
            **{k: v for k, v in old.items() if k != "rope_type"},
        }
        found = parse_spec(
            config_of(rope_parameters=..., rope_scaling=scaling, rope_theta=theta)
        )
        assert found == wanted
    nested = parse_spec(config_of(rope_parameters=old, rope_theta=theta))
    assert nested == wanted


def test_rope_scaling_has_precedence_as_in_transformers() -> None:
    changes: dict[str, Any] = {"rope_parameters": ROPES["yarn"]}
    changes |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_spec(config_of(**changes)).rope == Rope("linear", 10000.0, 2.0)
    assert parse_spec(config_of(rope_parameters=None, rope_scaling={})).rope == Rope()
    outer = config_of(rope_parameters=ROPES["yarn"], original_max_position_embeddings=32)
    found = parse_spec(outer).rope
    assert found is not None
    assert found.original == 32


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (ROPES["default"], 256),
        ({"rope_type": "linear", "factor": 2.5}, 640),
        (ROPES["llama3"], 256),
        (ROPES["yarn"] | {"original_max_position_embeddings": 256}, 1024),
        (ROPES["yarn"], 256),
        ({"rope_type": "yarn", "factor": 2.0}, 512),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
            256,
        ),
    ],
)
def test_the_context_that_follows_from_scaling(
    rope: dict[str, Any], context: int
) -> None:
    assert parse_spec(config_of(rope_parameters=rope)).max_position_embeddings == context


def test_a_cache_in_which_blocks_are_given_back_has_the_angles_of_all_positions() -> None:
    spec = parse_spec(config_of("Mistral", sliding_window=8))
    assert len(make_cache(spec, 3, 16).rope) == 256
    assert len(make_cache(spec, 3, 16, max_model_len=100).rope) == 100
    full = parse_spec(config_of("Mistral"))
    assert len(make_cache(full, 3, 16, max_model_len=100).rope) == 48
    assert len(make_cache(evolve(full, rope=None), 3, 16).rope) == 0


# --- configs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Qwen2", {"use_sliding_window": True}),
        ("Qwen2", {"use_sliding_window": True, "num_hidden_layers": 40}),
        ("Qwen2", {"sliding_window": 64}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": None}),
        (
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 1},
        ),
        ("Qwen3", {}),
        ("Mistral", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 17, "head_dim": 8}),
        ("Llama", {"head_dim": None, "attention_bias": True}),
    ],
)
def test_what_a_config_leaves_out_is_transformers_default(
    family: str, config: dict[str, Any]
) -> None:
    sizes = {
        "vocab_size": 16,
        "hidden_size": 512,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        **config,
    }
    made = getattr(transformers, f"{family}Config")(**sizes)
    spec = parse_spec(sizes | {"architectures": [f"{family}ForCausalLM"]})
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(made)
    attention = [layer.self_attn for layer in theirs.model.layers]
    windows = tuple(
        getattr(a, "sliding_window", made.to_dict().get("sliding_window"))
        for a in attention
    )
    assert spec.windows == windows
    assert (spec.head_dim, spec.kv_heads) == (
        attention[0].head_dim,
        made.num_key_value_heads,
    )
    assert spec.max_position_embeddings == made.max_position_embeddings
    assert spec.rms_norm_eps == made.rms_norm_eps
    assert spec.eos_ids == (() if made.eos_token_id is None else (made.eos_token_id,))
    assert spec.tie_word_embeddings == made.tie_word_embeddings
    assert expected_tensors(spec) == {
        name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()
    }


YARN, LLAMA3 = ROPES["yarn"], ROPES["llama3"]


@pytest.mark.parametrize(
    ("family", "changes", "error", "names"),
    [
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            ["'dynamic'", "yarn"],
        ),
        (
            "Llama",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            UnsupportedModelError,
            ["rope_scaling", "'longrope'"],
        ),
        ("Llama", {"rope_scaling": {"rope_type": None}}, UnsupportedModelError, ["None"]),
        (
            "Llama",
            {"rope_scaling": {"rope_type": ["yarn"]}},
            UnsupportedModelError,
            ["yarn"],
        ),
        ("Llama", {"rope_scaling": "yarn"}, ConfigError, ["rope_scaling", "'yarn'"]),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            UnsupportedModelError,
            ["rope_parameters", "each kind of layer"],
        ),
        (
            "Llama",
            {"partial_rotary_factor": 0.5},
            UnsupportedModelError,
            ["partial_rotary_factor"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            UnsupportedModelError,
            ["rope_parameters", "partial_rotary_factor"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear"}},
            ConfigError,
            ["factor", "nothing"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            ConfigError,
            ["factor", "0.5"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"factor": "4"}},
            ConfigError,
            ["factor", "'4'"],
        ),
        ("Llama", {"rope_parameters": YARN | {"factor": 1e300}}, ConfigError, ["factor"]),
        (
            "Llama",
            {"rope_parameters": YARN | {"beta_fast": 0.5}},
            ConfigError,
            ["beta_fast", "0.5"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"rope_theta": 1.0}},
            UnsupportedModelError,
            ["yarn"],
        ),
        (
            "Llama",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            ConfigError,
            ["original_max_position_embeddings", "0"],
        ),
        (
            "Llama",
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            ConfigError,
            ["high_freq_factor", "low_freq_factor"],
        ),
        (
            "Llama",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": None}},
            ConfigError,
            ["low_freq_factor", "None"],
        ),
        (
            "Llama",
            {"rope_theta": -1.0, "rope_parameters": ...},
            ConfigError,
            ["rope_theta", "-1.0"],
        ),
        (
            "Llama",
            {"sliding_window": 64},
            UnsupportedModelError,
            ["sliding_window", "Llama"],
        ),
        (
            "Llama",
            {"layer_types": ["sliding_attention"] * 3},
            ConfigError,
            ["layer_types"],
        ),
        ("Llama", {"attention_bias": "yes"}, ConfigError, ["attention_bias", "'yes'"]),
        ("Llama", {"mlp_bias": 1}, ConfigError, ["mlp_bias", "1"]),
        ("Mistral", {"sliding_window": 0}, ConfigError, ["sliding_window", "0"]),
        ("Mistral", {"sliding_window": "all"}, ConfigError, ["sliding_window", "'all'"]),
        (
            "Mistral",
            {"sliding_window": 8, "layer_types": ["full_attention"] * 3},
            UnsupportedModelError,
            ["layer_types", "MistralForCausalLM"],
        ),
        (
            "Qwen3",
            {"layer_types": ["conv"] * 3},
            UnsupportedModelError,
            ["layer_types", "conv"],
        ),
        (
            "Qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": -1,
                "layer_types": None,
            },
            ConfigError,
            ["max_window_layers", "-1"],
        ),
        ("Qwen3", {"hidden_act": "gelu"}, UnsupportedModelError, ["hidden_act", "gelu"]),
        (
            "Mistral",
            {"quantization_config": {"bits": 4}},
            UnsupportedModelError,
            ["quantization"],
        ),
        ("Qwen3", {"head_dim": 15}, ConfigError, ["head_dim", "15"]),
    ],
)
def test_what_is_refused_is_named(
    family: str, changes: dict[str, Any], error: type[Exception], names: list[str]
) -> None:
    with pytest.raises(error) as caught:
        parse_spec(config_of(family, **changes), "model/config.json")
    for name in [*names, "model/config.json"]:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 1.0},
        {"sliding_window": 64, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    assert parse_spec(config_of(**changes)) == parse_spec(config_of())


def test_masks_of_windows_are_in_the_memory_plan() -> None:
    sizes = EngineConfig(
        num_blocks=1,
        max_model_len=5000,
        block_size=16,
        max_num_seqs=1,
        max_num_batched_tokens=100,
    )

    def masks(*windows: int | None) -> int:
        spec = with_windows(parse_spec(config_of()), *windows)
        found = 100 * mask_bytes(spec, sizes)
        without.add(activation_bytes(spec, sizes) - found)
        return found

    without: set[int] = set()
    assert masks(None, None) == 100 * 5 * 5000
    assert masks(30, 30) == 100 * 5 * (30 + 116)
    assert masks(None, 30) == masks(None) + masks(30)
    assert masks(4990) == masks(None)
    assert len(without) == 1


def test_a_saved_config_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3")))
    assert read_spec(tmp_path).family is FAMILIES["Qwen3ForCausalLM"]
