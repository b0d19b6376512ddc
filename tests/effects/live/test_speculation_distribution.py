"""What an engine with drafts writes has the distribution that the model defines.

By chi-squared, of whole outputs on a vocabulary of four words: how often each sequence
comes, against its probability by transformers' logits and the definitions of
`minfer.sampling.reference_sampler`. 100,000 outputs of each with `--all`, fewer always.
By both rules of acceptance; one that is wrong by a little is caught, and so is noise that
is used twice.
"""

import math
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from minfer import LLM, SamplingParams
from minfer.effects.execution.cpu.cpu_backend import CpuBackend
from minfer.effects.execution.device import device_rows
from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.running import rejection_sampling as rejecting
from minfer.effects.execution.running import sampler
from minfer.effects.setup.speculation_settings import SAME, STANDARD
from minfer.kernels import plain, reject
from minfer.kernels.sample_reference import uniform
from minfer.sampling.reference_sampler import RowSampling, scores
from minfer.speculate.rejection import Streams, chances
from tests.circles import claimed
from tests.effects.tiny_model import write_checkpoint

VOCAB: Final = 4
LENGTH: Final = 4  # tokens of an output: up to two drafts at once
PROMPT: Final = [0, 1, 2, 0, 1, 3, 0, 1, 2]
SAMPLES: Final = 50  # of a request
ROWS: Final = 128  # that run at once
FEW, MANY = 1_500, 100_000  # outputs
LEAST: Final = 5  # outputs that are expected of a sequence; others count as one
METHODS: Final = ("ngram", "draft_model")
WAYS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 1.3},
    "top-p": {"temperature": 1.1, "top_p": 0.85},
}
# By a normal approximation of chi-squared's cube root (Wilson and Hilferty 1931).
Z: Final = 3.7  # of 1e-3 by all tests together
OutputRouter = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model of one layer less: neither knows the other."""
    root = tmp_path_factory.mktemp("four words")
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "eos_token_id": VOCAB - 1,
        "initializer_range": 0.3,
        "tokenizer": False,
    }
    target = write_checkpoint(root / "target", **sizes)
    return target, write_checkpoint(root / "draft", num_hidden_layers=1, **sizes)


@cache
def exact(folder: Path, way: str) -> OutputRouter:
    """The probability of every output, by the definitions."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampling = RowSampling.of(SamplingParams(**WAYS[way]), 0, 0)
    outputs = [*product(range(VOCAB), repeat=LENGTH)]
    with torch.inference_mode():
        texts = torch.tensor([[*PROMPT, *ids] for ids in outputs])
        logits = model(texts).logits[:, len(PROMPT) - 1 : -1].tolist()
    shares = OutputRouter()
    for tokens, lines in zip(outputs, logits, strict=True):
        share = 1.0
        for token, line in zip(tokens, lines, strict=True):
            share *= chances(scores(line, sampling)).get(token, 0.0)
        shares[tokens] = share
    return shares


def written(
    folders: tuple[Path, Path], method: str, way: str, count: int, rule: str = SAME
) -> Counter[tuple[int, ...]]:
    """How often an engine wrote what, of so many outputs; it must have had drafts of
    which some were right.
    """
    target, draft = folders
    config: dict[str, Any] = {"method": method, "adaptive": False}
    config["rejection_sample_method"] = rule
    config |= {"num_speculative_tokens": 3, "disable_by_batch_size": ROWS}
    config |= (
        {"model": str(draft)} if method == "draft_model" else {"prompt_lookup_min": 1}
    )
    params = [
        SamplingParams(
            **WAYS[way], max_tokens=LENGTH, ignore_eos=True, n=SAMPLES, seed=seed
        )
        for seed in range(count // SAMPLES)
    ]
    settings: dict[str, Any] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "max_num_seqs": ROWS,
        "num_gpu_blocks_override": 2 * ROWS + 8,
        "block_size": 8,
    }
    with LLM(str(target), speculative_config=config, **settings) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    drafts = sum(output.metrics.draft_tokens for output in outputs)
    accepted = sum(output.metrics.accepted_draft_tokens for output in outputs)
    assert drafts / 10 < accepted < drafts
    assert drafts > count / 2
    return Counter(
        tuple(completion.token_ids) for output in outputs for completion in output.outputs
    )


