"""The rule of states against transformers' functions in plain torch: sequences that come
in steps give what they give at once.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from minfer.kernels import gated_rule_launches
from minfer.kernels.gated_rule import gated_rule
from minfer.kernels.rule_arguments import DecayGates
from minfer.kernels.state_work import StateWork

from .conftest import CUDA, ints
from .paged import PagedRows
from .test_fused import error, randn

L2_EPS = 1e-6
LOW, HIGH = 0.1, 0.9  # the smallest and the largest step of Mamba


class Rule(NamedTuple):
    """A rule of a family, with the weights of its gates."""

    keys: int  # K
    values: int  # V
    key_heads: int
    heads: int
    bias: Tensor
    rates: Tensor  # [heads]
    skip: Tensor | None  # Mamba's

    def run(self, inputs: "Inputs", rows: PagedRows, work: StateWork) -> Tensor:
        """Returns o of a step, of inputs of any device, on the CPU."""
        moved = Inputs(*(x.to(rows.device) for x in inputs))
        return self.to(rows.device).launch(moved, rows, work).cpu()

    def to(self, device: str) -> "Rule":
        """Returns the rule with its weights on a device."""
        skip = None if self.skip is None else self.skip.to(device)
        bias, rates = self.bias.to(device), self.rates.to(device)
        return self._replace(bias=bias, rates=rates, skip=skip)

    def launch(self, inputs: "Inputs", rows: PagedRows, work: StateWork) -> Tensor:
        """Returns o of a step, with all tensors on one device."""
        is_delta = self.skip is None
        low, high = (0.0, math.inf) if is_delta else (LOW, HIGH)
        return gated_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            DecayGates(inputs.raw, self.bias, self.rates, low, high),
            inputs.beta if is_delta else None,
            rows.units,
            work,
            skip=self.skip,
            l2_eps=L2_EPS if is_delta else None,
            scale=self.keys**-0.5 if is_delta else 1.0,
        )


class Inputs(NamedTuple):
    """Tokens of a sequence."""

    q: Tensor  # [tokens, key heads, K]
    k: Tensor
    v: Tensor  # [tokens, heads, V]
    raw: Tensor  # of the decay
    beta: Tensor  # [tokens, heads]

    @classmethod
    def drawn(cls, rule: Rule, tokens: int, seed: int, dtype: torch.dtype) -> "Inputs":
        sizes = rule.key_heads * rule.keys, rule.heads * rule.values
        packed = randn(
            tokens, 2 * sizes[0] + sizes[1], dtype=dtype, device="cpu", seed=seed
        )
        q, k, v = packed.split_with_sizes((sizes[0], *sizes), 1)
        raw = randn(tokens, *rule.bias.shape, dtype=dtype, device="cpu", seed=seed + 1)
        return cls(
            q.view(tokens, rule.key_heads, rule.keys),
            k.view(tokens, rule.key_heads, rule.keys),
            v.view(tokens, rule.heads, rule.values),
            3 * raw,
            randn(tokens, rule.heads, dtype=dtype, device="cpu", seed=seed + 2),
        )

    def tokens(self, begin: int, end: int) -> "Inputs":
        return Inputs(*(x[begin:end] for x in self))


def packed(*parts: Inputs) -> Inputs:
    """Returns the tokens of parts, as views into wider rows, as a convolution gives q, k
    and v.
    """
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    wide = torch.cat([x.flatten(1) for x in joined[:3]], 1)
    views = wide.split_with_sizes([x[0].numel() for x in joined[:3]], 1)
    return Inputs(
        *(v.view(x.shape) for v, x in zip(views, joined[:3], strict=True)), *joined[3:]
    )


Expected = tuple[
    Tensor, Tensor
]  # o [tokens, heads, V], and the states after [heads, K, V]


def of_each_head(inputs: Inputs) -> tuple[Tensor, ...]:
    """Queries and keys of each head of values, as older transformers expect them."""
    q, k, v, raw, beta = (x[None].float() for x in inputs)
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    return q, k, v, raw, beta


def gated_delta(rule: Rule, inputs: Inputs) -> Expected:
    """By transformers' Qwen3-Next, in chunks."""
    q, k, v, raw, beta = of_each_head(inputs)
    decay = -rule.rates * F.softplus(raw + rule.bias)
    out, state = qwen.torch_chunk_gated_delta_rule(
        q,
        k,
        v,
        g=decay,
        beta=beta.sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0]


def recurrent_delta(rule: Rule, inputs: Inputs) -> Expected:
    """By transformers' Qwen3-Next, token by token."""
    q, k, v, raw, beta = of_each_head(inputs)
    decay = -rule.rates * F.softplus(raw + rule.bias)
    out, state = qwen.torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=decay,
        beta=beta.sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0]


def kimi_delta(rule: Rule, inputs: Inputs) -> Expected:
    """By transformers' Kimi-Linear, in chunks."""
    q, k, v, raw, beta = (x[None].float() for x in inputs)
    decay = -rule.rates[:, None] * F.softplus(raw + rule.bias)
    out, state = kimi.chunk_kimi_delta_attention(
        q,
        k,
        v,
        g=decay,
        beta=beta.sigmoid(),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0]


def mamba(rule: Rule, inputs: Inputs) -> Expected:
    """By transformers' Bamba, in chunks."""
    q, k, v, raw, _ = (x[None].float() for x in inputs)
    out, state = bamba.mamba2_chunk_scan(
        v,
        raw,
        -rule.rates,
        k,
        q,
        chunk_size=16,
        D=rule.skip,
        dt_bias=rule.bias,
        dt_softplus=True,
        dt_limit=(LOW, HIGH),
        return_final_states=True,
    )
    return out[0], state[0].mT


def drawn_rule(keys: int, values: int, key_heads: int, heads: int, kind: str) -> Rule:
    draw = torch.Generator().manual_seed(heads)
    bias = (heads, keys) if kind == "kimi" else (heads,)
    return Rule(
        keys=keys,
        values=values,
        key_heads=key_heads,
        heads=heads,
        bias=torch.randn(bias, generator=draw),
        rates=torch.rand(heads, generator=draw) * 2 + 0.01,
        skip=torch.randn(heads, generator=draw) if kind == "mamba" else None,
    )


FAMILIES: list[
    tuple[str, tuple[int, int, int, int], Callable[[Rule, Inputs], Expected]]
] = [
    ("delta", (16, 32, 2, 4), gated_delta),
    ("delta", (32, 16, 3, 3), recurrent_delta),
    ("kimi", (16, 16, 2, 2), kimi_delta),
    ("mamba", (32, 16, 1, 4), mamba),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("kind", "sizes", "expected_of"),
    FAMILIES,
    ids=["delta", "recurrent", "kimi", "mamba"],
)
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["blocks", "tokens"])
def test_steps_give_what_transformers_gives_at_once(
    device: str,
    kind: str,
    sizes: tuple[int, int, int, int],
    expected_of: Callable[[Rule, Inputs], Expected],
    state: torch.dtype,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A GPU's products of matrices in float32 are rounded.
    dtype = torch.float16 if CUDA and form == "blocks" else torch.float32
    types = (dtype,) if form == "blocks" else ()
    monkeypatch.setattr(gated_rule_launches, "BLOCK_TYPES", types)
    rule = drawn_rule(*sizes, kind)
    keys, values, _, heads = sizes
    limit = 1e-5 if state is dtype is torch.float32 else 2e-3
    rows = PagedRows(3, heads, keys, values, dtype=state, device=device)
    first, second = (
        Inputs.drawn(rule, count, seed=10 * count, dtype=dtype) for count in (90, 7)
    )
    outs: dict[int, list[Tensor]] = {0: [], 2: []}

    def step(work: StateWork, *parts: tuple[int, Inputs]) -> None:
        out = rule.run(packed(*(inputs for _, inputs in parts)), rows, work)
        places = out.split_with_sizes([len(inputs.q) for _, inputs in parts])
        for (row, _), piece in zip(parts, places, strict=True):
            outs[row].append(piece)

    step(rows.work({}, (0, 0, 20)), (0, first.tokens(0, 20)))
    step(
        rows.work({}, (2, 0, 3), (0, 20, 67), padding=2),
        (2, second.tokens(0, 3)),
        (0, first.tokens(20, 87)),
    )
    step(
        rows.work({2: 3}, (0, 87, 2)), (2, second.tokens(3, 4)), (0, first.tokens(87, 89))
    )
    step(rows.work({0: 89, 2: 4}), (0, first.tokens(89, 90)), (2, second.tokens(4, 5)))
    step(rows.work({}, (2, 5, 2)), (2, second.tokens(5, 7)))
    for row, inputs in ((0, first), (2, second)):
        expected, last = expected_of(rule, inputs)
        assert error(torch.cat(outs[row]), expected.double()) < limit
        assert error(rows.states(row)[0], last.double()) < limit
    assert rows.written() == 2 * heads * keys * values


@pytest.mark.usefixtures("poisoned")
def test_a_decode_row_starts_from_zero(device: str) -> None:
    rule = drawn_rule(16, 16, 1, 2, "delta")
    rows = PagedRows(2, 2, 16, 16, dtype=torch.float32, device=device)
    inputs = Inputs.drawn(rule, 1, seed=5, dtype=torch.float32)
    out = rule.run(inputs, rows, rows.work({1: 0}))
    expected, last = recurrent_delta(rule, inputs)
    assert error(out, expected.double()) < 1e-6
    assert error(rows.states(1)[0], last.double()) < 1e-6


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("kind", "sizes", "expected_of"),
    FAMILIES,
    ids=["delta", "recurrent", "kimi", "mamba"],
)
def test_states_take_in_the_accepted_inputs_alone(
    device: str,
    kind: str,
    sizes: tuple[int, int, int, int],
    expected_of: Callable[[Rule, Inputs], Expected],
) -> None:
    """Two rows with drafts, 3 and 1, of which 1 and 0 are accepted, beside a decode row;
    each starts behind a chunk.
    """
    rule = drawn_rule(*sizes, kind)
    keys, values, _, heads = sizes
    rows = PagedRows(3, heads, keys, values, dtype=torch.float32, device=device)
    texts = [Inputs.drawn(rule, 9, seed=30 * n, dtype=torch.float32) for n in (1, 2, 3)]
    starts, accepted = (5, 2, 4), (2, 1)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        rule.run(text.tokens(0, start), rows, rows.work({}, (row, 0, start)))
    before = rows.states(0, 1)
    work = rows.drafted_work({0: (5, 4), 1: (2, 2)}, {2: 4}, places=3)
    parts = [x.tokens(start, start + 4) for x, start in zip(texts, starts, strict=True)]
    mixed = Inputs(
        *(
            rows.interleaved([first, second], [third[:1]])
            for first, second, third in zip(*parts, strict=True)
        )
    )
    out = rule.run(mixed, rows, work)
    assert torch.equal(rows.states(0, 1), before)
    places = [[0, 3, 5, 7], [1, 4], [2]]
    for x, start, at in zip(texts, starts, places, strict=True):
        expected, _ = expected_of(rule, x.tokens(0, start + len(at)))
        assert error(out[at], expected[start:].double()) < 1e-5
    rule.run(mixed, rows, work.accepted_work(ints(accepted, device)))
    for row, (x, start) in enumerate(zip(texts, starts, strict=True)):
        end = start + (*accepted, 1)[row]
        _, state = expected_of(rule, x.tokens(0, end))
        assert error(rows.states(row)[0], state.double()) < 1e-5


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["delta", "kimi"])
def test_blocks_of_keys_that_are_alike(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nearly one key, strengths near 1 and no decay, the powers of a block's matrix
    are up to 1e17: its inverse is not a sum of them.
    """
    dtype = torch.float16 if CUDA else torch.float32
    monkeypatch.setattr(gated_rule_launches, "BLOCK_TYPES", (dtype,))
    rule = drawn_rule(32, 16, 1, 1, kind)
    rule = rule._replace(rates=torch.full_like(rule.rates, 1e-4))
    inputs = Inputs.drawn(rule, 100, seed=3, dtype=torch.float32)
    alike = inputs.k[:1] + 0.05 * inputs.k
    inputs = inputs._replace(k=alike, beta=inputs.beta + 6)
    inputs = Inputs(*(x.to(dtype) for x in inputs))
    rows = PagedRows(1, 1, 32, 16, dtype=torch.float32, device=device)
    out = rule.run(inputs, rows, rows.work({}, (0, 0, 100)))
    expected, last = (kimi_delta if kind == "kimi" else gated_delta)(rule, inputs)
    limit = 2e-5 if dtype is torch.float32 else 1e-2
    assert error(out, expected.double()) < limit
    assert error(rows.states(0)[0], last.double()) < limit


@pytest.mark.usefixtures("poisoned")
def test_padding_shares_a_scratch_row(device: str) -> None:
    """Rows that pad a step have one state, which several programs write; the others' is
    as without them.
    """
    rule = drawn_rule(16, 16, 1, 2, "delta")
    inputs = Inputs.drawn(rule, 3, seed=5, dtype=torch.float32)
    rows = PagedRows(2, 2, 16, 16, dtype=torch.float32, device=device)
    work = rows.work({1: 0})
    padded = StateWork(
        work.table, ints([1, 0, 0], device), ints([0, 0, 0], device), chunks=None
    )
    out = rule.run(inputs, rows, padded)
    expected, last = recurrent_delta(rule, inputs.tokens(0, 1))
    assert error(out[:1], expected.double()) < 1e-6
    assert error(rows.states(1)[0], last.double()) < 1e-6


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("delta", (128, 128, 4, 8)),
        ("kimi", (128, 128, 4, 4)),
        ("mamba", (128, 64, 1, 8)),
        ("mamba", (256, 64, 1, 4)),
    ],
)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_models_in_a_graph(
    kind: str, sizes: tuple[int, int, int, int], state: torch.dtype
) -> None:
    """bfloat16, in a CUDA graph: a chunk and decode rows at once, again and again."""
    rule = drawn_rule(*sizes, kind)
    keys, values, _, heads = sizes
    inputs = Inputs.drawn(rule, 2 + 300, seed=1, dtype=torch.bfloat16)
    rows, on_cpu = (
        PagedRows(3, heads, keys, values, dtype=state, device=device)
        for device in ("cuda", "cpu")
    )
    for each in (rows, on_cpu):
        each.pages.zero_()
    works = [each.work({0: 4, 1: 9}, (2, 64, 300), padding=1) for each in (rows, on_cpu)]
    on_gpu = Inputs(*(x.cuda() for x in inputs))
    rule = rule.to("cuda")
    rule.launch(on_gpu, rows, works[0])
    graph, held = torch.cuda.CUDAGraph(), list[Tensor]()
    with torch.cuda.graph(graph):
        held.append(rule.launch(on_gpu, rows, works[0]))
    graph.replay()
    for _ in range(2):
        expected = rule.run(inputs, on_cpu, works[1])
    assert error(held[0].cpu(), expected.double()) < 2e-2
    assert error(rows.states(0, 1, 2), on_cpu.states(0, 1, 2).double()) < 2e-2
