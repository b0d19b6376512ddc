"""Prompts computed by one server and decoded by another one, over a network that fails:
every answer is what the second one alone would say.
"""

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from attrs import define

from tests.effects.network import Network
from tests.effects.serving.process_deaths import (
    SOON,
    ClientAnswer,
    Server,
    ask,
    server,
)

PROMPTS = [
    "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(n, n + 30))
    for n in (100, 200, 300)
]
TOKENS = 12
BODIES = [
    {"prompt": one, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    for one in PROMPTS
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@define(eq=False)
class Machines:
    """The two servers, and the networks between them."""

    prefill: Server
    decode: Server
    links: Network
    kv: Network

    def count(self, name: str) -> float:
        """A metric of the server that decodes."""
        match = re.search(rf"^{name}{{.*}} (.*)$", self.decode.get("/metrics").text, re.M)
        return float(match[1]) if match else 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    def until_both(self) -> None:
        self.until(lambda: self.decode.get("/health").json()["ready"].startswith("2 "))
        replicas = self.decode.get("/health").json()["replicas"]
        assert [(replica["role"], replica["machine"]) for replica in replicas] == [
            ("decode", socket.gethostname()),
            ("prefill", f"127.0.0.1:{self.links.port[1]}"),
        ]

    def answers(self, disturb: Callable[[], object] | None = None) -> list[ClientAnswer]:
        """Ask for all at once, with nothing cached; `disturb` happens meanwhile."""
        httpx.post(f"{self.decode.url}/reset_prefix_cache").raise_for_status()

        async def go() -> list[ClientAnswer]:
            asked = [asyncio.create_task(ask(self.decode.url, body)) for body in BODIES]
            if disturb is not None:
                before = self.links.passed
                while self.links.passed < before + 2000:  # they are on their way
                    await asyncio.sleep(0.005)
                disturb()
            return await asyncio.gather(*asked)

        return asyncio.run(go())


@pytest.fixture
def machines() -> Iterator[Machines]:
    port, kv_port = free_port(), free_port()
    with ExitStack() as stack:
        links = Network(("127.0.0.1", port))
        kv = Network(("127.0.0.1", kv_port))
        for network in (links, kv):
            stack.callback(network.close)
        os.environ["KV_NETWORK"] = str(kv.port[1])
        usual = ("--dtype=float32", "--num-gpu-blocks-override=128", "--cache-secret=s")
        links.stalled = True
        prefill, decode = (
            stack.enter_context(server(*usual, *options, wait=False, module=module))
            for module, *options in (
                ("tests.effects.serving.rerouted", f"--prefill-listen=127.0.0.1:{port}"),
                (
                    "minfer",
                    f"--prefill-at=127.0.0.1:{links.port[1]}",
                    f"--kv-listen=127.0.0.1:{kv_port}",
                ),
            )
        )
        for started in (prefill, decode):
            assert started.process.stdout is not None
            started.url = (
                started.process.stdout.readline().split()[-1].removesuffix("/v1")
            )
        assert prefill.url == f"127.0.0.1:{port}"
        yield Machines(prefill, decode, links, kv)


@pytest.mark.long
def test_answers_are_the_same_whatever_fails_between_two_machines(
    machines: Machines,
) -> None:
    received = "minfer_kv_received_blocks_total"
    right = machines.answers()
    assert all(answer.done and len(answer.text[0]) > 3 for answer in right)
    assert not machines.count(received)
    machines.links.heal()
    machines.links.cut()  # what was said in vain
    machines.until_both()

    def same(disturb: Callable[[], object] | None = None) -> bool:
        answers = machines.answers(disturb)
        return [(answer.text, answer.error) for answer in answers] == [
            (answer.text, answer.error) for answer in right
        ]

    def come(blocks: float) -> bool:
        """Whether `blocks` blocks have been received after all is asked once more."""
        assert same()
        return machines.count(received) >= blocks

    machines.until(lambda: come(10))
    machines.kv.delay = 0.03
    assert same(), "KV came late"
    machines.kv.delay, machines.kv.most = 0.0, 100_000
    assert same(), "KV was cut in the middle of a block"
    machines.kv.heal()
    assert same(machines.links.cut), "the link was cut"
    machines.until_both()
    # Prompts may be sent to the new engine, and be known there, before this one returns.
    before = machines.count(received)
    assert same(machines.decode.kill), "the engine that decodes died"
    machines.until_both()
    machines.until(lambda: come(before + 1))
    assert same(machines.prefill.kill), "the engine that computes prompts died"
    machines.prefill.process.kill()
    assert same(), "nothing is left of the other machine"