def is_far(counts: Counter[tuple[int, ...]], shares: OutputRouter) -> bool:
    """Whether what was found is not of this distribution."""
    count = counts.total()
    expected = {tokens: count * share for tokens, share in shares.items()}
    if any(not expected[tokens] for tokens in counts):
        return True
    cells = {tokens for tokens, mean in expected.items() if mean >= LEAST}
    pairs = [(counts[tokens], expected[tokens]) for tokens in cells]
    rare = count - sum(mean for _, mean in pairs)
    if rare >= LEAST:
        pairs.append((count - sum(observed for observed, _ in pairs), rare))
    chi = sum((observed - mean) ** 2 / mean for observed, mean in pairs)
    return chi > critical(len(pairs) - 1)


def critical(freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + Z * math.sqrt(spread)) ** 3


# Each rule, method and way with each of the others once, and, claimed, all together.
PAIRS: Final = (
    (SAME, "ngram", "temperature"),
    (SAME, "draft_model", "top-p"),
    (STANDARD, "ngram", "top-p"),
    (STANDARD, "draft_model", "temperature"),
)
REST: Final = [
    case for case in product((SAME, STANDARD), METHODS, WAYS) if case not in PAIRS
]


@pytest.mark.long
@pytest.mark.parametrize("count", [FEW, *claimed([MANY])])
@pytest.mark.parametrize(("rule", "method", "way"), [*PAIRS, *claimed(REST)])
def test_outputs_with_drafts_have_the_distribution_of_the_definition(
    folders: tuple[Path, Path], rule: str, method: str, way: str, count: int
) -> None:
    shares = exact(folders[0], way)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    assert (0.0 in shares.values()) == ("top_p" in WAYS[way])
    assert not is_far(written(folders, method, way, count, rule), shares)


def nearly(**arguments: Any) -> None:
    """Lets drafts stand that are one off what was drawn, now and then."""
    arguments["state"] = arguments["state"]._replace(last=arguments["state"].last // 2)
    arguments["drafts"] = arguments["drafts"] // 2
    plain.accept_drafts(**arguments)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", *claimed(["draft_model"])])
def test_a_wrong_rule_is_caught(
    folders: tuple[Path, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "accept_drafts", staticmethod(nearly))
    counts = written(folders, method, "temperature", 3 * FEW)
    assert is_far(counts, exact(folders[0], "temperature"))


def forgetful(
    drawn: DrawnTokens, drafts: Any, *arguments: Any, **options: Any
) -> DrawnTokens:
    """What takes the place of a rejected draft may be that draft."""
    right = rejecting.rejection_sample(drawn, drafts, *arguments, **options)
    count = len(drafts.tokens)
    accepted = right.tokens[:count] == drafts.tokens
    tokens = right.tokens[:count].where(accepted, drawn.tokens[:count])
    return DrawnTokens(torch.cat((tokens, drawn.tokens[count:])), drawn.broken)


def eager(*arguments: Any) -> torch.Tensor:
    """Coins by which drafts stand a little too often."""
    return 0.8 * uniform(*arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "method"),
    [
        (forgetful, "draft_model"),
        (eager, "ngram"),
        *claimed([(forgetful, "ngram"), (eager, "draft_model")]),
    ],
)
def test_a_wrong_rule_of_coins_is_caught(
    folders: tuple[Path, Path], method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong is forgetful:
        monkeypatch.setattr(sampler, "rejection_sample", wrong)
    else:
        monkeypatch.setattr(reject, "uniform", wrong)
    counts = written(folders, method, "temperature", 2 * FEW, STANDARD)
    assert is_far(counts, exact(folders[0], "temperature"))


@pytest.mark.long
def test_coins_that_are_drafts_noise_are_caught(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams that are shared: tests/kernels/test_reject.py."""

    def shared(seed: int, sample: int) -> Streams:
        right = Streams.of(seed, sample)
        return evolve(right, coins=right.draft)

    monkeypatch.setattr(device_rows, "Streams", SimpleNamespace(of=shared))
    counts = written(folders, "draft_model", "temperature", 2 * FEW, STANDARD)
    assert is_far(counts, exact(folders[0], "temperature"))
