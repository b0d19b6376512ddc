"""Prefill and decode apart, of models with recurrent layers: the state at the end of a
prompt goes to the engine that decodes, with its blocks.
"""

import asyncio
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import minfer
from minfer.effects.cli.main import main
from tests.circles import claimed, long
from tests.effects.serving.process_deaths import SOON, Load, Server, long_bodies, server
from tests.effects.tiny_families import VARIANTS, greedy_tokens, save

FAMILIES: Final = {
    "Qwen3Next": ("Qwen3Next", "plain"),
    "FalconH1": ("FalconH1", "plain"),
    "Lfm2": ("Lfm2", "plain"),
}
PACKAGE: Final = Path(minfer.__file__).parent
VOCAB: Final = 4096  # of the bundled tokenizer
MADE: Final = 12  # tokens of a request
BLOCK: Final = 16
OPTIONS: Final = (
    "--device=cpu",
    "--dtype=float32",
    f"--block-size={BLOCK}",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--num-gpu-blocks-override=600",
)
APART: Final = ("--prefill=1", "--decode=1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Returns a family's tiny checkpoint, with a tokenizer, and transformers' model."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        family, variant = FAMILIES[name]
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": 2048}
        settings = {**VARIANTS[family, variant], **sizes}
        theirs = save(str(folder), family, settings)
        for file in (PACKAGE / "effects/bundled/target").glob("tokenizer*"):
            shutil.copy(file, folder)
        return folder, theirs

    return make


def tokens_of(served: Server, prompt: list[int]) -> list[int]:
    """What the server makes of it."""
    body = {
        "prompt": prompt,
        "max_tokens": MADE,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=SOON)
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def count(served: Server, name: str) -> float:
    """A counter of the server's metrics, over all engines."""
    text = served.get("/metrics").text
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (.+)$", text, re.MULTILINE)))


RANKS: Final = ("--prefill-tensor-parallel-size=2", "--tensor-parallel-size=2")


@pytest.mark.parametrize(
    ("name", "ranks"),
    long([(name, ()) for name in FAMILIES] + [("Qwen3Next", RANKS)]),
    ids=str,
)
def test_decoding_begins_with_the_state_that_was_sent(
    name: str,
    ranks: tuple[str, ...],
    checkpoint: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    """The decode engine computes no prompt; and a recording replays."""
    (folder, theirs), draw = checkpoint(name), random.Random(1)
    lengths = (300, 20 * BLOCK, 500)
    prompts = [draw.choices(range(VOCAB), k=length) for length in lengths]
    model = f"--model={folder}"
    journal = f"--journal={tmp_path}"
    with server(model, *OPTIONS, *APART, *ranks, journal) as served:
        served.drain()
        for prompt in prompts:
            made = tokens_of(served, prompt)
            assert made == greedy_tokens(theirs, prompt, MADE)
            longer = [*prompt, *made, *draw.choices(range(VOCAB), k=300)]
            assert tokens_of(served, longer) == greedy_tokens(theirs, longer, MADE)
        loaded = count(served, "minfer_kv_keyed_loaded_blocks_total")
        lost = count(served, "minfer_kv_keyed_lost_blocks_total")
        served.process.terminate()
        served.process.wait(SOON)
    assert lost == 0
    assert loaded >= sum((length - 1) // BLOCK for length in lengths)
    assert main(["replay", str(tmp_path)]) == 0


@pytest.mark.parametrize("kills", [*long([2]), *claimed([10])])
def test_no_request_is_lost_with_its_state(
    kills: int, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    """Each of the two engines is killed in turn; answers are those of one engine."""
    model, bodies = f"--model={checkpoint('Qwen3Next')[0]}", long_bodies(1, 60)
    with server(model, *OPTIONS) as reference:
        expected = Load(reference.url, bodies)
        asyncio.run(expected.learn())
    with server(model, *OPTIONS, *APART) as served:
        served.drain()
        load = Load(served.url, bodies)
        load.right = expected.right

        async def run() -> None:
            await served.until_ready()
            async with load.clients():
                async with asyncio.timeout(SOON):
                    while not count(served, "minfer_kv_sent_blocks_total"):
                        await asyncio.sleep(0.1)
                for number in range(kills):
                    await load.flows(time.monotonic())
                    async with asyncio.timeout(SOON):
                        while served.get("/health").json()["ready"] != "2 of 2 replicas":
                            await asyncio.sleep(0.05)
                    engine = f"minfer engine {number % 2}"
                    await served.successor(engine, served.kill(engine))
                await load.flows(time.monotonic())

        asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []
