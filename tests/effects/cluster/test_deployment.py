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


def deployment(*options: str) -> Deployment:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return read_deployment(parser.parse_args(options))


def counts(deployed: Deployment) -> tuple[Any, ...]:
    return (
        deployed.replicas,
        deployed.prefillers,
        len(deployed.prefill_at),
        deployed.routed,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
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
def test_engines(options: list[str], expected: tuple[Any, ...]) -> None:
    assert counts(deployment(*options)) == expected


@pytest.mark.parametrize(
    ("has_ray", "options", "message"),
    [
        (False, [], r"needs ray: pip install '.\[ray\]'"),
        (True, [SAID, "--prefill-listen=h:1"], "all engines of a server; leave --pref"),
        (True, [SAID, "--prefill-at=h:1", "--kv-listen=7"], "all engines of a server"),
        (True, [*APART, "--tensor-parallel-size=2"], "are for engines of one rank"),
        (True, [*APART, "--prefill-tensor-parallel-size=2"], "engines of one rank"),
        (True, ["--prefill=1"], "--prefill and --decode need each other"),
        (
            True,
            ['--kv-events-config={"enable_kv_cache_events": true}'],
            "engines of this machine, not of --distributed ray",
        ),
    ],
)
def test_what_no_cluster_can_have(
    monkeypatch: pytest.MonkeyPatch, has_ray: bool, options: list[str], message: str
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: "there" if has_ray else None)
    with pytest.raises(ConfigError, match=message):
        deployment("--distributed=ray", *options)


def test_links_to_a_cluster_have_a_secret_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: "there")
    deployments = [
        deployment("--distributed=ray", "--replicas=2", SAID) for _ in range(2)
    ]
    assert len(deployments[0].secret) >= 16
    assert deployments[0].secret != deployments[1].secret
    deployments = [deployment("--distributed=ray", *APART) for _ in range(2)]
    plans = deployments[0].peer_plans(PATHS, 1)
    roles = [(plan.role, plan.dials, plan.is_local) for plan in plans if plan]
    assert roles == [(PREFILL, True, False), *[(DECODE, False, True)] * 2]
    assert (
        {plan.secret for plan in plans if plan}
        == {deployments[0].secret}
        != {deployments[1].secret}
    )


@pytest.mark.parametrize(
    ("options", "message"),
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
    monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.delenv("MINFER_CACHE_SECRET", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        deployment(*options)


def test_nixl_that_is_not_there_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "MODULE", "not_there")
    with pytest.raises(ConfigError, match="--kv-nixl needs nixl-cu13: pip install"):
        deployment(SAID, "--prefill-at=h:1", "--kv-listen=7", "--kv-nixl")


def test_what_engines_are_to_each_other() -> None:
    deployed = deployment(
        SAID, "--prefill-at=h:1", "--kv-listen=k:7", "--prefill=1", "--decode=2"
    )
    first, second, third = deployed.peer_plans(PATHS, 1)
    assert first is not None
    assert second is not None
    assert third is not None
    local = {"1": Path("/x/1/kv"), "2": Path("/x/2/kv")}
    assert (first.role, first.sends, first.listens) == (PREFILL, local, ())
    assert (second.role, second.listens) == (DECODE, (local["1"], ("k", 7)))
    assert (third.role, third.listens) == (DECODE, (local["2"], ("k", 8)))
    assert first.secret == second.secret != b""
    assert not first.dials, "its engines are named"
    [single_plan] = deployment(SAID, "--prefill-listen=h:1").peer_plans(PATHS[:1], 1)
    assert single_plan is not None
    assert (single_plan.role, single_plan.dials, single_plan.secret) == (
        PREFILL,
        True,
        first.secret,
    )
    assert deployment().peer_plans(PATHS[:1], 1) == [None]


def test_engines_that_prefill_may_have_other_ranks() -> None:
    deployed = deployment("--prefill=1", "--decode=2", "--prefill-tensor-parallel-size=2")
    sizes = [
        settings.tensor_parallel_size for settings in deployed.settings(EngineArgs())
    ]
    assert sizes == [2, 1, 1]
    plans = deployed.peer_plans(PATHS, 1)
    assert {(plan.prefill_ranks, plan.decode_ranks) for plan in plans if plan} == {(2, 1)}
    sizes = [
        settings.tensor_parallel_size
        for settings in deployment("--prefill=1", "--decode=1").settings(
            EngineArgs(tensor_parallel_size=4)
        )
    ]
    assert sizes == [4, 4]


@pytest.mark.parametrize("option", ["--prefill-listen", "--kv-listen"])
def test_a_port_that_is_taken_ends_the_start(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = [SAID, f"{option}=127.0.0.1:{listener.getsockname()[1]}"]
        if option == "--kv-listen":
            options.append("--prefill-at=h:1")
        with (
            contextlib.ExitStack() as stack,
            pytest.raises(ConfigError, match=f"cannot listen at .* with {option}"),
        ):
            deployment(*options).link_sockets(stack)


@pytest.mark.parametrize(
    "options",
    [
        ["--distributed=ray"],
        [SAID, "--prefill-at=h:1", "--kv-listen=7"],
        [SAID, "--prefill-listen=h:1"],
    ],
)
def test_adapters_are_not_for_engines_of_other_machines(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: True)
    with pytest.raises(ConfigError, match="--enable-lora is for engines of this machine"):
        deployment("--enable-lora", *options)
    assert counts(deployment("--enable-lora", *APART)) == (3, 1, 0, True)
