"""Trains an EAGLE-3 head for the bundled model on this Python's standard library.

    python -m bench.train_head FOLDER --steps 300

The head reads the streams before layers 2, L // 2 and L - 3 (Li et al. 2025). It learns
the target's own distribution at the first place, and at further ones, which get the
head's own state instead of the target's, as when it drafts (training-time test). Held-out
files are not read. The folder gets a checkpoint with published names.
"""

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from bench.held_out import held_out_texts
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer

ROWS, LENGTH = 8, 192  # of a batch
PEAK_RATE: Final = 3e-3
PLACES: Final = 3  # of a chain that is trained


class Eagle3(nn.Module):
    """A head of one Llama layer; tensors have the names of published checkpoints."""

    def __init__(self, config: Any, ids: Tensor) -> None:
        super().__init__()
        self.config, self.ids, hidden = config, ids, config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * hidden, outputs, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)

    def layer(
        self, states: Tensor, embeds: Tensor, places: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Returns the head's states [rows, tokens, hidden] of the next place: `states`
        are before each token, `places` has keys and values of the places before.
        """
        layer: Any = self.midlayer
        pair = layer.input_layernorm(embeds), layer.hidden_norm(states)
        query, key, value = self._heads(torch.cat(pair, -1))
        places.append((key, value))
        mixed = _attend(query, places).transpose(1, 2).flatten(2)
        states = states + layer.self_attn.o_proj(mixed)
        return states + layer.mlp(layer.post_attention_layernorm(states))

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits of the draft vocabulary."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def _heads(self, pairs: Tensor) -> list[Tensor]:
        """Returns rotated queries and keys, and values: [rows, heads, tokens, dim]."""
        attention: Any = self.midlayer.self_attn
        dim, theta = attention.head_dim, self.config.rope_parameters["rope_theta"]
        turns = theta ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(pairs.shape[1]), turns)
        cos, sin, heads = angles.cos(), angles.sin(), []
        for name in ("q_proj", "k_proj", "v_proj"):
            x = getattr(attention, name)(pairs).unflatten(-1, (-1, dim)).transpose(1, 2)
            if name != "v_proj":
                low, high = x.chunk(2, -1)
                x = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
            repeats = self.config.num_attention_heads // x.shape[1]
            heads.append(x.repeat_interleave(repeats, 1))
        return heads


def _attend(query: Tensor, places: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A token of the last place reads keys of the first place, of the target's states, up
    to as many tokens before it as there are places after the first; then one of each.
    """
    last, scale = len(places) - 1, query.shape[-1] ** -0.5
    (keys, values), later = places[0], range(1, last + 1)
    first = (query @ keys.transpose(-1, -2)) * scale
    first = first + torch.full(first.shape[-2:], -torch.inf).triu(1 - last)
    shifted = [[x.roll(last - n, 2) for x in places[n]] for n in later]
    own = [(query * key).sum(-1, keepdim=True) * scale for key, _ in shifted]
    weights = torch.cat((first, *own), -1).softmax(-1)
    mixed = weights[..., : keys.shape[2]] @ values
    for n, (_, value) in enumerate(shifted):
        mixed = mixed + weights[..., keys.shape[2] + n, None] * value
    return mixed


def delayed(states: Tensor) -> Tensor:
    """Returns the state before each token; zeros before the first."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def target_outputs(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the target's three streams side by side, its embeddings and its logits."""
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    layers = model.config.num_hidden_layers
    read = [out.hidden_states[i] for i in (2, layers // 2, layers - 3)]
    return torch.cat(read, -1), out.hidden_states[0], out.logits


def loss_of(head: Eagle3, model: Any, tokens: Tensor) -> Tensor:
    """Returns the cross entropy of all places with the target's distributions."""
    streams, embeds, logits = target_outputs(model, tokens)
    wanted = logits[..., head.ids].softmax(-1)
    states, places = head.fc(streams), list[tuple[Tensor, Tensor]]()
    loss = torch.zeros(())
    for _ in range(PLACES):
        states = head.layer(delayed(states), embeds, places)
        loss = loss - (wanted * head.logits(states).log_softmax(-1)).sum(-1).mean()
    return loss / PLACES


def train(folder: Path, steps: int, vocab: int, seed: int) -> Eagle3:
    """Trains a head, writes its checkpoint, and returns it."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype="float32")
    tokenizer, held_out = Tokenizer(bundled_folder()), set(held_out_texts())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for f in files if (text := f.read_text("utf-8")) not in held_out]
    text = torch.tensor([token for text in texts for token in tokenizer.encode(text)])
    counts = text.bincount(minlength=model.config.vocab_size)
    ids = counts.topk(vocab).indices.sort().values
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_parameters")
    sizes = {name: getattr(model.config, name) for name in names}
    config: Any = LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False)
    config.max_position_embeddings = model.config.max_position_embeddings
    head, rng = Eagle3(config, ids), random.Random(seed)
    optimizer = torch.optim.AdamW(head.parameters(), PEAK_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps)
    for step in range(steps):
        begins = [rng.randrange(len(text) - LENGTH) for _ in range(ROWS)]
        loss = loss_of(head, model, torch.stack([text[b : b + LENGTH] for b in begins]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} s")
    save(head, folder)
    return head


def save(head: Eagle3, folder: Path) -> None:
    """Writes a head as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.ids] = True
    offsets = head.ids - torch.arange(len(head.ids))
    tensors = {**head.state_dict(), "d2t": offsets, "t2d": known}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**head.config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"draft_vocab_size": len(head.ids), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocab", type=int, default=2048, help="tokens that it drafts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.folder, args.steps, args.vocab, args.seed)
