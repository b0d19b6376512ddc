"""`minfer serve` in several processes, some of which are killed while streams run: none
loses anything, and every stream is what it would have been.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from minfer.effects.cli.main import main
from minfer.effects.cluster.link.crash_rule import MAX_SOLO_DEATHS, SUSPECT_DEATHS
from minfer.effects.live.journal.journal_files import read_journal
from minfer.effects.net.heartbeat import STOPPED_SECONDS
from minfer.journal.routing_journal import RoutingJournal
from minfer.routing.router import Routed
from tests.circles import claimed, long
from tests.effects.serving.dying_engine import KILLS
from tests.effects.serving.process_deaths import (
    API_SERVERS,
    ENGINE,
    SOON,
    ClientAnswer,
    Load,
    Server,
    ask,
    bodies,
    long_bodies,
    server,
)

FLOAT = "--dtype=float32"
SHORTLY = 0.1  # seconds in which an engine gives few tokens


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    """A server, and what it said of its health from the first moment on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (FLOAT, "--num-gpu-blocks-override=128", f"--port={port}")
    with server(*options, wait=False) as started:
        started.url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + SOON
        while (
            not started.begun or started.begun[-1][1] != 200
        ) and time.monotonic() < end:
            with contextlib.suppress(httpx.ConnectError):
                paths = ("/health", "/ready", "/v1/models")
                started.begun.append(
                    tuple(started.get(path).status_code for path in paths)
                )
        yield started


def answer_of(*tokens: str, end: str = "length") -> ClientAnswer:
    """The answer that has these tokens, in events of one each."""
    answer = ClientAnswer()
    offset = 0
    for number, token in enumerate(tokens):
        beside = {"tokens": [token], "text_offset": [offset], "token_logprobs": [-1.0]}
        choice = {"index": 0, "text": token, "logprobs": beside}
        last = number == len(tokens) - 1
        answer.take({"choices": [{**choice, "finish_reason": end if last else None}]})
        offset += len(token)
    return answer


def test_what_is_lost_or_comes_twice_is_seen_whichever_tokens_there_should_be() -> None:
    body = {"max_tokens": 3, "logprobs": 0}
    assert not answer_of("a", "bc", "d").flaw(body)
    assert answer_of("a", "bc").flaw(body) == "choice 0 has 2 tokens"
    assert answer_of("a", "bc", "bc", "d").flaw(body) == "choice 0 has 4 tokens"
    assert not answer_of("a", end="stop").flaw(body)
    assert answer_of("a", "bc", "d").flaw({**body, "n": 2}) == "choices [0] ended"
    shifted = answer_of("a", "bc", "d")
    shifted.offsets[0][2] = 2
    assert "do not follow" in shifted.flaw(body)
    cut = answer_of("a", "bc", "d")
    cut.text[0] = "ad"
    assert "the text 'ad' and the tokens" in cut.flaw(body)


@pytest.mark.long
def test_while_a_model_is_loaded_health_says_so(served: Server) -> None:
    assert served.begun[0] == (200, 503, 503)
    assert served.begun[-1] == (200, 200, 200)


@pytest.mark.parametrize(("kills", "tokens"), [*long([(2, 150)]), *claimed([(20, 300)])])
def test_killed_engines_lose_no_request(served: Server, kills: int, tokens: int) -> None:
    rng = Random(kills)
    load = Load(served.url, bodies(1, tokens))
    interrupted: list[ClientAnswer] = []

    async def run() -> None:
        await served.until_ready()
        await load.learn()
        async with load.clients():
            for _ in range(kills):
                await load.flows(time.monotonic())
                await asyncio.sleep(rng.uniform(0, 0.3))
                interrupted.extend(load.live)
                before = served.kill()
                await served.successor(ENGINE, before)
                await load.flows(time.monotonic())

    asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []
    assert load.flawed() == []
    ended = [answer for _, answer in load.ended]
    resumed = [answer for answer in interrupted if answer.times and answer in ended]
    assert len(resumed) >= kills, "few streams ran when their engines died"


@pytest.mark.parametrize("kills", [*long([6]), *claimed([45])])
def test_engines_killed_soon_after_each_start_blame_no_request(kills: int) -> None:
    """Suspects run alone then, and are killed with their engines again and again. A
    client whose request waits for them may lose its patience.
    """
    with server(FLOAT, "--num-gpu-blocks-override=128") as served:
        served.drain()
        load = Load(served.url, bodies(1, 150))

        async def run() -> None:
            await served.until_ready()
            await load.learn()
            async with load.clients():
                await load.flows(time.monotonic())
                for _ in range(kills):
                    before = served.kill()
                    await served.successor(ENGINE, before)
                    async with asyncio.timeout(SOON):
                        while served.get("/ready").status_code != 200:
                            await asyncio.sleep(0.02)
                    await asyncio.sleep(SHORTLY)
                await load.flows(time.monotonic())

        asyncio.run(run())
        repeated = asyncio.run(ask(served.url, load.bodies[0]))
    assert repeated.done
    assert all("ReadTimeout" in error for error in load.lost()), load.lost()
    assert load.different() == []


