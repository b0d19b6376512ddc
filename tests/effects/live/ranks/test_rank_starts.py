"""Ranks that cannot start together, and ranks that are lost."""

import os
import re
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from socket import SHUT_WR
from typing import Any

import pytest

from minfer import SamplingParams
from minfer.effects.execution.ranks import joining, worker_group
from minfer.effects.execution.ranks.joining import Joined, RankListener, find_rank_0
from minfer.effects.execution.ranks.rank_folder import (
    SOCKET_NAME,
    STORE_NAME,
    RankStartError,
    new_rank_folder,
    rank_folder_path,
)
from minfer.effects.execution.ranks.rank_messages import (
    Alive,
    RankPrepared,
    Ready,
    read_settings,
)
from minfer.effects.live.engine import ranks
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.net.addresses import dial, listen_at
from minfer.effects.net.framing import Socket, framed
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
        device._min_free_memory(4)


def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ranks.shared_facts
    monkeypatch.setattr(
        ranks, "shared_facts", lambda setup: {**real(setup), "model or weights": "x"}
    )


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "JOIN_SECONDS", 0.1)


def without_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ranks.encode_settings
    monkeypatch.setattr(
        ranks, "encode_settings", lambda setup: {**real(setup), "model": "/nowhere"}
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
    monkeypatch.setattr(joining, "SILENCE_SECONDS", 2.0)
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    for signal_number in (signal.SIGKILL, signal.SIGSTOP):
        llm = engine(tensor_parallel_size=2)
        try:
            with pytest.raises(ConfigError, match="already has an engine of several"):
                engine(tensor_parallel_size=2)
            [rank] = children()
            stream = llm.stream(["x = 1"], endless)
            next(stream)
            os.kill(rank, signal_number)
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="rank"):
                list(stream)
            assert time.monotonic() - began < 10
        finally:
            llm.close()
        assert not children()


def prepared(link: Socket) -> None:
    """Get the settings, and send what a rank sends."""
    assert read_settings(link).values == {"model": "m"}
    link.sendall(framed(Alive()) + framed(RankPrepared(7, {"version": "v"})))


def next_joined(listener: RankListener) -> Joined:
    end = time.monotonic() + 5
    while not (joined := listener.joined()):
        assert time.monotonic() < end
    return joined


def test_a_rank_gets_the_settings_and_joins(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with (
        closing(RankListener(tmp_path, {"model": "m"})) as listener,
        closing(dial(tmp_path / SOCKET_NAME)),  # it says nothing, and keeps no rank out
    ):
        assert not listener.joined()
        with closing(find_rank_0(tmp_path, 1)) as link:
            prepared(link)
            joined = next_joined(listener)
            assert (joined.rank, joined.prepared) == (
                1,
                RankPrepared(7, {"version": "v"}),
            )
            joined.link.close()


@pytest.mark.parametrize(
    "data", [framed(Ready()), b"\xff\xff\xff\xff", framed(Alive())[:-1], b""]
)
def test_one_that_says_anything_else_is_no_rank(tmp_path: Path, data: bytes) -> None:
    tmp_path.chmod(0o700)
    with closing(RankListener(tmp_path, {"model": "m"})) as listener:
        with closing(find_rank_0(tmp_path, 1)) as link:
            read_settings(link)
            link.sendall(data)
            link.shutdown(SHUT_WR)
            assert link.recv(1) == b"", "it is closed"
        assert not listener.joined()


def test_a_rank_waits_for_a_rank_0_that_starts_later(tmp_path: Path) -> None:
    """As under torchrun, also where a killed one has left its socket."""
    folder = tmp_path / "ranks"
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(find_rank_0, folder, 1)
        time.sleep(0.1)
        folder.mkdir(mode=0o700)
        listen_at(folder / SOCKET_NAME).close()
        time.sleep(0.1)
        with (
            closing(RankListener(folder, {"model": "m"})) as listener,
            closing(later.result(5)) as link,
        ):
            prepared(link)
            next_joined(listener).link.close()


def test_a_rank_0_that_does_not_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "JOIN_SECONDS", 0.1)
    with pytest.raises(RankStartError, match=f"rank 0 does not listen in {tmp_path}"):
        find_rank_0(tmp_path / "none", 1)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o701, 0o755])
def test_a_folder_that_other_users_reach_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with (
        closing(RankListener(tmp_path, {})),
        pytest.raises(RankStartError, match="no folder of this user alone"),
    ):
        find_rank_0(tmp_path, 1)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    with (
        closing(RankListener(folder, {})),
        pytest.raises(RankStartError, match="no folder of this user alone"),
    ):
        find_rank_0(link, 1)


def test_a_folder_or_process_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    other_user = os.geteuid() + 1
    with closing(RankListener(tmp_path, {})), monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other_user)
        with pytest.raises(RankStartError, match="no folder of this user alone"):
            find_rank_0(tmp_path, 1)
        patch.setattr(joining, "check_private", lambda _: None)
        with pytest.raises(RankStartError, match=f"process of user {other_user - 1}"):
            find_rank_0(tmp_path, 1)


def torchrun(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Be a process of torchrun; returns the folder in which its ranks meet."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "1")
    return rank_folder_path()


def test_a_folder_that_is_there_before_rank_0_of_torchrun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = torchrun(monkeypatch, tmp_path)
    folder.mkdir()  # another user can do that: the name is no secret
    with pytest.raises(RankStartError, match=f"{folder}"):
        ranks.listen_in_new_folder({}, ExitStack())
    assert folder.exists()


def test_engines_of_torchrun_meet_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torchrun(monkeypatch, tmp_path)
    assert rank_folder_path() == first
    for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert rank_folder_path() != first
    with new_rank_folder() as folder:
        assert folder == first
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.long
def test_torch_s_store_has_nothing_of_minfer_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the addresses of gloo's sockets. The folder is removed with the engine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(engine(tensor_parallel_size=2)):
        [folder] = tmp_path.glob("minfer-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        data = (folder / STORE_NAME).read_bytes()
    assert b"//cpu//" in data
    for text in (b"minfer", b"model", b"tensor_parallel_size"):
        assert text not in data
    assert not folder.exists()


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
