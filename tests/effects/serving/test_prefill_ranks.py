"""Engines that compute prompts, and engines that decode, of different parallel sizes."""

import asyncio
import re
from threading import Thread
from typing import Final

import pytest

from tests.circles import claimed, long
from tests.effects.serving.process_deaths import SOON, Load, Server, long_bodies, server

FLOAT: Final = ("--device=cpu", "--dtype=float32", "--num-gpu-blocks-override=128")
APART: Final = ("--prefill=1", "--decode=1")


def count(served: Server, name: str) -> float:
    """A counter of the server's metrics."""
    match = re.search(rf"^{name}{{.*}} (.+)$", served.get("/metrics").text, re.MULTILINE)
    assert match is not None
    return float(match[1])


# The bundled model has 2 key heads, so 4 ranks have each of them twice.
@pytest.mark.parametrize(
    ("prefill", "decode"), [*long([(2, 1)]), *claimed([(1, 2), (4, 2)])], ids=str
)
def test_other_sizes_give_the_same_text(prefill: int, decode: int) -> None:
    asked = long_bodies(1, 40)
    with server(*FLOAT) as plain:
        expected = Load(plain.url, asked)
        asyncio.run(expected.learn())
    ranks = (
        f"--prefill-tensor-parallel-size={prefill}",
        f"--tensor-parallel-size={decode}",
    )
    with server(*FLOAT, *APART, *ranks) as served:
        assert served.process.stderr is not None
        Thread(target=served.process.stderr.read, daemon=True).start()
        apart = Load(served.url, asked)
        asyncio.run(asyncio.wait_for(apart.learn(), SOON))
        for answer, right in zip(apart.right, expected.right, strict=True):
            assert answer.equals(right), (answer.text, right.text)
        assert count(served, "minfer_kv_keyed_loaded_blocks_total") > len(asked)
        assert count(served, "minfer_kv_keyed_lost_blocks_total") == 0