@pytest.mark.claimed  # test_supervisor asks it of children that load nothing
def test_a_front_that_is_killed_costs_the_other_one_nothing(served: Server) -> None:
    load = Load(served.url, bodies(1, 200))

    async def run() -> None:
        await served.until_ready()
        await load.learn()
        twice = [asyncio.create_task(load.once(i)) for i in range(2 * len(load.bodies))]
        await load.flows(time.monotonic())
        before = served.kill(API_SERVERS[0])
        await asyncio.gather(*twice)
        await served.successor(API_SERVERS[0], before)
        await served.until_ready()
        repeated = await asyncio.gather(
            *[ask(served.url, load.bodies[0]) for _ in range(6)]
        )
        assert all(answer.equals(load.right[0]) for answer in repeated)

    asyncio.run(run())
    # Those of the API server that died ended with it; all others are whole.
    complete = [answer for _, answer in load.ended if answer.done]
    assert 0 < len(complete) < len(load.ended)
    assert load.different() == []


@pytest.mark.parametrize("api_servers", [*long([2]), *claimed([1])])
def test_a_front_that_is_stopped_is_restarted_after_its_limit(api_servers: int) -> None:
    with server("--dry-run", f"--api-processes={api_servers}") as served:
        plain = [body for body in bodies(1, 100) if "logprobs" not in body]
        load = Load(served.url, plain)

        async def run() -> None:
            await served.until_ready()
            await load.learn()
            before = served.children()
            async with load.clients(10):
                await load.flows(time.monotonic())
                served.kill(API_SERVERS[0], signal.SIGSTOP)
                await asyncio.sleep(STOPPED_SECONDS / 2)
                served.kill(API_SERVERS[0], signal.SIGCONT)
                await load.flows(time.monotonic())
                assert served.children() == before
                assert load.lost() == [], "it was stopped for less than its limit"
                served.kill(API_SERVERS[0], signal.SIGSTOP)
                new = await served.successor(API_SERVERS[0], before[API_SERVERS[0]])
                await served.until_ready()
                await load.flows(time.monotonic())
            assert served.children() == before | {API_SERVERS[0]: new}
            repeats = [ask(served.url, load.bodies[0]) for _ in range(6)]
            assert all(
                answer.equals(load.right[0]) for answer in await asyncio.gather(*repeats)
            )

        asyncio.run(run())
        served.process.terminate()
        assert served.process.wait(SOON) == 0
    # Only requests that the stopped API server had begun are lost: those whose
    # connections it had not accepted are answered by the next one.
    assert len(load.lost()) <= 10
    assert load.different() == []


@pytest.mark.long
def test_while_an_engine_is_started_again_health_says_so_and_requests_wait(
    served: Server,
) -> None:
    async def run() -> None:
        await served.until_ready()
        before = served.kill()
        end = time.monotonic() + SOON
        while (ready := served.get("/ready")).status_code == 200:
            assert time.monotonic() < end, "it was not noticed"
        assert (ready.status_code, served.get("/health").status_code) == (503, 200)
        assert ready.json()["status"]
        answer = await ask(served.url, bodies(1, 10)[0])
        assert answer.done
        await served.successor(ENGINE, before)
        await served.until_ready()

    asyncio.run(run())


# Engines at most of a request that has them killed for memory: two beside others.
OUT_OF_MEMORY = SUSPECT_DEATHS + MAX_SOLO_DEATHS
KILLED = SUSPECT_DEATHS + KILLS  # likewise, if nothing shows that it has them killed
CRASHED = SUSPECT_DEATHS + 1  # likewise, if they crash
COMPLETIONS = "completions"
CRASHING_REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "prefill, killed": (COMPLETIONS, {"prompt": [7, 7, 0]}, KILLED),
    "prefill, out of memory": (COMPLETIONS, {"prompt": [7, 11, 0]}, OUT_OF_MEMORY),
    "prefill": (COMPLETIONS, {"prompt": [7, 8, 0]}, CRASHED),
    "position 20": (COMPLETIONS, {"prompt": [7, 10, 20]}, CRASHED),
    "20 tokens after each start": (COMPLETIONS, {"prompt": [7, 8, 20]}, CRASHED),
    "n = 4": (COMPLETIONS, {"prompt": [7, 8, 3], "n": 4}, CRASHED),
    "an exception": (COMPLETIONS, {"prompt": [7, 9, 3]}, CRASHED),
    "an embedding": ("embeddings", {"input": [7, 8, 0]}, CRASHED),
}
LIMITED = {"max_tokens": 200, "ignore_eos": True}
WHY_DIED = r"engine(?: \d)? ended (?:by signal (?:9|11)|with 70); it is started again"


