"""Figures of a pair of folders through transformers: bits per byte, agreement, sizes.

    python -m bench.bundled.measure .carry/bundled-models

The overlap of two distributions, the sum of the smaller of two probabilities, is the
share of the draft's sampled tokens that speculative sampling at temperature 1 accepts.
"""

import argparse
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
from attrs import define
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bench.bundled import corpus
from bench.bundled.dialogues import any_dialogue
from bench.bundled.packing import LEARNT, Conversations
from bench.bundled.prepare import CORPUS, FOLDER
from bench.bundled.vocabulary import CONTEXT

TALKS = 300


@define
class Totals:
    """Sums over tokens."""

    tokens: int = 0
    nats: float = 0.0
    draft_nats: float = 0.0
    same: int = 0
    shared: float = 0.0

    def add(self, follows: Tensor, target: Tensor, draft: Tensor) -> None:
        """Add the tokens behind some logits."""
        self.tokens += len(follows)
        self.nats += float(functional.cross_entropy(target, follows, reduction="sum"))
        self.draft_nats += float(
            functional.cross_entropy(draft, follows, reduction="sum")
        )
        self.same += int((target.argmax(-1) == draft.argmax(-1)).sum())
        self.shared += float(torch.minimum(target.softmax(-1), draft.softmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        """Means over the tokens."""
        means = {
            "nats": self.nats,
            "draft_nats": self.draft_nats,
            "agreement": self.same,
            "overlap": self.shared,
        }
        return {name: round(total / self.tokens, 4) for name, total in means.items()}


@torch.inference_mode()
def measure(folder: Path, data: Path) -> dict[str, Any]:
    """All figures of `folder`/target and `folder`/draft."""
    pair = [
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float32)
        for role in ("target", "draft")
    ]
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    texts = corpus.read(data / CORPUS).held_out
    held = [0]
    for one in tokenizer.encode_batch(texts, add_special_tokens=False):
        held += [*one.ids, 0]
    python, talk = Totals(), Totals()
    for at in range(0, len(held) - 1, CONTEXT):
        row = torch.tensor([held[at : at + CONTEXT + 1]])
        target, draft = (model(row[:, :-1]).logits[0] for model in pair)
        python.add(row[0, 1:], target, draft)
    rng, conversations = Random("measure"), Conversations(tokenizer)
    for tokens in conversations.tokens([any_dialogue(rng) for _ in range(TALKS)]):
        marked = torch.from_numpy(tokens).long()
        ids, learnt = marked & (LEARNT - 1), (marked[1:] & LEARNT) > 0
        target, draft = (model(ids[None, :-1]).logits[0][learnt] for model in pair)
        talk.add(ids[1:][learnt], target, draft)
    size = sum(len(text.encode()) for text in texts)
    folders = {
        role: sum(path.stat().st_size for path in (folder / role).iterdir())
        for role in ("target", "draft")
    }
    return {
        "parameters": {
            role: sum(one.numel() for one in model.parameters())
            for role, model in zip(folders, pair, strict=True)
        },
        "folder_bytes": {**folders, "both": sum(folders.values())},
        "held_out": {"bytes": size, "tokens": python.tokens, **python.figures()},
        "held_out_bits_per_byte": {
            "target": round(python.nats / math.log(2) / size, 4),
            "draft": round(python.draft_nats / math.log(2) / size, 4),
        },
        "answers": {"tokens": talk.tokens, **talk.figures()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="with target/ and draft/ in it")
    parser.add_argument("--data", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(args.folder, args.data), indent=1))


if __name__ == "__main__":
    main()
