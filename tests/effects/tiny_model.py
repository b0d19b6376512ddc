"""A tiny random checkpoint with a byte tokenizer: made in milliseconds, read like any
other.
"""

import json
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import Weights, empty_weights, named_parts
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.layout.cache_layout import one_group, with_states

EOS = 256  # after the 256 bytes
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": EOS,
}


@frozen(eq=False)
class BesideTheirs:
    """A model of ours, and the same one as transformers runs it."""

    spec: ModelSpec
    weights: Weights
    theirs: Any

    def logits(self, ids: list[int]) -> Tensor:
        """What transformers' model says after each token: [tokens, vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([ids])).logits[0]
        return logits


def read_spec(folder: str | Path) -> ModelSpec:
    """What config.json in a folder says."""
    return parse_spec(read_config(folder), str(Path(folder) / "config.json"))


def gqa_of(spec: ModelSpec) -> GQA:
    """The attention of its first layer."""
    attention = spec.layers[0].attention
    assert isinstance(attention, GQA)
    return attention


def width_of(spec: ModelSpec) -> int:
    """The width of its first feed-forward."""
    return spec.feed_forwards[0].intermediate_size


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with other attention, in all layers that have one."""
    layers = (
        layer
        if layer.attention is None
        else evolve(layer, attention=evolve(layer.attention, **changes))
        for layer in spec.layers
    )
    return evolve(spec, layers=tuple(layers))


def with_feed_forward(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with another feed-forward, in all layers that have one."""
    layers = (
        layer
        if layer.feed_forward is None
        else evolve(layer, feed_forward=evolve(layer.feed_forward, **changes))
        for layer in spec.layers
    )
    return evolve(spec, layers=tuple(layers))


def with_windows(spec: ModelSpec, *windows: int | None) -> ModelSpec:
    """The spec with one layer for each window, all like its first."""
    first, attention = spec.layers[0], gqa_of(spec)
    layers = (
        evolve(first, attention=evolve(attention, window=window)) for window in windows
    )
    return evolve(spec, layers=tuple(layers))


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model."""
    tensors = named_parts(spec, empty_weights(spec, "float32", "meta"))
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def write_checkpoint(folder: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
    """Write a checkpoint whose config has these `changes`; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    spec = parse_spec(config)
    weights = random_weights(spec, "float32", seed=1)
    tensors = {name: tensor.contiguous() for name, tensor in named_parts(spec, weights)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def state_tables(
    spec: ModelSpec, block_size: int, first_page: int, rows: int
) -> list[list[int]]:
    """The pages of each row's state, from `first_page` on; none without recurrent
    layers.
    """
    count = with_states(one_group(spec), spec, block_size).state_pages
    firsts = (first_page + row * count for row in range(rows))
    return [list(range(first, first + count)) for first in firsts]


def cache_with_states(
    spec: ModelSpec, blocks: int, block_size: int, states: list[list[int]], **options: Any
) -> KVCache:
    """A cache of `blocks` and these pages of states, in which anything may be."""
    count = blocks + sum(map(len, states))
    cache = make_cache(spec, count, block_size, "float32", **options)
    for index, layer in enumerate(spec.layers):
        for part in layer.state_parts:
            cache.state(index).part(part.name).pages[blocks:] = torch.nan
    return cache


def decode_batch(
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    block_size: int,
    states: list[list[int]] | None = None,
) -> Batch:
    """A step of rows of one token each, whose tables have leftovers behind their own
    blocks. `states`: the pages of each row's state, if there are any.
    """
    needs = (positions // block_size + 1).tolist()
    rows = [
        BatchRow([token], position, line[:need].tolist(), state=state)
        for token, position, line, need, state in zip(
            tokens.tolist(),
            positions.tolist(),
            table,
            needs,
            states or [[]] * len(needs),
            strict=True,
        )
    ]
    return evolve(make_batch(rows, block_size), table=table.int()[None])
