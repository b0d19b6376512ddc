"""Log-probabilities on the device against a float64 log-softmax, sorted."""

import math
import random

import pytest
import torch
from torch import Tensor

from minfer.kernels import logprobs as kernels
from tests.circles import claimed

from .conftest import CUDA

# Infinities are meant: numpy, which is the interpreter, warns of them.
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
MAX_LOGPROBS = 20
UNSEEN = 77  # what was not written


@pytest.fixture(autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small = random.Random(request.node.name).choice([16, 64, 256])
    monkeypatch.setattr(kernels, "CHUNK", small)


def measured(
    logits: Tensor, tokens: list[int], counts: list[int], device: str
) -> tuple[Tensor, Tensor]:
    """Ranks and ids, log-probabilities: [rows, 1 + MAX_LOGPROBS]; device rows are in the
    reverse order.
    """
    out = torch.full(
        (len(tokens), 2, 1 + MAX_LOGPROBS), UNSEEN, dtype=torch.int32, device=device
    )
    rows, requested = (
        range(len(tokens)),
        torch.tensor(counts, dtype=torch.int32, device=device),
    )
    device_rows = torch.tensor(rows, dtype=torch.int32, device=device).flip(0)
    drawn = torch.tensor(tokens, dtype=torch.int32, device=device)
    kernels.logprobs(logits.to(device), drawn, device_rows, requested.flip(0), out)
    return out[:, 0].cpu(), out[:, 1].view(torch.float32).cpu()


def check(logits: Tensor, tokens: list[int], counts: list[int], device: str) -> None:
    ranks_and_ids, values = measured(logits, tokens, counts, device)
    exact = logits.double().log_softmax(1)
    order = logits.float().sort(dim=1, descending=True, stable=True).indices
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if not count:
            assert set(ranks_and_ids[i].tolist()) == {UNSEEN}
            continue
        ids = order[i, : count - 1].tolist()
        rank = order[i].tolist().index(token) + 1
        assert ranks_and_ids[i].tolist() == [
            rank,
            *ids,
            *[UNSEEN] * (MAX_LOGPROBS - len(ids)),
        ]
        torch.testing.assert_close(
            values[i, :count].double(), exact[i, [token, *ids]], rtol=1e-6, atol=4e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [20, 65, *claimed([1, 64, 700])])
def test_against_float64(device: str, vocab: int, dtype: torch.dtype) -> None:
    rng, draw = random.Random(vocab), torch.Generator().manual_seed(vocab)
    for scale in (0.3, 3.0, 30.0):
        logits = (torch.randn(6, vocab, generator=draw) * scale).to(dtype)
        counts = [0, 1, 2, 1 + min(MAX_LOGPROBS, vocab), 1 + min(7, vocab), 0]
        check(logits, [rng.randrange(vocab) for _ in counts], counts, device)


@pytest.mark.long
def test_of_those_that_tie_the_lower_id_is_the_likelier(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -1.0] * 15] * 4)
    counts = [1 + MAX_LOGPROBS, 1 + 10, 1, 1 + 16]
    check(logits, [2, 87, 4, 5], counts, device)
    check(-logits.half(), [0, 1, 2, 89], counts, device)
    check(logits * 0, [0, 1, 2, 89], counts, device)


@pytest.mark.long
def test_impossible_tokens_and_runaways(device: str) -> None:
    logits = torch.full((3, 300), -math.inf)
    logits[:, 100:103] = torch.tensor([1.0, 1e38, -1e38])
    logits[1] = torch.randn(300) + 1e5  # beside which a log-sum-exp would be rounded
    check(logits, [100, 7, 5], [1 + 6, 1 + MAX_LOGPROBS, 1 + 2], device)
    ranks_and_ids, values = measured(logits, [299] * 3, [1 + 6, 1, 1], device)
    assert values[0, [0, 4, 5, 6]].tolist() == [-math.inf] * 4
    assert ranks_and_ids[0, 4:7].tolist() == [0, 1, 2]


@pytest.mark.long
def test_a_row_without_finite_logits_harms_no_other(device: str) -> None:
    logits = torch.randn(4, 150)
    plain = measured(logits, [3] * 4, [5, 0, 5, 1], device)
    logits[1:3] = torch.tensor([math.nan, math.inf])[:, None]
    broken = measured(logits, [3, 0, 0, 3], [5, 0, 5, 1], device)
    for plain_part, broken_part in zip(plain, broken, strict=True):
        assert torch.equal(plain_part[[0, 3]], broken_part[[0, 3]])
    assert set(broken[0][1].tolist()) == {UNSEEN}


@pytest.mark.long
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    logits, tokens, counts = (
        torch.randn(5, 170),
        [5, 4, 3, 2, 169],
        [1 + MAX_LOGPROBS, 0, 4, 1, 6],
    )
    wide = torch.zeros(5, 400)  # rows may lie apart
    wide[:, 30:200] = logits
    ids, values = measured(wide[:, 30:200], tokens, counts, device)
    for i, count in enumerate(counts):
        solo = measured(logits[i : i + 1], tokens[i : i + 1], [count], device)
        assert torch.equal(solo[0][0], ids[i])
        assert torch.equal(solo[1][0].view(torch.int32), values[i].view(torch.int32))


@pytest.mark.skipif(not CUDA, reason="real vocabularies are for the GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_vocabularies(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 2048)
    for vocab in (151_936, 128_256, 32_001):
        logits = (2.5 * torch.randn(64, vocab)).to(dtype)
        counts = [i % (MAX_LOGPROBS + 2) for i in range(64)]
        check(logits, [(i * 7919) % vocab for i in range(64)], counts, "cuda")


@pytest.mark.skipif(not CUDA, reason="CUDA graphs")
def test_in_a_cuda_graph() -> None:
    logits, tokens = (
        torch.randn(3, 5000, device="cuda"),
        torch.tensor([1, 2, 3], device="cuda"),
    )
    device_rows = torch.arange(3, dtype=torch.int32, device="cuda")
    arguments = (
        logits,
        tokens.int(),
        device_rows,
        torch.tensor([1 + MAX_LOGPROBS, 0, 4]).int().cuda(),
    )
    outs = [
        torch.zeros(3, 2, 1 + MAX_LOGPROBS, dtype=torch.int32, device="cuda")
        for _ in range(2)
    ]
    kernels.logprobs(*arguments, outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.logprobs(*arguments, outs[0])
    for _ in range(3):
        logits.copy_(torch.randn(3, 5000))
        graph.replay()
        kernels.logprobs(*arguments, outs[1])
        assert torch.equal(*outs)