@pytest.mark.claimed  # test_remote_engine and test_placement ask it in one process
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", CRASHING_REQUESTS)
def test_a_request_that_kills_engines_fails_after_few_deaths(
    kind: str, replicas: int
) -> None:
    """It is refused then, by all API servers; of two replicas, one serves all
    the time.
    """
    path, body, max_deaths = CRASHING_REQUESTS[kind]
    module = "tests.effects.serving.dying_engine"
    options = (FLOAT, "--num-gpu-blocks-override=128", f"--replicas={replicas}")
    body = body if path == "embeddings" else {**body, **LIMITED}
    ready = list[int]()
    with server(*options, module=module) as served:
        load = Load(served.url, bodies(1, 150))

        async def run() -> tuple[httpx.Response, list[httpx.Response]]:
            url = f"{served.url}/v1/{path}"
            await served.until_ready()
            await load.learn()
            head = {"connection": "close"}  # each at any of the API servers
            async with load.clients(), httpx.AsyncClient(timeout=SOON) as client:
                await load.flows(time.monotonic())
                asking = asyncio.create_task(client.post(url, json=body))
                while not asking.done():
                    ready.append((await client.get(f"{served.url}/ready")).status_code)
                    await asyncio.sleep(0.02)
                refusals = [
                    await client.post(url, json={**body, "user": ""}, headers=head)
                    for _ in range(6)
                ]
            return await asking, refusals

        answer, refusals = asyncio.run(run())
        served.process.terminate()
        assert served.process.stderr is not None
        message = served.process.stderr.read()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "request_killed_engine")
    assert "the request itself is the cause" in error["message"]
    assert 1 < len(re.findall(WHY_DIED, message)) <= max_deaths
    assert load.lost() == []
    assert load.different() == []
    if replicas > 1:
        assert set(ready) == {200}
    refused = {
        (refusal.status_code, refusal.json()["error"]["code"]) for refusal in refusals
    }
    assert refused == {(400, "request_killed_engine")}


@pytest.mark.long
def test_a_killed_replica_loses_no_request_and_takes_load_again(tmp_path: Path) -> None:
    options = (FLOAT, "--replicas=2", "--routing=least_loaded", f"--journal={tmp_path}")
    with server(*options, "--num-gpu-blocks-override=128") as served:
        load = Load(served.url, bodies(1, 80))

        def routed() -> Counter[str]:
            text = served.get("/metrics").text
            counts = re.findall(r'minfer_routed_total{.*replica="(.)".*} (.*)', text)
            by_replica = Counter[str]()  # one line for each reason
            for name, count in counts:
                by_replica[name] += int(float(count))
            return by_replica

        async def run() -> None:
            await served.until_ready()
            await load.learn()
            async with load.clients():
                await load.flows(time.monotonic())
                body = {"prompt": "x", "max_tokens": 2}
                answer = httpx.post(
                    f"{served.url}/v1/completions", json=body, timeout=SOON
                )
                name = answer.json()["id"]
                (prompt,) = served.get(f"/v1/requests/{name}").json()["prompts"]
                (placed,) = prompt["replicas"]
                assert (placed["replica"] in "01", placed["why"]) == (True, "load")
                assert placed["machine"] == socket.gethostname()
                before = served.kill("minfer engine 1")
                await served.successor("minfer engine 1", before)
                health = served.get("/health")
                assert (health.status_code, health.json()["ready"]) == (
                    200,
                    "1 of 2 replicas",
                )
                await load.flows(time.monotonic())
                async with asyncio.timeout(SOON):
                    while served.get("/health").json()["ready"] != "2 of 2 replicas":
                        await asyncio.sleep(0.05)
                    routed_before = routed()["1"]
                    while routed()["1"] < routed_before + len(load.bodies):
                        await asyncio.sleep(0.1)

        asyncio.run(run())
        served.process.terminate()
        assert served.process.wait(SOON) == 0
    assert load.lost() == []
    assert load.different() == []
    assert [len([*(tmp_path / f"replica-{n}").iterdir()]) for n in range(2)] == [1, 2]
    for path in tmp_path.glob("*.routing"):
        turns = [turn.result for turn in RoutingJournal(path.read_bytes()).turns()]
        assert any(isinstance(result, Routed) for result in turns)
    assert main(["replay", str(tmp_path)]) == 0, "all journals agree"


