"""Chunks whose latents are expanded mean what absorbed ones and the CPU's do: in one
cache, and in an engine.
"""

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.execution.cuda import latent_attention
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.execution.device import routes
from minfer.effects.models import mla as sizes
from minfer.effects.models.batch import Batch, BatchRow, make_batch
from minfer.effects.models.cache_layout import one_group
from minfer.effects.models.mla import MLA
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import parse_spec
from minfer.effects.models.weights import random_weights
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.leaves import LatentWeights, Linear, Norm
from minfer.records.messages import Discarded
from tests.effects.execution.test_verified import guessing
from tests.effects.execution.tiny_engine import VOCAB, Model, Run, Tokens, requests
from tests.effects.tiny_families import VARIANTS, written

CPU = torch.device("cpu")
BLOCK = 4
SPEC = parse_spec(
    written("DeepseekV2", VARIANTS["DeepseekV2", "greedy"] | {"vocab_size": VOCAB}),
    dtype="float32",
)


def mla_of(spec: ModelSpec) -> MLA:
    attention = spec.layers[0].attention
    assert isinstance(attention, MLA)
    return attention


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three heads at a time, and few tokens of the history."""
    mla = mla_of(SPEC)
    monkeypatch.setattr(sizes, "EXPANDED", 3 * 4 * (mla.plain_dim + mla.value_dim) * 9)


def with_expanded(batch: Batch, more: int = 0) -> Batch:
    """The same step, its chunks' latents expanded, and a padding chunk behind them."""
    chunks = batch.chunks
    assert chunks is not None
    four = chunks.rows, chunks.starts, chunks.counts, chunks.offsets
    rows, starts, counts, offsets = (torch.cat((one, one[:1] * 0)) for one in four)
    history = int(starts.sum()) + more
    given = rows, starts, counts, batch.table, chunks.longest, history, BLOCK
    padded = evolve(chunks, rows=rows, starts=starts, counts=counts, offsets=offsets)
    return evolve(batch, chunks=evolve(padded, expanded=ExpandedWork.of(*given)))


def check(batches: list[Batch]) -> None:
    """Each of the batches in turn, with the GPU's cache in both ways, and the CPU's."""
    mla, draw = mla_of(SPEC), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    width = mla.heads * (mla.plain_dim + mla.value_dim)
    weights = LatentWeights(
        Norm(normal(mla.rank), 1e-6),
        Linear(weight=normal(width, mla.rank), parts=(width,)),
    )
    make = SPEC, one_group(SPEC), 40, BLOCK, 64, CPU
    absorbed, expanded = CudaCache.make(*make), CudaCache.make(*make)
    plain = make_cache(SPEC, 40, BLOCK, "float32", max_model_len=64)
    for cache in (absorbed, expanded):
        cache.data.fill_(torch.nan)  # what a sequence has not written is not read
    for batch in batches:
        count = len(batch.tokens)
        query = normal(count, mla.heads * mla.query_dim)
        latent = normal(count, mla.latent_dim)
        given = query.clone(), latent.clone(), weights
        wanted = absorbed.mix_latent(batch, 0, *given)
        tried = [plain.mix_latent(batch, 0, query.clone(), latent.clone(), weights)]
        for more in (0, 5):
            other = with_expanded(batch, more) if batch.chunks is not None else batch
            given = query.clone(), latent.clone(), weights
            tried.append(expanded.mix_latent(other, 0, *given))
        for found in tried:
            assert (found - wanted).norm() / wanted.norm() < 1e-5
        torch.testing.assert_close(expanded.data, absorbed.data, equal_nan=True)


@pytest.mark.usefixtures("small_pieces")
def test_chunks_decode_rows_and_their_histories() -> None:
    pieces = mla_of(SPEC).pieces(16, 4)
    assert (pieces.heads, pieces.tokens) == (1, 27)
    tables = ([3, 7, 1, 10, 11, 12], [5, 0, 9, 2, 14, 15], [6, 4, 8, 20, 21, 22, 23, 24])
    done, batches = [0, 0, 0], []
    for counts in ((9, 7, 2), (1, 6, 25), (4, 1, 1), (2, 3, 2), (1, 1, 1), (3, 1, 1)):
        rows = zip(counts, done, tables, strict=True)
        batches.append(make_batch([BatchRow([0] * n, at, t) for n, at, t in rows], BLOCK))
        done = [start + n for start, n in zip(done, counts, strict=True)]
    check(batches)


@pytest.mark.usefixtures("small_pieces")
def test_two_rows_share_a_history() -> None:
    """A prefix hit: its blocks are of another row."""
    first = make_batch([BatchRow([0] * 13, 0, [3, 7, 1, 10])], BLOCK)
    tables = [3, 7, 1, 30, 31], [3, 7, 1, 20, 21]
    both = make_batch([BatchRow([0] * 6, 12, table) for table in tables], BLOCK)
    check([first, both])


@pytest.mark.long
@pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
@pytest.mark.usefixtures("device_kind", "small_pieces")
@pytest.mark.parametrize("case", ["chunks", "drafts"])
def test_tokens_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(None, SPEC, random_weights(SPEC, "float32", 0))
    reference = Run.start(model).serve(requests(0))
    seen = set[tuple[bool, bool]]()
    expand = latent_attention.LatentLayer._expand

    def noted(self: Any, work: ExpandedWork, *given: Tensor) -> None:
        seen.add((len(work.bounds) > 2, work.slots.shape[1] > 0))
        expand(self, work, *given)

    monkeypatch.setattr(latent_attention.LatentLayer, "_expand", noted)
    monkeypatch.setattr(routes, "EXPAND_FROM", 2)
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 0)
    assert served(case, model, reference) == reference
    assert seen >= {(True, True), (False, False)}  # several chunks, a history


def served(case: str, model: Model, reference: Tokens) -> Tokens:
    """Shared prefixes, and prompts in several chunks; with drafts beside them, or not."""
    sizes = {"max_num_batched_tokens": 20, "depth": 2}
    if case == "chunks":
        run = Run.start(model, **sizes)
    else:
        run, _ = guessing(model, reference, 0.8, 3, **sizes)
    tokens = run.serve(requests(0), arrival_gap=1)
    assert not run.count(Discarded)
    return tokens
