"""Chunks whose latents are expanded mean what absorbed ones and the CPU's do: in one
cache, and in an engine.
"""

import sys
import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.execution.cuda import latent_attention
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.execution.cuda.latent_attention import LatentLayer
from minfer.effects.execution.device import routes
from minfer.effects.models.architecture import mla as sizes
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.query_scale import QueryScale
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.layout.cache_layout import one_group
from minfer.effects.models.layout.shapes import expansion_bytes
from minfer.effects.setup import memory
from minfer.effects.setup.memory import plan_memory
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.leaves import LatentWeights, Linear, Norm
from minfer.kernels.packages import FLASH
from minfer.records.messages import Discarded
from tests.effects.execution.drafting import guessing
from tests.effects.execution.test_routes import CONFIG
from tests.effects.execution.tiny_engine import VOCAB, Model, Run, Tokens, requests
from tests.effects.published_configs import PUBLISHED
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import with_attention
from tests.kernels.test_flash import of_piece

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


LITE = mla_of(parse_spec(PUBLISHED["DeepSeek-V2-Lite"], dtype="bfloat16"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three heads at a time, and few tokens of the history."""
    mla = mla_of(SPEC)
    monkeypatch.setattr(
        sizes, "MAX_EXPANDED_BYTES", 3 * 4 * (mla.plain_dim + mla.value_dim) * 9
    )


def with_expanded(batch: Batch, extra_slots: int = 0, *, by_flash: bool = False) -> Batch:
    """The same step, its chunks' latents expanded, and a padding chunk behind them:
    without, where flash-attn serves one.
    """
    chunks = batch.chunks
    assert chunks is not None
    four = [chunks.rows, chunks.starts, chunks.counts, chunks.offsets]
    if not by_flash:
        four = [torch.cat((tensor, tensor[:1] * 0)) for tensor in four]
    rows, starts, counts, offsets = four
    history = int(starts.sum()) + extra_slots
    arguments = rows, starts, counts, batch.table, chunks.longest, history, BLOCK
    padded = evolve(chunks, rows=rows, starts=starts, counts=counts, offsets=offsets)
    work = ExpandedWork.of(*arguments)._replace(by_flash=by_flash)
    return evolve(batch, chunks=evolve(padded, expanded=work))


def check(
    batches: list[Batch], *, by_flash: bool = False, spec: ModelSpec = SPEC
) -> None:
    """Each of the batches in turn, with the GPU's cache in both ways, and the CPU's."""
    mla, draw = mla_of(spec), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    width = mla.heads * (mla.plain_dim + mla.value_dim)
    weights = LatentWeights(
        Norm(normal(mla.rank), 1e-6),
        Linear(weight=normal(width, mla.rank), parts=(width,)),
    )
    make = spec, one_group(spec), 40, BLOCK, 64, CPU
    absorbed, expanded = CudaCache.make(*make), CudaCache.make(*make)
    plain = make_cache(spec, 40, BLOCK, "float32", max_model_len=64)
    for cache in (absorbed, expanded):
        cache.data.fill_(torch.nan)  # what a sequence has not written is not read
    for batch in batches:
        count = len(batch.tokens)
        query = normal(count, mla.heads * mla.query_dim)
        latent = normal(count, mla.latent_dim)
        arguments = query.clone(), latent.clone(), weights
        expected = absorbed.mix_latent(batch, 0, *arguments)
        tried = [plain.mix_latent(batch, 0, query.clone(), latent.clone(), weights)]
        for extra_slots in (0,) if by_flash else (0, 5):
            expanded_batch = batch
            if batch.chunks is not None:
                expanded_batch = with_expanded(batch, extra_slots, by_flash=by_flash)
            arguments = query.clone(), latent.clone(), weights
            tried.append(expanded.mix_latent(expanded_batch, 0, *arguments))
        for actual in tried:
            assert (actual - expected).norm() / expected.norm() < 1e-5
        torch.testing.assert_close(expanded.data, absorbed.data, equal_nan=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("query_scale", [None, QueryScale(0.5, 4)])
def test_chunks_decode_rows_and_their_histories(query_scale: QueryScale | None) -> None:
    pieces = mla_of(SPEC).pieces(16, 4)
    assert (pieces.heads, pieces.tokens) == (1, 27)
    tables = ([3, 7, 1, 10, 11, 12], [5, 0, 9, 2, 14, 15], [6, 4, 8, 20, 21, 22, 23, 24])
    starts, batches = [0, 0, 0], []
    for counts in ((9, 7, 2), (1, 6, 25), (4, 1, 1), (2, 3, 2), (1, 1, 1), (3, 1, 1)):
        rows = zip(counts, starts, tables, strict=True)
        batches.append(
            make_batch([BatchRow([0] * n, start, t) for n, start, t in rows], BLOCK)
        )
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
    check(batches, spec=with_attention(SPEC, query_scale=query_scale))


@pytest.mark.usefixtures("small_pieces")
def test_flash_attn_serves_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its stand-in, with decode rows beside the chunk."""
    monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=of_piece))
    tables = [3, 7, 1, 10, 11, 12, 13, 14, 15, 16, 17, 18], [5, 0]
    counts = ((3, 40), (0, 1)), ((43, 5), (1, 1))
    batches = []
    for chunk, is_alone in counts:
        rows = zip((chunk, is_alone), tables, strict=True)
        batch_rows = [BatchRow([0] * n, start, table) for (start, n), table in rows]
        batches.append(make_batch(batch_rows, BLOCK))
    first = make_batch([BatchRow([0] * 3, 0, tables[0])], BLOCK)
    check([first, *batches], by_flash=True)


