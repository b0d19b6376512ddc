"""The model's logits against transformers', however a sequence is cut, placed and
batched.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.models.architecture.batch import Batch, BatchRow, make_batch
from minfer.effects.models.architecture.dense import DenseWeights
from minfer.effects.models.architecture.layers import FeedForwardWeights
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.kernels.leaves import Norm
from minfer.kernels.plain import normalise
from tests.effects.tiny_model import BesideTheirs, decode_batch, read_spec, width_of

BLOCKS = 40


@frozen(eq=False)
class Model(BesideTheirs):
    def run(
        self, cache: KVCache, rows: list[BatchRow] | Batch, block_size: int = 0
    ) -> Tensor:
        batch = rows if isinstance(rows, Batch) else make_batch(rows, block_size)
        return forward(self.spec, self.weights, batch, cache)


def build(folder: Path, dtype: str = "float32", **config: Any) -> Model:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        **config,
    }
    hf_model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes)).train(False)
    for name, parameter in hf_model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    hf_model.save_pretrained(folder)
    spec = read_spec(folder)
    return Model(spec, load_weights(folder, spec, dtype), hf_model)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(tmp_path_factory.mktemp("model"))


def sequence(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(160) for i in range(length)]


def shuffled(block_size: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Disjoint block tables in random order, each with a block to spare."""
    needs = [-(-length // block_size) + 1 for length in lengths]
    ids = list(range(sum(needs)))
    random.Random(seed).shuffle(ids)
    return [[ids.pop() for _ in range(need)] for need in needs]


def close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "config",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-2,
        },
    ],
)
def test_every_shape(tmp_path: Path, config: dict[str, Any]) -> None:
    model = build(tmp_path, **config)
    ids = sequence(37)
    [table] = shuffled(16, [37])
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    want = model.logits(ids)
    close(model.run(cache, [BatchRow(ids[:20], 0, table, 20)], 16), want[:20])
    close(model.run(cache, [BatchRow(ids[20:36], 20, table, 16)], 16), want[20:36])
    close(model.run(cache, [BatchRow(ids[36:], 36, table)], 16), want[36:])


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
def test_any_chunking_over_any_table(
    model: Model, block_size: int, chunk: int, order: str
) -> None:
    ids = sequence(75)
    table = shuffled(block_size, [75])[0]
    table = sorted(table) if order == "consecutive" else table
    cache = make_cache(model.spec, 80, block_size, "float32")
    chunk_logits = [
        model.run(
            cache,
            [
                BatchRow(
                    ids[start : start + chunk],
                    start,
                    table,
                    len(ids[start : start + chunk]),
                )
            ],
            block_size,
        )
        for start in range(0, 75, chunk)
    ]
    close(torch.cat(chunk_logits), model.logits(ids))


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_mixed_batches(model: Model, block_size: int) -> None:
    """Decode rows, first chunks, later chunks and unsampled chunks in one step, in any
    order.
    """
    lengths = [40, 21, 33, 9, 64, 5, 18]
    computed = [39, 0, 12, 8, 30, 0, 17]  # computed before the step under test
    sample = [1, 21, 0, 1, 2, 1, 0]
    tables = shuffled(block_size, lengths)
    cache = make_cache(model.spec, sum(map(len, tables)), block_size, "float32")
    texts = [sequence(length, seed) for seed, length in enumerate(lengths)]
    model.run(
        cache,
        [
            BatchRow(t[:c], 0, b, 0)
            for t, c, b in zip(texts, computed, tables, strict=True)
            if c
        ],
        block_size,
    )
    rows = [
        BatchRow(t[c:], c, b, s)
        for t, c, b, s in zip(texts, computed, tables, sample, strict=True)
    ]
    logits = model.run(cache, rows, block_size)
    expected = [
        model.logits(text)[len(text) - s :] for text, s in zip(texts, sample, strict=True)
    ]
    close(logits, torch.cat(expected))
    # What the step wrote is read by the next.
    for text, table in zip(texts, tables, strict=True):
        last = model.run(cache, [BatchRow(text[-1:], len(text) - 1, table)], block_size)
        close(last, model.logits(text)[-1:])


@pytest.mark.parametrize("spread", ["even", "uneven", "equal"])
def test_device_rows_decode_greedily_like_generate(
    model: Model,
    spread: str,
) -> None:
    lengths = {"even": [20, 23, 29, 17], "uneven": [3, 400, 5, 7, 4], "equal": [12] * 3}[
        spread
    ]
    steps, block_size = 12, 16
    tables = shuffled(block_size, [length + steps for length in lengths])
    cache = make_cache(model.spec, sum(map(len, tables)), block_size, "float32")
    texts = [sequence(length, seed) for seed, length in enumerate(lengths)]
    tokens = model.run(
        cache, [BatchRow(t, 0, b) for t, b in zip(texts, tables, strict=True)], block_size
    ).argmax(-1)
    positions = torch.tensor(lengths)
    # Beyond a row's own blocks the executor's table holds leftovers, here out of range.
    table = torch.full((len(lengths), 64), 1 << 20)
    for i, row in enumerate(tables):
        table[i, : len(row)] = torch.tensor(row)
    tokens_by_step = [tokens]
    for _ in range(steps):
        logits = model.run(cache, decode_batch(tokens, positions, table, block_size))
        tokens, positions = logits.argmax(-1), positions + 1
        tokens_by_step.append(tokens)
    for text, generated in zip(
        texts, torch.stack(tokens_by_step, 1).tolist(), strict=True
    ):
        expected = model.logits(text + generated)
        assert generated == expected[len(text) - 1 : -1].argmax(-1).tolist()


