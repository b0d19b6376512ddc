"""Trains an EAGLE-3 head for the bundled model on this Python's standard library.

    python -m bench.train_head FOLDER --steps 300

The head reads the residual streams before layers 2, L // 2 and L - 3 (Li et al. 2025).
It learns the target's own distribution, for chains of `PLACES` drafts: the first is made
from the target's states, each other from the head's own. Held-out files are not read.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama as llama

from bench.held_out import held_out_texts
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer

LENGTH: Final = 192  # tokens of a row
RATE: Final = 2e-3
PLACES: Final = 3  # drafts of a chain
VOCAB: Final = 2048  # tokens that the head knows
Places = list[tuple[Tensor, Tensor]]


class Eagle3(nn.Module):
    """A head of one Llama layer; tensors have the names of published checkpoints."""

    def __init__(self, config: Any, ids: Tensor) -> None:
        super().__init__()
        self.config, self.ids, hidden = config, ids, config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = llama.LlamaDecoderLayer(config, 0)
        for name, product in [*self.midlayer.self_attn.named_children()][:3]:  # q, k, v
            pairs = nn.Linear(2 * hidden, len(next(product.parameters())), bias=False)
            setattr(self.midlayer.self_attn, name, pairs)
        self.midlayer.hidden_norm = llama.LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.norm = llama.LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def layer(self, states: Tensor, embeds: Tensor, places: Places) -> Tensor:
        """Returns the head's states [rows, tokens, hidden] of a chain's next place, from
        the states before each token and from keys and values of the `places` before.
        """
        layer: Any = self.midlayer
        pair = layer.input_layernorm(embeds), layer.hidden_norm(states)
        query, key, value = self._heads(torch.cat(pair, -1))
        places.append((key, value))
        mixed = _attend(query, places).transpose(1, 2).flatten(2)
        states = states + layer.self_attn.o_proj(mixed)
        return torch.add(states, layer.mlp(layer.post_attention_layernorm(states)))

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits of the draft vocabulary."""
        return F.linear(self.norm(states), self.lm_head.weight)

    def _heads(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries and keys, and values: [rows, heads, tokens, dim]."""
        attention: Any = self.midlayer.self_attn
        shape = (*pairs.shape[:2], -1, attention.head_dim)
        products = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (x(pairs).view(shape).transpose(1, 2) for x in products)
        angles = self.rotary(pairs, torch.arange(pairs.shape[1])[None])
        query, key = llama.apply_rotary_pos_emb(query, key, *angles)
        shared = query.shape[1] // key.shape[1]
        return query, *(x.repeat_interleave(shared, 1) for x in (key, value))


def delayed(states: Tensor) -> Tensor:
    """Returns the state before each token; zeros before the first."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def _attend(query: Tensor, places: Places) -> Tensor:
    """Returns the attention of the last place's queries: over the first place's keys, of
    as many tokens less as there are later places, and over one key of each later place.
    """
    last, count = len(places) - 1, query.shape[2]
    own = [torch.ones(count - before).diag(-before) for before in reversed(range(last))]
    mask = torch.cat((torch.ones(count, count).tril(-last), *own), 1).log()
    keys, values = (torch.cat(x, 2) for x in zip(*places, strict=True))
    return F.scaled_dot_product_attention(query, keys, values, mask)


def loss_of(head: Eagle3, model: Any, tokens: Tensor) -> Tensor:
    """Returns the cross entropy of all places with the target's distributions."""
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, use_cache=False)
    streams, layers = out.hidden_states, model.config.num_hidden_layers
    wanted = out.logits[..., head.ids].softmax(-1)
    read = [streams[layer] for layer in (2, layers // 2, layers - 3)]
    states, places, loss = head.fc(torch.cat(read, -1)), Places(), torch.zeros(())
    for _ in range(PLACES):
        states = head.layer(delayed(states), streams[0], places)
        loss = loss - (wanted * head.logits(states).log_softmax(-1)).sum(-1).mean()
    return loss / PLACES


def train(folder: Path, steps: int, rows: int) -> None:
    """Trains a head, and writes its checkpoint."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype="float32")
    encode, held_out = Tokenizer(bundled_folder()).encode, {*held_out_texts()}
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for file in files if (text := file.read_text("utf-8")) not in held_out]
    tokens = torch.tensor([id_ for text in texts for id_ in encode(text)])
    counts = tokens.bincount(minlength=model.config.vocab_size)
    config = {**model.config.to_dict(), "num_hidden_layers": 1, "layer_types": None}
    head = Eagle3(LlamaConfig.from_dict(config), counts.topk(VOCAB).indices.sort().values)
    optimizer = torch.optim.AdamW(head.parameters(), RATE, weight_decay=0.0)
    for step in range(steps):
        begins = torch.randint(len(tokens) - LENGTH, (rows, 1))
        loss = loss_of(head, model, tokens[begins + torch.arange(LENGTH)])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    save(head, folder)


def save(head: Eagle3, folder: Path) -> None:
    """Writes a head as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    known = torch.isin(torch.arange(head.config.vocab_size), head.ids)
    tensors = {**head.state_dict(), "d2t": head.ids - torch.arange(VOCAB), "t2d": known}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
    }
    own |= {"draft_vocab_size": VOCAB, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(head.config.to_dict() | own))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8, help=f"of {LENGTH} tokens a step")
    args = parser.parse_args()
    train(args.folder, args.steps, args.rows)
