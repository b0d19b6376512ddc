"""The kernels of recurrent layers in whole models, on a GPU, or else by Triton's
interpreter: logits are those of transformers.
"""

import random
from pathlib import Path

import pytest
import torch
from attrs import evolve

from minfer import kernels
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.layout.cache_layout import one_group, with_states
from minfer.kernels.state_work import StateWork
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import read_spec, state_tables

BLOCK = 4
INSIDE = 12  # where a state is kept inside the first chunk
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One of each type of recurrent layers.
KEYS = [
    ("Qwen3Next", "one key head"),
    ("KimiLinear", "groups"),
    ("GraniteMoeHybrid", "multipliers"),
    ("Jamba", "biases"),
    ("Lfm2", "plain"),
]


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_chunks_and_decode_rows_give_transformers_logits(
    key: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save(str(tmp_path), key[0], VARIANTS[key])
    spec = read_spec(tmp_path)
    weights = load_weights(tmp_path, spec, "float32", DEVICE)
    layout = with_states(one_group(spec), spec, BLOCK)
    cache = CudaCache.make(spec, layout, 40, BLOCK, 64, torch.device(DEVICE))
    state, saved = state_tables(spec, BLOCK, 20, 2)
    ids = random.Random(1).choices(range(160), k=30)
    table, logits = list(range(8)), []
    monkeypatch.setattr(kernels, "interpreting", DEVICE == "cpu")
    with torch.inference_mode():
        for begin, end in ((0, 19), (19, 27), (27, 28), (28, 29), (29, 30)):
            row = BatchRow(ids[begin:end], begin, table, end - begin, state)
            batch = make_batch([row], BLOCK, DEVICE)
            if begin == 0:
                batch = evolve(batch, states=keeping(batch.states, state, saved))
            logits.append(forward(spec, weights, batch, cache).cpu())
        row = BatchRow(ids[INSIDE:], INSIDE, table, len(ids) - INSIDE, saved)
        again = forward(spec, weights, make_batch([row], BLOCK, DEVICE), cache).cpu()
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(again, expected[INSIDE:], rtol=1e-4, atol=2e-3)


def keeping(work: StateWork | None, *states: list[int]) -> StateWork:
    """The work of one chunk, inside which its state is kept in the second's pages."""
    assert work is not None
    table = torch.tensor(states, dtype=torch.int32, device=DEVICE)
    number, count = torch.tensor([[0], [INSIDE]], dtype=torch.int32, device=DEVICE)
    return evolve(work, table=table).keeping_inside(number, count, 1)