@pytest.mark.parametrize("kills", [*long([2]), *claimed([20])])
def test_engines_that_prefill_and_decode_lose_no_request(kills: int) -> None:
    """Answers are those of one engine that does both; each of the two is killed in
    turn.
    """
    rng, long_ones = Random(kills), long_bodies(1, 100)
    blocks = "--num-gpu-blocks-override=128"
    with server(FLOAT, blocks) as reference:
        expected = Load(reference.url, long_ones)
        asyncio.run(expected.learn())
    with server(FLOAT, blocks, "--prefill=1", "--decode=1") as served:
        load = Load(served.url, long_ones)
        load.right = expected.right

        def sent() -> bool:
            text = served.get("/metrics").text
            return bool(re.search(r"minfer_kv_sent_blocks_total{.*} [1-9]", text))

        async def run() -> None:
            await served.until_ready()
            async with load.clients():
                async with asyncio.timeout(SOON):
                    while not sent():
                        await asyncio.sleep(0.1)
                for number in range(kills):
                    await load.flows(time.monotonic())
                    async with asyncio.timeout(SOON):
                        while served.get("/health").json()["ready"] != "2 of 2 replicas":
                            await asyncio.sleep(0.05)
                    await asyncio.sleep(rng.uniform(0, 0.3))
                    name = f"minfer engine {number % 2}"
                    await served.successor(name, served.kill(name))
                await load.flows(time.monotonic())

        asyncio.run(run())
    assert load.lost() == []
    assert load.different() == []


@pytest.mark.claimed  # test_supervisor asks it of children that load nothing
def test_a_hanging_engine_is_restarted_and_loses_no_request() -> None:
    limit = 1.0
    with server(FLOAT, f"--engine-timeout={limit}") as served:
        load = Load(served.url, bodies(1, 200))

        async def run() -> None:
            await served.until_ready()
            await load.learn()
            clients = [asyncio.create_task(load.once(i)) for i in range(5)]
            await load.flows(time.monotonic())
            before = served.kill(signal_number=signal.SIGSTOP)
            started = time.monotonic()
            await served.successor(ENGINE, before)
            assert time.monotonic() - started > limit / 2
            await asyncio.wait_for(asyncio.gather(*clients), SOON)
            await served.until_ready()

        asyncio.run(run())
        served.process.terminate()
        assert served.process.wait(SOON) == 0
        assert served.process.stderr is not None
        message = served.process.stderr.read()
    assert load.lost() == []
    assert load.different() == []
    assert message.count("it is killed") == 1


@pytest.mark.claimed  # test_supervisor asks it of children that load nothing
def test_what_a_killed_server_leaves_behind_is_removed_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server(FLOAT) as served:
        children = served.children()
        served.process.kill()
    end = time.monotonic() + SOON
    while any(Path(f"/proc/{pid}/fd/0").exists() for pid in children.values()):
        assert time.monotonic() < end, "children outlive who watches them"
        time.sleep(0.01)
    (left,) = tmp_path.glob("minfer-*")
    with server(FLOAT):
        (new,) = tmp_path.glob("minfer-*")
    assert new != left


@pytest.mark.long  # test_supervisor asks it of children that load nothing
def test_a_server_that_drains_cuts_off_no_request(tmp_path: Path) -> None:
    with server(FLOAT, f"--journal={tmp_path}") as served:
        load = Load(served.url, bodies(1, 300))

        async def run() -> None:
            await load.learn()
            clients = [asyncio.create_task(load.once(i)) for i in range(5)]
            await load.flows(time.monotonic())
            async with httpx.AsyncClient(timeout=SOON) as client:
                head = {"connection": "keep-alive"}
                await client.get(f"{served.url}/ready", headers=head)
                # As a service manager does: all processes are told.
                for number in [*served.children().values(), served.process.pid]:
                    os.kill(number, signal.SIGTERM)
                async with asyncio.timeout(SOON):
                    while (await client.get(f"{served.url}/ready")).status_code != 503:
                        await asyncio.sleep(0.01)
                refused = await ask(served.url, load.bodies[0])
            assert refused.error.startswith("503")
            served.kill()  # even now
            await asyncio.gather(*clients)

        asyncio.run(run())
        assert served.process.wait(SOON) == 0
        assert served.process.stderr is not None
        err = served.process.stderr.read().splitlines()
        message = [line for line in err if line.startswith("minfer: ")]
    assert err[0].startswith("minfer ")
    assert load.lost() == []
    assert load.different() == []
    assert message[-1] == "minfer: engine ended by signal 9; it is started again"
    assert all("another signal stops them" in line for line in message[:-1])
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == 2, "each engine records a run of its own"
    for path in runs:
        assert sum(1 for _ in read_journal(path).turns()) > 1