def test_device_rows_beside_chunks(model: Model) -> None:
    texts = [sequence(30, 1), sequence(31, 2), sequence(45, 3), sequence(10, 4)]
    tables = shuffled(16, [30, 31, 45, 10])
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    model.run(
        cache,
        [
            BatchRow(texts[0][:-1], 0, tables[0], 0),
            BatchRow(texts[1][:-1], 0, tables[1], 0),
            BatchRow(texts[2][:44], 0, tables[2], 0),
        ],
        16,
    )
    rows = [BatchRow(texts[i][-1:], 29 + i, tables[i]) for i in range(2)]
    rows += [BatchRow(texts[2][44:], 44, tables[2]), BatchRow(texts[3], 0, tables[3])]
    logits = model.run(cache, rows, 16)
    close(logits, torch.cat([model.logits(text)[-1:] for text in texts]))


def test_nothing_sampled(model: Model) -> None:
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    assert model.run(cache, [BatchRow([1, 2, 3], 0, [0], 0)], 16).shape == (0, 160)
    assert model.run(cache, [BatchRow([4], 3, [0], 0)], 16).shape == (0, 160)


def test_the_last_layer_goes_on_only_with_what_is_sampled(model: Model) -> None:
    cache, work = make_cache(model.spec, BLOCKS, 16, "float32"), []
    for sampled in (1, 32):
        with FlopCounterMode(display=False) as count:
            model.run(cache, [BatchRow(sequence(32), 0, [0, 1, 2], sampled)], 16)
        work.append(count.get_total_flops())
    # The counter does not know products that add to a sum: gate, up and the head are
    # left.
    outs = 2 * width_of(model.spec) + model.spec.vocab_size
    assert work[1] - work[0] == 2 * 31 * model.spec.hidden_size * outs


def test_copied_blocks_serve_a_fork(model: Model) -> None:
    ids = sequence(20)
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    model.run(cache, [BatchRow(ids[:18], 0, [5, 3], 0)], 16)
    cache.data[:, 9] = cache.data[:, 3]
    logits = model.run(cache, [BatchRow(ids[18:], 18, [5, 9], 2)], 16)
    close(logits, model.logits(ids)[18:])


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_half_precision_stays_near_float32(
    tmp_path: Path, dtype: str, worst: float
) -> None:
    model = build(tmp_path, dtype, initializer_range=0.05)
    ids = sequence(60)
    cache = make_cache(model.spec, BLOCKS, 16, dtype)
    [table] = shuffled(16, [60])
    chunk_logits = [
        model.run(cache, [BatchRow(ids[:40], 0, table, 40)], 16),
        model.run(cache, [BatchRow(ids[40:59], 40, table, 19)], 16),
        model.run(cache, [BatchRow(ids[59:], 59, table)], 16),
    ]
    logprobs = torch.cat(chunk_logits).float().log_softmax(-1)
    expected = model.logits(ids).log_softmax(-1)
    kl = (expected.exp() * (expected - logprobs)).sum(-1)
    assert chunk_logits[0].dtype is getattr(torch, dtype)
    assert kl.mean().item() < worst
    assert (logprobs.argmax(-1) == expected.argmax(-1)).float().mean().item() > 0.9


def test_the_cache_may_have_a_type_of_its_own(model: Model) -> None:
    spec = evolve(model.spec, kv_dtype="bfloat16")
    cache, ids = make_cache(spec, BLOCKS, 16), sequence(40)
    assert cache.data.dtype is torch.bfloat16
    chunk_logits = [
        forward(spec, model.weights, make_batch([row], 16), cache)
        for row in (
            BatchRow(ids[:30], 0, [3, 1, 2], 30),
            BatchRow(ids[30:], 30, [3, 1, 2], 10),
        )
    ]
    logprobs, expected = (
        torch.cat(chunk_logits).log_softmax(-1),
        model.logits(ids).log_softmax(-1),
    )
    assert logprobs.dtype is torch.float32
    assert 0 < (expected.exp() * (expected - logprobs)).sum(-1).mean().item() < 0.01


def by_column(weights: FeedForwardWeights | None) -> DenseWeights:
    assert isinstance(weights, DenseWeights)
    weight = weights.gate_up.weight.t().contiguous().t()
    return evolve(weights, gate_up=evolve(weights.gate_up, weight=weight))


def test_weights_by_column_give_the_same(model: Model) -> None:
    weights = evolve(
        model.weights,
        embed=model.weights.embed.t().contiguous().t(),
        layers=tuple(
            evolve(layer, feed_forward=by_column(layer.feed_forward))
            for layer in model.weights.layers
        ),
    )
    ids = sequence(20)
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    logits = forward(
        model.spec, weights, make_batch([BatchRow(ids, 0, [1, 0], 20)], 16), cache
    )
    close(logits, model.logits(ids))


def test_norm_agrees_with_torch() -> None:
    weight = torch.randn(192)
    for scale in (0.0, 1e-3, 1.0, 1e4):
        x = torch.randn(5, 192) * scale
        want = torch.nn.functional.rms_norm(x, (192,), weight, 1e-3)
        torch.testing.assert_close(
            normalise(x, Norm(weight, 1e-3)), want, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(("ids", "start"), [([160], 0), ([-1], 0), ([1], 512)])
def test_out_of_range_inputs_raise(model: Model, ids: list[int], start: int) -> None:
    cache = make_cache(model.spec, BLOCKS, 16, "float32")
    with pytest.raises(IndexError):
        model.run(cache, [BatchRow(ids, start, list(range(40)))], 16)
