"""Ranks that cannot start together, and ranks that are lost."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from minfer import SamplingParams
from minfer.effects.execution.ranks import crew, rank_store
from minfer.effects.execution.ranks.joining import RankListener, join
from minfer.effects.execution.ranks.rank_store import RankStartError, make_store
from minfer.effects.execution.tiers.peers.framing import PeerError
from minfer.effects.live.engine import ranks
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.setup import device
from minfer.effects.setup.device import DeviceError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError
from tests.circles import long

from .test_ranks import engine


def children() -> list[int]:
    """Processes of other ranks that this one has started."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    lines = (line.split(None, 1) for line in listed.splitlines())
    return [int(pid) for pid, command in lines if re.search(r"-m minfer$", command)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 3}, "4 cannot be divided among 3 ranks; use 2"),
        ({"executor": "dry"}, "needs the torch executor"),
        ({"kv_disk": "somewhere"}, "cannot keep KV blocks on disk"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_start(
    settings: dict[str, Any], says: str
) -> None:
    args = EngineArgs(**{"device": "cpu", "tensor_parallel_size": 2, **settings})
    with pytest.raises((ConfigError, UnsupportedModelError), match=says):
        prepare(args)


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(DeviceError, match="4 ranks need a GPU each"):
        device._least_free(4)


def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    about = ranks.about
    monkeypatch.setattr(ranks, "about", lambda of: {**about(of), "model or weights": "x"})


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "LATE", 0.1)


def without_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ranks.settings_to
    monkeypatch.setattr(
        ranks, "settings_to", lambda of: {**known(of), "model": "/nowhere"}
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_weights, "rank 1 has another model or weights"),
        *long(
            [
                (late, "rank 1 has not joined within 0 s"),
                (without_its_model, "rank 1 ended with 2 before it joined"),
            ]
        ),
    ],
)
def test_ranks_that_cannot_start_are_named_and_none_is_left(
    change: Callable[[pytest.MonkeyPatch], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch)
    with pytest.raises(ConfigError, match=says):
        engine(tensor_parallel_size=2)
    assert not children()


@pytest.mark.long
def test_an_engine_whose_rank_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "SILENCE", 2.0)
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    for how in (signal.SIGKILL, signal.SIGSTOP):
        llm = engine(tensor_parallel_size=2)
        try:
            with pytest.raises(ConfigError, match="already has an engine of several"):
                engine(tensor_parallel_size=2)
            [rank] = children()
            stream = llm.stream(["x = 1"], endless)
            next(stream)
            os.kill(rank, how)
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="rank"):
                list(stream)
            assert time.monotonic() - began < 10
        finally:
            llm.close()
        assert not children()


@pytest.mark.parametrize("agent", ["True", "False"])
def test_a_port_of_another_program_is_named(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torchrun has made the store, or leaves that to rank 0."""
    monkeypatch.setattr(rank_store, "FOUND", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:  # which says nothing
        port = other.getsockname()[1]
        for name, value in (
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_USE_AGENT_STORE", agent),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        with pytest.raises(RankStartError, match=f"at 127.0.0.1:{port} cannot be"):
            make_store(2)


def test_a_silent_stranger_does_not_keep_ranks_from_joining() -> None:
    with (
        closing(RankListener(b"key")) as listener,
        closing(socket.create_connection(listener.address)),
    ):
        assert not listener.joined()  # the stranger is let in, and says nothing
        with pytest.raises(PeerError, match="the secret is another one"):
            join(listener.address, b"another key", 1)
        with closing(join(listener.address, b"key", 1)) as link:
            link.send_bytes(b'{"about": {}}')
            end = time.monotonic() + 5
            while not (joined := listener.joined()):
                assert time.monotonic() < end
            assert (joined.rank, joined.message) == (1, {"about": {}})
            for one in (joined.link, link):
                with socket.socket(fileno=os.dup(one.fileno())) as sock:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), (
                        "items wait for each other"
                    )


def test_ranks_end_with_the_engine_and_not_with_a_thread(tmp_path: Path) -> None:
    """Linux takes the thread that started a process for its parent."""
    with ThreadPoolExecutor(1) as pool:
        journal = tmp_path / "runs"
        llm = pool.submit(engine, tensor_parallel_size=2, journal=journal).result()
    with closing(llm):
        assert len(children()) == 1
        [answer] = llm.generate(["x = 1"], SamplingParams(max_tokens=2), use_tqdm=False)
        assert answer.outputs
    assert not children()
