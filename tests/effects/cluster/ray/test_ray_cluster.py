"""What is said of Ray's ports before engines start on a cluster."""

import logging
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long  # importing Ray takes a second


@pytest.mark.parametrize(
    ("addresses", "has_token", "named"),
    [
        (["127.0.0.1", "10.1.2.3", "192.168.0.7", "fd00::2"], False, ""),
        (["8.8.8.8", "10.1.2.3", "2600::1"], False, "2600::1, 8.8.8.8"),
        (["node.example.org"], False, "node.example.org"),
        (["8.8.8.8"], True, ""),
    ],
)
def test_ports_of_ray_that_others_may_reach_are_named(
    addresses: list[str],
    has_token: bool,
    named: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minfer.effects.cluster.ray import ray_cluster

    monkeypatch.setattr(ray_cluster, "has_token_authentication", lambda: has_token)
    nodes = [
        ray_cluster.ClusterNode(id=address, name=address, address=address, resources={})
        for address in addresses
    ]
    with caplog.at_level(logging.WARNING):
        ray_cluster.warn_of_open_ports(nodes)
    if not named:
        assert caplog.text == ""
        return
    [record] = caplog.records
    assert f"reaches Ray's ports at {named} can run code there" in record.message
    assert "RAY_AUTH_MODE=token" in record.message


@pytest.mark.parametrize(("mode", "is_on"), [("token", "True"), ("disabled", "False")])
def test_ray_says_whether_it_has_token_authentication(mode: str, is_on: str) -> None:
    """Ray reads its variables once for each process."""
    program = (
        "from minfer.effects.cluster.ray.ray_cluster import *\n"
        "print(has_token_authentication())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "t" * 32},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == is_on
