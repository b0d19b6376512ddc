"""A tiny random checkpoint with a byte tokenizer: made in milliseconds, read like any other."""

import json
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from minfer.effects.spec import ModelSpec, parse_spec
from minfer.effects.weights import Weights, named_parts, random_weights

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
            found: Tensor = self.theirs(torch.tensor([ids])).logits[0]
        return found


def write_checkpoint(folder: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
    """Write a checkpoint whose config has these `changes`; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    spec = parse_spec(config)
    weights = random_weights(spec, "float32", seed=1)
    tensors = {name: part.contiguous() for name, part in named_parts(spec, weights)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
