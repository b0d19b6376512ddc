"""What a model has learnt, in a second, between two steps of training.

Held-out problems of each task, in one pass: where the likeliest token is the right one at
every place of an answer, that is what the model would write greedily. (Other right
answers count as wrong here; `evaluate` lets the model write, and judges that.)
"""

import math
from collections.abc import Mapping
from random import Random
from typing import Final

import numpy
import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from bench.bundled.dialogues import Dialogue, answered, asked
from bench.bundled.feed import Python, parted
from bench.bundled.packing import Conversations
from bench.bundled.tasks.problem import drawn
from bench.bundled.tasks.tasks import TASKS

EACH: Final = 48  # problems of a task
LENGTH: Final = 640  # tokens; longer ones are left out
CHUNK: Final = 96  # rows at a time
BY_HEART: Final = frozenset({"temperature", "weekday", "calendar", "talk", "code"})


@frozen
class Sheet:
    """Problems of all tasks, as rows of tokens."""

    rows: Tensor
    tasks: list[str]


def sheet(tokenizer: Tokenizer, device: str, seed: int = 1, each: int = EACH) -> Sheet:
    """Held-out problems; of tasks that are learnt by heart, any."""
    rng, conversations = Random(seed), Conversations(tokenizer)
    rows, tasks = [], []
    for name, task in TASKS.items():
        problems = [
            drawn(task.draw, rng, held_out=name not in BY_HEART) for _ in range(each)
        ]
        dialogues = [
            Dialogue([*asked(one), *answered(one)], one.tools) for one in problems
        ]
        for tokens in conversations.tokens(dialogues):
            if len(tokens) <= LENGTH:
                rows.append(numpy.pad(tokens, (0, LENGTH - len(tokens))))
                tasks.append(name)
    return Sheet(torch.from_numpy(numpy.stack(rows)).to(device).int(), tasks)


@torch.no_grad()
def exact(model: nn.Module, problems: Sheet) -> Mapping[str, float]:
    """The share of answers, by task, that are written as expected."""
    found = list[bool]()
    for chunk in torch.split(problems.rows, CHUNK):
        inputs, follows, learnt = parted(chunk)
        wrong = (model(inputs).argmax(-1) != follows) & (learnt > 0)
        found += (~wrong.any(-1)).tolist()
    shares = dict[str, float]()
    for name in TASKS:
        own = [
            right
            for right, task in zip(found, problems.tasks, strict=True)
            if task == name
        ]
        shares |= {name: round(sum(own) / len(own), 3)} if own else {}
    return shares


@frozen
class Held:
    """The held-out files under a model."""

    nats: float  # per token
    bits: float  # per byte


def held_rows(python: Python, length: int, device: str) -> list[Tensor]:
    """The held-out tokens in rows that overlap by one, so that each counts once."""
    held = python.held_out
    spans = [held[at : at + length + 1] for at in range(0, len(held) - 1, length)]
    return [torch.tensor([span], device=device) for span in spans]


@torch.no_grad()
def held_out(model: nn.Module, rows: list[Tensor], of_bytes: int) -> Held:
    """Mean loss per held-out token, and what it comes to in bits per byte."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(row[:, :-1]).float()
        total += float(functional.cross_entropy(logits[0], row[0, 1:], reduction="sum"))
        count += row.shape[1] - 1
    return Held(total / count, total / math.log(2) / of_bytes)