@pytest.mark.usefixtures("small_pieces")
def test_two_rows_share_a_history() -> None:
    """A prefix hit: its blocks are of another row."""
    first = make_batch([BatchRow([0] * 13, 0, [3, 7, 1, 10])], BLOCK)
    tables = [3, 7, 1, 30, 31], [3, 7, 1, 20, 21]
    shared_batch = make_batch([BatchRow([0] * 6, 12, table) for table in tables], BLOCK)
    check([first, shared_batch])


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """The bytes of tensors that are made in it, at most at once, besides `known`."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.alive = dict[int, int]()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            place = storage.data_ptr()
            if place not in self.known | self.alive.keys():
                self.alive[place] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, place, None)
            self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.usefixtures("small_pieces")
def test_the_memory_of_pieces_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("piece_attention", "flash_piece", "merge_piece"):
        monkeypatch.setattr(latent_attention, name, lambda *_, **__: None)
    mla, count = mla_of(SPEC), 16
    width = mla.heads * (mla.plain_dim + mla.value_dim)
    linear = Linear(weight=torch.zeros(width, mla.rank), parts=(width,))
    weights = LatentWeights(Norm(torch.zeros(mla.rank), 1e-6), linear)
    cache = torch.zeros(40, BLOCK, mla.latent_dim)
    layer = LatentLayer(mla, cache, 0, torch.zeros(0), weights, 1)
    planned, sizes = mla.pieces(count, 4).bytes, list[int]()
    for history, by_flash in product((0, 100), (False, True)):
        batch = with_expanded(make_batch([BatchRow([0] * count, 100, range(40))], BLOCK))
        assert batch.chunks is not None
        work = batch.chunks.expanded
        assert work is not None
        work = work._replace(slots=work.slots[:, :history], by_flash=by_flash)
        query = torch.zeros(count, mla.heads, mla.query_dim)
        out = torch.zeros(count, mla.heads, mla.value_dim)
        arguments = query, batch.slots[0], out
        with Held(
            cache, linear.weight, work.slots, work.bounds, *arguments
        ) as held_memory:
            layer._expand(work, *arguments)
        sizes.append(held_memory.most)
    assert 0.7 * planned < max(sizes) <= planned + 100  # and bounds


def test_pieces_of_deepseeks_sizes() -> None:
    """128 MiB of 512 bytes for each head of a token."""
    three = mla_of(parse_spec(PUBLISHED["DeepSeek-V3"], dtype="bfloat16"))
    for spec, tokens, heads, size in (
        (LITE, 2048, 16, 16384),
        (LITE, 8192, 16, 16384),
        (three, 2048, 128, 2048),
        (three, 8192, 32, 8192),
        (three, 1 << 20, 1, 1 << 18),
    ):
        pieces = spec.pieces(tokens, 2)
        assert (pieces.heads, pieces.tokens) == (heads, size)
        assert pieces.bytes < 4 * sizes.MAX_EXPANDED_BYTES or tokens == 1 << 20
    assert expansion_bytes(SPEC, CONFIG) == 0  # all steps are captured


def test_expansion_is_part_of_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(PUBLISHED["DeepSeek-V2-Lite"], dtype="bfloat16")
    config = evolve(CONFIG, max_num_batched_tokens=8192)
    before = plan_memory(spec, config, None, cuda=True, num_blocks=999).activations
    assert expansion_bytes(spec, config) == LITE.pieces(8192, 2).bytes
    monkeypatch.setattr(memory, "expansion_bytes", lambda *_: 0)
    without = plan_memory(spec, config, None, cuda=True, num_blocks=999).activations
    assert before - without == LITE.pieces(8192, 2).bytes


@pytest.mark.long
@pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
@pytest.mark.usefixtures("device_kind", "small_pieces")
@pytest.mark.parametrize("case", ["chunks", "drafts"])
def test_tokens_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(None, SPEC, random_weights(SPEC, "float32", 0))
    reference = Run.start(model).serve(requests(0))
    works = set[tuple[bool, bool]]()
    expand = LatentLayer._expand

    def noted(self: Any, work: ExpandedWork, *tensors: Tensor) -> None:
        works.add((len(work.bounds) > 2, work.slots.shape[1] > 0))
        expand(self, work, *tensors)

    monkeypatch.setattr(LatentLayer, "_expand", noted)
    monkeypatch.setattr(routes, "MIN_EXPAND_TOKENS", 2)
    monkeypatch.setattr(routes, "captured_tokens", lambda *_: 0)
    assert served(case, model, reference) == reference
    assert works >= {(True, True), (False, False)}  # several chunks, a history


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
