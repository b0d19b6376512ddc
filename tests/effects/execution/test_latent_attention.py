"""The three ways to compute multi-head latent attention agree; what the latents save."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from minfer.effects.execution.cpu.attention_reads import LayerKind, plan_reads
from minfer.effects.execution.cpu.latent_attention import LatentRead
from minfer.effects.execution.cpu.layer_cache import LayerCache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.kernels.leaves import LatentWeights, Linear, Norm
from tests.effects.published_configs import PUBLISHED

BLOCK, KIND = 16, LayerKind(0, None)
SMALL = {
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "kv_lora_rank": 64,
}


def mla_of(name: str, **changes: Any) -> MLA:
    spec = parse_spec({**PUBLISHED[name], **changes}, dtype="bfloat16")
    attention = spec.layers[0].attention
    assert isinstance(attention, MLA)
    return attention


@frozen(eq=False)
class Context:
    """Latents of one row, and the queries of its last tokens."""

    mla: MLA
    latents: Tensor  # [context, latent_dim]
    queries: Tensor  # [chunk, heads, query_dim]
    expansion: Tensor  # [heads * (plain_dim + value_dim), rank]

    def to(self, dtype: torch.dtype) -> "Context":
        tensors = (self.latents, self.queries, self.expansion)
        latents, queries, expansion = (tensor.to(dtype) for tensor in tensors)
        return evolve(self, latents=latents, queries=queries, expansion=expansion)

    def naive(self) -> Tensor:
        """Keys and values are written out, and each query attends to them."""
        mla, count, context = self.mla, len(self.queries), len(self.latents)
        latents, rotated = self.latents.split_with_sizes((mla.rank, mla.rope_dim), 1)
        keys_and_values = (latents @ self.expansion.T).view(context, mla.heads, -1)
        keys, values = keys_and_values.split_with_sizes((mla.plain_dim, mla.value_dim), 2)
        keys = torch.cat((keys, rotated[:, None].expand(-1, mla.heads, -1)), 2)
        scores = torch.einsum("qhd,chd->hqc", self.queries, keys) * mla.scale
        later = torch.arange(context) > torch.arange(context - count, context)[:, None]
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("hqc,chd->qhd", shares, values).flatten(1)

    def _read(self) -> LatentRead:
        blocks = -(-len(self.latents) // BLOCK)
        room = blocks * BLOCK - len(self.latents)
        padded = F.pad(self.latents, (0, 0, 0, room)).view(blocks, BLOCK, -1)
        cache = LayerCache.of(padded, padded.dtype)
        linear = Linear(weight=self.expansion, parts=(len(self.expansion),))
        weights = LatentWeights(Norm(self.latents[0], 1e-6), linear)
        return LatentRead(self.mla, cache, weights, self.latents[-len(self.queries) :])

    def chunk(self, way: str) -> Tensor:
        """The queries as a chunk behind its history, by a method of `LatentRead`."""
        count, context = len(self.queries), len(self.latents)
        table = list(range(-(-context // BLOCK)))
        row = BatchRow([0] * count, context - count, table)
        [reads] = plan_reads(make_batch([row], BLOCK), BLOCK, [KIND]).values()
        [chunk] = reads.chunks
        mixed: Tensor = getattr(self._read(), way)(self.queries, chunk)
        return mixed.flatten(1)

    def decoded(self) -> Tensor:
        """Each query as a decode row of its own, which sees the tokens up to its own."""
        count, context = len(self.queries), len(self.latents)
        outputs = []
        for i in range(count):
            length = context - count + i + 1
            table = list(range(-(-length // BLOCK)))
            batch = make_batch([BatchRow([0], length - 1, table)], BLOCK)
            [reads] = plan_reads(batch, BLOCK, [KIND]).values()
            outputs.append(self._read().attend(self.queries[i : i + 1], reads, 1))
        return torch.cat(outputs)


def context_of(mla: MLA, context: int, chunk: int) -> Context:
    draw = torch.Generator().manual_seed(context)
    width = mla.plain_dim + mla.value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return Context(
        mla,
        normal(context, mla.latent_dim),
        normal(chunk, mla.heads, mla.query_dim),
        normal(mla.heads * width, mla.rank) / mla.rank**0.5,
    )


def ways(context: Context) -> dict[str, Tensor]:
    return {
        "latent": context.chunk("_expanded_chunk"),
        "absorbed": context.chunk("_absorbed_chunk"),
        "absorbed, decoded": context.decoded(),
    }


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


CASES = [
    ({**SMALL, "num_attention_heads": 16}, 45, 6),
    ({**SMALL, "num_attention_heads": 16}, 130, 130),
    ({**SMALL, "num_attention_heads": 128}, 33, 2),
]


def check(name: str, changes: dict[str, Any], context: int, chunk: int) -> None:
    exact = context_of(mla_of(name, **changes), context, chunk)
    expected = exact.to(torch.float64).naive()
    for way, actual in ways(exact).items():
        assert error(actual, expected) < 1e-5, way
    assert error(exact.naive(), expected) < 1e-5
    rounded = exact.to(torch.bfloat16)
    expected = rounded.to(torch.float64).naive()
    limit = 2 * error(rounded.naive(), expected)
    assert 0 < limit < 0.1
    for way, actual in ways(rounded).items():
        assert error(actual, expected) <= limit, way


@pytest.mark.parametrize(("changes", "context", "chunk"), CASES)
def test_three_ways_agree(changes: dict[str, Any], context: int, chunk: int) -> None:
    """In float32 within 1e-5; in bfloat16 within twice the error of keys and values that
    are written out in it.
    """
    check("DeepSeek-V2-Lite", changes, context, chunk)


@pytest.mark.long
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3"])
def test_three_ways_agree_at_published_sizes(name: str) -> None:
    """16 and 128 heads, of latents of 512 and 64."""
    is_small = name == "DeepSeek-V2-Lite"
    check(name, {}, 600 if is_small else 150, 160 if is_small else 4)


def test_what_latents_save() -> None:
    """A token's elements in a layer of DeepSeek-V2 and V3, and of others of its sizes.

    Latents: 512 + 64 = 576, whatever the number of heads. All keys and values of the same
    16 heads (naive) are 16 * (128 + 64 + 128) = 5,120, of 128 heads 40,960: 88.75 % and
    98.6 % less. Plain attention with heads of 128 has 2 * 128 a key head: with 16 of them
    4,096 (85.9 % less), with 8 2,048 (71.9 % less), with 4 1,024.

    576 / 1,024 is 56.25 %. That is what latents need of the memory of grouped-query
    attention with 4 key heads of 128, and not what they save, which is 43.75 %.
    """
    latent = mla_of("DeepSeek-V2-Lite")
    assert latent.kv_elements == mla_of("DeepSeek-V3").kv_elements == 576
    naive = latent.heads * (latent.query_dim + latent.value_dim)
    assert (latent.heads, naive) == (16, 5120)
    assert 1 - latent.kv_elements / naive == 0.8875
    left = {}
    for key_heads in (4, 8, 16):
        config = {**PUBLISHED["Qwen3-30B-A3B"], "num_key_value_heads": key_heads}
        plain = parse_spec(config).attentions[0]
        left[key_heads] = latent.kv_elements / plain.kv_elements
    assert left == {4: 0.5625, 8: 0.28125, 16: 0.140625}
