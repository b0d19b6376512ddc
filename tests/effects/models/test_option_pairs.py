"""Greedy continuations under every pair of options that change a family's forward,
against transformers in float32.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.checkpoint.checkpoint import load_weights
from tests.circles import long
from tests.effects.option_pairs import OPTIONS, pairs
from tests.effects.tiny_families import save
from tests.effects.tiny_model import (
    cache_with_states,
    decode_batch,
    read_spec,
    state_tables,
)

TEXTS, PROMPT, NEW = 50, 24, 12  # continuations, past both windows
BLOCK = 4
# Of transformers' own logits, against its float64: what is nearer is a tie, as one token
# of gpt-oss was. All configs together have 119,400 tokens.
ROUNDING = 1e-3
# Of those of recurrent layers: transformers computes them in chunks.
RECURRENT_ROUNDING = 2e-3
STATE_BLOCK = 16  # with room for a unit of each state


def check(folder: Path, family: str, config: dict[str, Any]) -> None:
    """No token of a continuation is another one than transformers' best, but for
    ties.
    """
    hf_model: Any = save(str(folder), family, config)
    spec = read_spec(folder)
    weights = load_weights(folder, spec, "float32")
    block = STATE_BLOCK if spec.has_states else BLOCK
    draw, blocks = random.Random(0), -(-(PROMPT + NEW) // block)
    texts = [draw.choices(range(160), k=PROMPT) for _ in range(TEXTS)]
    table = torch.arange(TEXTS * blocks).view(TEXTS, blocks)
    states = state_tables(spec, block, TEXTS * blocks, TEXTS)
    cache = cache_with_states(spec, TEXTS * blocks, block, states, max_model_len=64)
    rows = [
        BatchRow(text, 0, line, state=state)
        for text, line, state in zip(texts, table.tolist(), states, strict=True)
    ]
    with torch.inference_mode():
        tokens_by_step = [
            forward(spec, weights, make_batch(rows, block), cache).argmax(-1)
        ]
        for step in range(NEW - 1):
            positions = torch.full((TEXTS,), PROMPT + step)
            decode = decode_batch(tokens_by_step[-1], positions, table, block, states)
            tokens_by_step.append(forward(spec, weights, decode, cache).argmax(-1))
        generated = torch.stack(tokens_by_step, 1)
        ids = torch.cat((torch.tensor(texts), generated), 1)
        logits = hf_model(ids).logits[:, PROMPT - 1 : -1]
    rounding = RECURRENT_ROUNDING if spec.has_states else ROUNDING
    behind = logits.amax(-1) - logits.gather(-1, generated[..., None])[..., 0]
    assert behind.max() <= rounding, config


@pytest.mark.parametrize(
    "family", ["Qwen3", *long(family for family in OPTIONS if family != "Qwen3")]
)
def test_continuations_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    check(tmp_path, family, pairs(family)[0])


@pytest.mark.claimed
@pytest.mark.parametrize("family", OPTIONS)
def test_continuations_of_all_pairs_are(family: str, tmp_path: Path) -> None:
    for config in pairs(family):
        check(tmp_path, family, config)
