"""Acceptance that is set is what comes about, and a text that goes round does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import coins
from bench.coins import NO_TOKEN, SIDES, toss, tossing
from bench.speculation import Counted
from bench.speculation_cases import PERIOD, going_round, model_folder, speculative_config
from minfer import LLM, SamplingParams
from minfer.records.acceptance import counted_drafts

ROWS = 600
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tossed(heads: float, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Coins of rows in a strange order, and what stands if they have heads."""
    generator = torch.Generator().manual_seed(1)
    owners = torch.randperm(rows, generator=generator).int()
    last = torch.randint(9000, (rows,), generator=generator).int()
    next_ = torch.randint(5000, (rows,), generator=generator).int()
    streams = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    sides = torch.tensor([round(heads * SIDES)])
    out = toss(*(tensor.to(DEVICE) for tensor in (owners, last, next_, streams, sides)))
    return out.cpu(), last[owners.long()]


@pytest.mark.parametrize("heads", [0.0, 0.3, 0.7, 1.0])
def test_so_many_coins_have_heads(heads: float) -> None:
    tossed_tokens, last = tossed(heads, 20_000)
    assert set(tossed_tokens[tossed_tokens != last].tolist()) <= {NO_TOKEN}
    assert (tossed_tokens == last).double().mean() == pytest.approx(heads, abs=0.015)


@pytest.mark.long
def test_the_kernel_tosses_as_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    by_default, _ = tossed(0.6)
    if DEVICE == "cpu":
        monkeypatch.setattr(coins, "on_triton", lambda _: True)
    else:
        monkeypatch.setattr(coins, "on_triton", lambda _: False)
    by_other, _ = tossed(0.6)
    assert torch.equal(by_default, by_other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


def drafting(folder: Path, **config: object) -> LLM:
    return LLM(
        model_folder(folder, "tiny"),
        load_format="dummy",
        num_gpu_blocks_override=64,
        max_model_len=512,
        max_num_seqs=8,
        speculative_config=config,
    )


@pytest.fixture(scope="module")
def coined(folder: Path) -> Iterator[tuple[LLM, coins.Coined]]:
    draft = model_folder(folder, "tiny draft")
    with tossing() as coins_made:
        llm = drafting(
            folder, **speculative_config("draft_model", adaptive=False, model=draft)
        )
    with llm:
        yield llm, coins_made[0]


@pytest.mark.long
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_drafts_stand_as_often_as_is_set(
    coined: tuple[LLM, coins.Coined], acceptance: float
) -> None:
    llm, coin = coined
    coin.set(acceptance)
    llm.worker.driver.record = counted = Counted()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([[1, 2, number] for number in range(8)], params, use_tqdm=False)
    assert max(drafts.proposed for drafts in counted.drafts) == 4
    for place in range(3):
        judged = [
            drafts
            for drafts in counted.drafts
            if place < counted_drafts(drafts.proposed, drafts.accepted)
        ]
        if len(judged) > 50:
            share = sum(drafts.accepted > place for drafts in judged) / len(judged)
            assert share == pytest.approx(acceptance, abs=0.15)


@pytest.mark.long
def test_acceptance_is_set_by_place(coined: tuple[LLM, coins.Coined]) -> None:
    llm, coin = coined
    coin.set((1.0, 1.0, 0.0))
    llm.worker.driver.record = counted = Counted()
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    llm.generate([[1, 2, number] for number in range(4)], params, use_tqdm=False)
    whole = [drafts.accepted for drafts in counted.drafts if drafts.proposed == 4]
    assert set(whole) == {2}


@pytest.mark.long
def test_a_text_that_goes_round(folder: Path) -> None:
    with going_round():
        llm = drafting(folder, **speculative_config("ngram", adaptive=False))
    with llm:
        llm.worker.driver.record = counted = Counted()
        params = SamplingParams(temperature=0, max_tokens=2 * PERIOD, ignore_eos=True)
        [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert tokens[:PERIOD] == tokens[PERIOD:]
    assert len(set(tokens)) == PERIOD
    assert counted.figures()["acceptance"] > 0.9
