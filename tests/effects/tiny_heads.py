"""Tiny checkpoints with draft heads, and the heads as transformers' layers compute them.

No class of transformers has a draft head. So a head is made of the decoder layer of its
family there, and what stands around it is written here as vLLM 0.33 has it.

An MTP head's layer is the last one of a model with one layer more: that model is written
as transformers does, with the names of its tensors, and then the last layer is renamed.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.effects.tiny_families import OFFSET_NORMS, class_of, randomise

WEIGHTS: Final = "model.safetensors"
LISTS: Final = ("layer_types", "mlp_layer_types")  # an entry for each layer


@frozen(kw_only=True)
class MtpNames:
    """What a family calls the tensors of its head, whose layer is number `{layers}` in
    the model that is written first.
    """

    layer: str = "model.layers.{layers}."
    embedding_norm: str = "model.layers.{layers}.enorm"
    hidden_norm: str = "model.layers.{layers}.hnorm"
    projection: str = "model.layers.{layers}.eh_proj"
    norm: str = "model.layers.{layers}.shared_head.norm"
    before_feed: str = "post_attention_layernorm"
    chains_normed: bool = False
    # Of the model with one layer more.
    config: Mapping[str, Any] = {}
    count: Mapping[str, Any] = {"num_nextn_predict_layers": 1}


_QWEN: Final = MtpNames(
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
    chains_normed=True,
    config={"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    count={"mtp_num_hidden_layers": 1},
)
_LITE: Final = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
NAMES: Final[Mapping[str, MtpNames]] = {
    "Qwen3Next": _QWEN,
    "Qwen3_5": _QWEN,
    "Qwen3_5Moe": _QWEN,
    "DeepseekV3": MtpNames(chains_normed=True),
    "Glm4Moe": MtpNames(),
    "Glm4MoeLite": MtpNames(config=_LITE),
    "Ernie4_5_Moe": MtpNames(
        layer="model.mtp_block.0.",
        embedding_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        projection="model.mtp_linear_proj.0",
        norm="",
        config={"moe_layer_end_index": 1},
    ),
    "MiMoV2Flash": MtpNames(
        layer="model.mtp.layers.0.",
        embedding_norm="model.mtp.layers.0.enorm",
        hidden_norm="model.mtp.layers.0.hnorm",
        projection="model.mtp.layers.0.eh_proj",
        norm="model.mtp.layers.0.final_layernorm",
        before_feed="pre_mlp_layernorm",
        chains_normed=True,
        config={
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
}


@frozen(eq=False)
class Drafted:
    """What a head computes of tokens."""

    hidden: Tensor  # [tokens, hidden]: the states for the next drafts
    logits: Tensor  # [tokens, vocab]


class TheirMtp(nn.Module):
    """An MTP head around a decoder layer of transformers, as in vLLM."""

    def __init__(self, model: Any, layer: Any, names: MtpNames) -> None:
        super().__init__()
        self.target, self.layer, self.names = model, layer, names
        size, norm_class = model.config.hidden_size, type(model.model.norm)
        self.embedding_norm, self.hidden_norm, self.norm = (
            norm_class(size, model.model.norm_eps) for _ in range(3)
        )
        self.projection = nn.Linear(2 * size, size, bias=False)

    def states(self, ids: Sequence[int]) -> Tensor:
        """The target's last hidden states, behind its final norm: [tokens, hidden]."""
        with torch.inference_mode():
            states: Tensor = self.target.model(torch.tensor([ids])).last_hidden_state[0]
        return states

    def draft(self, states: Tensor, tokens: Sequence[int]) -> Drafted:
        """What follows behind the tokens, each beside the state of the token before."""
        with torch.inference_mode():
            embeddings = self.target.model.embed_tokens(torch.tensor(tokens))
            both = (self.embedding_norm(embeddings), self.hidden_norm(states))
            hidden = self.projection(torch.cat(both, -1))
            hidden = run_layer(self.target.model, self.layer, hidden)
            normed = self.norm(hidden) if self.names.norm else hidden
            logits = self.target.lm_head(normed)
        return Drafted(normed if self.names.chains_normed else hidden, logits)


def run_layer(model: Any, layer: Any, hidden: Tensor) -> Tensor:
    """What a decoder layer of transformers makes of [tokens, hidden], at positions from 0
    on.
    """
    config, length = model.config, len(hidden)
    positions = torch.arange(length)[None]
    distances = positions.T - positions
    window = config.sliding_window if _is_windowed(layer) else None
    hides = (distances < 0) | (distances >= (window or length))
    mask = torch.zeros(1, 1, length, length).masked_fill(hides, float("-inf"))
    rotary = model.rotary_emb
    kind = ("sliding_attention",) if _is_windowed(layer) else ()
    cosines = rotary(hidden[None], positions, *kind)
    result = layer(
        hidden[None],
        attention_mask=mask,
        position_ids=positions,
        position_embeddings=cosines,
    )
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output.reshape(hidden.shape)


def _is_windowed(layer: Any) -> bool:
    return getattr(layer.self_attn, "sliding_window", None) is not None


def save_with_mtp(folder: Path, family: str, config: Mapping[str, Any]) -> TheirMtp:
    """Write a random checkpoint with an MTP head, as it is published; returns the same as
    transformers' layers.
    """
    names = NAMES[family]
    layers = len(names.config.get(LISTS[0], (None,) * config["num_hidden_layers"])) - 1
    sizes = {**config, **names.config, "num_hidden_layers": layers + 1}
    torch.manual_seed(0)
    model_config = class_of(family)(**deepcopy(sizes))
    model_config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(model_config).eval()
    randomise(model, norms_near_one=family not in OFFSET_NORMS)
    model.save_pretrained(folder)
    *own_layers, layer = model.model.layers
    model.model.layers = nn.ModuleList(own_layers)
    model.config.num_hidden_layers = layers
    model.model.norm_eps = model_config.rms_norm_eps
    head = TheirMtp(model, layer, names).eval()
    near = float(family not in OFFSET_NORMS)
    for norm in (head.embedding_norm, head.hidden_norm, head.norm):
        nn.init.normal_(norm.weight, near, 0.3)
    nn.init.normal_(head.projection.weight, 0.0, 0.1)
    _rewrite(folder, head, layers)
    return head


def _rewrite(folder: Path, head: TheirMtp, layers: int) -> None:
    """Rename the last layer of a checkpoint to its head's, and add the rest of it."""
    names = head.names

    def name(stored_name: str) -> str:
        return stored_name.format(layers=layers)

    last = f"model.layers.{layers}."
    tensors = {}
    for stored_name, tensor in load_file(folder / WEIGHTS).items():
        if stored_name.startswith(last):
            inner = stored_name.removeprefix(last)
            inner = inner.replace("post_attention_layernorm", names.before_feed)
            stored_name = name(names.layer) + inner
        tensors[stored_name] = tensor
    parts = {
        names.embedding_norm: head.embedding_norm,
        names.hidden_norm: head.hidden_norm,
        names.projection: head.projection,
        names.norm: head.norm,
    }
    for stored_name, part in parts.items():
        if stored_name:
            tensors[name(stored_name) + ".weight"] = part.weight.detach().clone()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": layers} | names.count
    for key in LISTS:
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    path.write_text(json.dumps(config))
