"""Which engines a command line asks for."""

import argparse
import contextlib
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.serve import add_options
from minfer.effects.cluster.processes import deployment as settings
from minfer.effects.cluster.processes.deployment import Deployment, read_deployment
from minfer.effects.execution.tiers.peers import remote_memory
from minfer.effects.execution.tiers.peers.peer_plan import DECODE, PREFILL
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError

SAID = "--cache-secret=s"
APART = ("--prefill=1", "--decode=2")
PATHS = [Path("/x/0/engine"), Path("/x/1/engine"), Path("/x/2/engine")]


def deployment(*said: str) -> Deployment:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_deployment(parser.parse_args(said))


def counts(found: Deployment) -> tuple[Any, ...]:
    return found.replicas, found.prefillers, len(found.prefill_at), found.routed


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([], (1, 0, 0, False)),
        (["--replicas=3"], (3, 0, 0, True)),
        (["--prefill=1", "--decode=2"], (3, 1, 0, True)),
        ([SAID, "--prefill-listen=h:1"], (1, 1, 0, True)),
        ([SAID, "--prefill-listen=h:1", "--prefill=2"], (2, 2, 0, True)),
        ([SAID, "--prefill-at=h:1", "--kv-listen=7"], (1, 0, 1, True)),
        (
            [
                SAID,
                "--prefill-at=h:1",
                "--prefill-at=i:1",
                "--kv-listen=7",
                "--prefill=1",
                "--decode=2",
            ],
            (3, 1, 2, True),
        ),
    ],
)
def test_engines(said: list[str], found: tuple[Any, ...]) -> None:
    assert counts(deployment(*said)) == found


@pytest.mark.parametrize(
    ("has_ray", "said", "why"),
    [
        (False, [], r"needs ray: pip install '.\[ray\]'"),
        (True, [SAID, "--prefill-listen=h:1"], "all engines of a server; leave --pref"),
        (True, [SAID, "--prefill-at=h:1", "--kv-listen=7"], "all engines of a server"),
        (True, [*APART, "--tensor-parallel-size=2"], "are for engines of one rank"),
        (True, [*APART, "--prefill-tensor-parallel-size=2"], "engines of one rank"),
        (True, ["--prefill=1"], "--prefill and --decode need each other"),
    ],
)
def test_what_no_cluster_can_have(
    monkeypatch: pytest.MonkeyPatch, has_ray: bool, said: list[str], why: str
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: "there" if has_ray else None)
    with pytest.raises(ConfigError, match=why):
        deployment("--distributed=ray", *said)


def test_links_to_a_cluster_have_a_secret_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: "there")
    each = [deployment("--distributed=ray", "--replicas=2", SAID) for _ in range(2)]
    assert len(each[0].secret) >= 16
    assert each[0].secret != each[1].secret
    each = [deployment("--distributed=ray", *APART) for _ in range(2)]
    plans = each[0].peer_plans(PATHS, 1)
    roles = [(one.role, one.dials, one.is_local) for one in plans if one]
    assert roles == [(PREFILL, True, False), *[(DECODE, False, True)] * 2]
    assert {one.secret for one in plans if one} == {each[0].secret} != {each[1].secret}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["--replicas=0"], "--replicas must be at least 1"),
        (
            ["--prefill-tensor-parallel-size=2"],
            "2 must be at least 1, and is for --prefill and --decode",
        ),
        (["--prefill=1"], "--prefill and --decode need each other"),
        (["--decode=1"], "--prefill and --decode need each other"),
        (["--prefill=-1", "--decode=2"], "--prefill and --decode need each other"),
        (["--prefill=1", "--decode=1", "--replicas=2"], "--replicas are engines that do"),
        (["--prefill-listen=h:1"], "need a --cache-secret"),
        (["--prefill-at=h:1", "--kv-listen=h:2"], "need a --cache-secret"),
        ([SAID, "--prefill-at=h:1"], "--prefill-at and --kv-listen need each other"),
        ([SAID, "--kv-listen=h:1"], "--prefill-at and --kv-listen need each other"),
        (["--kv-nixl"], "--kv-nixl is for --kv-listen"),
        ([SAID, "--prefill-listen=h:1", "--decode=1"], "that compute prompts alone"),
        ([SAID, "--prefill-listen=h"], "--prefill-listen: 'h' must be HOST:PORT"),
        ([SAID, "--prefill-listen=h:1", "--replicas=2"], "--replicas are engines that"),
    ],
)
def test_what_is_no_deployment(
    monkeypatch: pytest.MonkeyPatch, said: list[str], why: str
) -> None:
    monkeypatch.delenv("MINFER_CACHE_SECRET", raising=False)
    with pytest.raises(ConfigError, match=re.escape(why)):
        deployment(*said)


def test_nixl_that_is_not_there_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "MODULE", "not_there")
    with pytest.raises(ConfigError, match="--kv-nixl needs nixl-cu13: pip install"):
        deployment(SAID, "--prefill-at=h:1", "--kv-listen=7", "--kv-nixl")


def test_what_engines_are_to_each_other() -> None:
    found = deployment(
        SAID, "--prefill-at=h:1", "--kv-listen=k:7", "--prefill=1", "--decode=2"
    )
    first, second, third = found.peer_plans(PATHS, 1)
    assert first is not None
    assert second is not None
    assert third is not None
    local = {"1": Path("/x/1/kv"), "2": Path("/x/2/kv")}
    assert (first.role, first.sends, first.listens) == (PREFILL, local, ())
    assert (second.role, second.listens) == (DECODE, (local["1"], ("k", 7)))
    assert (third.role, third.listens) == (DECODE, (local["2"], ("k", 8)))
    assert first.secret == second.secret != b""
    assert not first.dials, "its engines are named"
    [alone] = deployment(SAID, "--prefill-listen=h:1").peer_plans(PATHS[:1], 1)
    assert alone is not None
    assert (alone.role, alone.dials, alone.secret) == (PREFILL, True, first.secret)
    assert deployment().peer_plans(PATHS[:1], 1) == [None]


def test_engines_that_prefill_may_have_other_ranks() -> None:
    found = deployment("--prefill=1", "--decode=2", "--prefill-tensor-parallel-size=2")
    sizes = [one.tensor_parallel_size for one in found.settings(EngineArgs())]
    assert sizes == [2, 1, 1]
    plans = found.peer_plans(PATHS, 1)
    assert {(one.prefill_ranks, one.decode_ranks) for one in plans if one} == {(2, 1)}
    sizes = [
        one.tensor_parallel_size
        for one in deployment("--prefill=1", "--decode=1").settings(
            EngineArgs(tensor_parallel_size=4)
        )
    ]
    assert sizes == [4, 4]


@pytest.mark.parametrize("option", ["--prefill-listen", "--kv-listen"])
def test_a_port_that_is_taken_ends_the_start(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = [SAID, f"{option}=127.0.0.1:{taken.getsockname()[1]}"]
        if option == "--kv-listen":
            said.append("--prefill-at=h:1")
        with (
            contextlib.ExitStack() as stack,
            pytest.raises(ConfigError, match=f"cannot listen at .* with {option}"),
        ):
            deployment(*said).link_sockets(stack)
