"""Tiny EAGLE-3 heads in checkpoints of their own, and as transformers' layers compute
them, wired as vLLM 0.33 has it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.effects.tiny_families import SIZES
from tests.effects.tiny_heads import WEIGHTS, Drafted, run_layer

DRAFT_VOCAB: Final = 40
OPTIONS: Final[dict[str, Any]] = {
    "draft_vocab_size": DRAFT_VOCAB,
    "use_aux_hidden_state": True,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
# What only training reads.
UNREAD: Final = ("verifier_norm.weight", "verifier_lm_head.weight")


class TheirEagle3(nn.Module):
    """A head of Llama's layer, or Qwen3's, with `OPTIONS` or others, beside the target's
    embedding unless it has one of its own.
    """

    def __init__(
        self, kind: str = "Llama", embed: Tensor | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.options = OPTIONS | options
        sizes = SIZES | {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}
        self.config = getattr(transformers, f"{kind}Config")(**sizes)
        self.config._attn_implementation = "eager"
        module = getattr(transformers.models, kind.lower())
        model = getattr(module, f"modeling_{kind.lower()}")
        torch.manual_seed(0)
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        norm_class = getattr(model, f"{kind}RMSNorm")
        streams = len(self.options["eagle_aux_hidden_state_layer_ids"])
        self.layer = getattr(model, f"{kind}DecoderLayer")(self.config, 0)
        self.rotary_emb = getattr(model, f"{kind}RotaryEmbedding")(self.config)
        self.layer.hidden_norm = norm_class(size, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.layer.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, narrow.bias is not None)
            setattr(self.layer.self_attn, name, wide)
        width = self.options.get("target_hidden_size", size)
        if self.options["use_aux_hidden_state"]:
            self.fc = nn.Linear(streams * width, size, bias=False)
        self.norm = norm_class(size, eps)
        if self.options["norm_before_fc"]:
            self.input_norm = norm_class(streams * width, eps)
        if self.options["fc_norm"]:
            self.fc_norm = nn.ModuleList(norm_class(width, eps) for _ in range(streams))
        self.lm_head = nn.Linear(size, self.options["draft_vocab_size"], bias=False)
        for name, weight in self.named_parameters():
            nn.init.normal_(weight, float("norm" in name), 0.3)
        ids = torch.randperm(self.config.vocab_size)[: len(self.lm_head.weight)]
        self.target_ids = ids.sort().values
        self.own_embed = embed is None
        self.embed = torch.randn(self.config.vocab_size, size) if embed is None else embed

    def project(self, streams: Tensor) -> Tensor:
        """The state of each token, of its streams [tokens, streams * hidden]."""
        with torch.inference_mode():
            if self.options["norm_before_fc"]:
                streams = self.input_norm(streams)
            if self.options["fc_norm"]:
                parts = streams.chunk(len(self.fc_norm), -1)
                pairs = zip(self.fc_norm, parts, strict=True)
                streams = torch.cat([norm(part) for norm, part in pairs], -1)
            states: Tensor = self.fc(streams)
        return states

    def draft(self, states: Tensor, tokens: Sequence[int]) -> Drafted:
        """What follows behind the tokens, each beside the state of the token before."""
        with torch.inference_mode():
            embeddings = self.embed[torch.tensor(tokens)]
            hidden = run_layer(self, _Layer(self, embeddings), states)
            normed = self.norm(hidden)
            logits = torch.full((len(tokens), len(self.embed)), float("-inf"))
            logits[:, self.target_ids] = self.lm_head(normed)
        return Drafted(normed if self.options["norm_output"] else hidden, logits)

    def tensors(self, layer: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint in which the layer is called so."""
        ids = self.target_ids
        known = torch.zeros(len(self.embed), dtype=torch.bool).index_fill(0, ids, True)
        weights = {
            name.replace("layer.", f"{layer}.", 1)
            if name.startswith("layer.")
            else name: weight.detach().clone()
            for name, weight in self.named_parameters()
        }
        own = {"embed_tokens.weight": self.embed} if self.own_embed else {}
        return weights | own | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


class _Layer:
    """The first layer of a head, called as a decoder layer is."""

    def __init__(self, head: TheirEagle3, embeddings: Tensor) -> None:
        self.head, self.embeddings = head, embeddings
        self.self_attn = head.layer.self_attn

    def __call__(self, hidden: Tensor, **options: Any) -> Tensor:
        layer = self.head.layer
        normed = layer.hidden_norm(hidden)
        residual = normed if self.head.options["norm_before_residual"] else hidden
        rows = torch.cat((layer.input_layernorm(self.embeddings)[None], normed), -1)
        attended, *_ = self.self_attn(hidden_states=rows, **options)
        hidden = residual + attended
        result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return result


def save_eagle3(folder: Path, theirs: TheirEagle3, **changes: Any) -> Path:
    """Write a head as SpecForge does, its config with `changes`; None removes a key."""
    kind = theirs.config.model_type
    config = theirs.config.to_dict() | theirs.options
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": kind}
    return _save(folder, config | changes, theirs.tensors("midlayer"))


def save_by_speculators(folder: Path, theirs: TheirEagle3, **changes: Any) -> Path:
    """Write a head as speculators does."""
    config = theirs.options | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": theirs.config.to_dict(),
    }
    size = theirs.config.hidden_size
    unread = {name: torch.zeros(size) for name in UNREAD}
    return _save(folder, config | changes, theirs.tensors("layers.0") | unread)


def _save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    present = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(present))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, {"format": "pt"})
    return folder
