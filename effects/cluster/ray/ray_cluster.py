"""The Ray cluster: how minfer connects to it, which resources a replica needs, and
whether the nodes can serve the model.

Ranks of a replica are processes that its engine starts on its own node. So a replica is
one actor with a GPU for each rank, and Ray takes the resources of an actor from one node;
a placement group would be needed for several actors.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final

import ray
from attrs import field, frozen
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from minfer.effects.cluster.ray.node_check import model_error
from minfer.effects.net.addresses import read_port
from minfer.effects.setup.engine_args import EngineArgs
from minfer.values.checks import ConfigError
from minfer.values.texts import without_breaks
from minfer.version import __version__

# In which nodes have to check a model: they may have to download it.
CHECK_SECONDS: Final = 120.0
CONNECT_SECONDS: Final = 5.0  # for a TCP connection to the cluster's head
GPU: Final = "GPU"
CPU: Final = "CPU"
_log = logging.getLogger("minfer.cluster")


@frozen(kw_only=True)
class ClusterNode:
    """A node of the cluster."""

    id: str
    name: str  # for messages
    address: str  # at which Ray's ports of the node are reached
    resources: Mapping[str, float] = field(repr=False)  # in all, used or not

    def has(self, resources: Mapping[str, float]) -> bool:
        """Returns whether a replica would fit if nothing else ran on the node."""
        return all(
            self.resources.get(name, 0) >= count for name, count in resources.items()
        )


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """`connect`, and disconnect at the end. Raises ConfigError."""
    connect("minfer")
    try:
        yield
    finally:
        ray.shutdown()


def connect(namespace: str) -> None:
    """Connect to the cluster of `RAY_ADDRESS`, else to one that runs on this machine,
    else to a new one with only this machine. Raises ConfigError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # holds for a new cluster
    try:
        _check_address(os.environ.get("RAY_ADDRESS") or _last_address())
        ray.init(namespace=namespace, logging_level=logging.WARNING)
    except (OSError, RayError, RuntimeError, ValueError) as error:
        cluster = os.environ.get("RAY_ADDRESS") or "of this machine"
        reason = without_breaks(error)
        raise ConfigError(
            f"the Ray cluster {cluster} cannot be used: {reason}; see RAY_ADDRESS, and "
            "`ray status`; `ray stop` forgets a cluster of this machine that was killed"
        ) from error


def _last_address() -> str:
    """Returns the address of the cluster that was started last on this machine, which may
    have been killed; empty if there is none.
    """
    # Not part of Ray's stable API, which can only connect to it.
    return ray._private.services.get_ray_address_from_environment(None, None) or ""


def _check_address(address: str) -> None:
    """Raise OSError if no process listens there: Ray would try for many minutes."""
    place = address.removeprefix("ray://")
    if "://" in place:  # Ray refuses it, as it does an HTTP address, or has a plugin
        return
    try:
        port = read_port(place)
    except ValueError:  # it is empty or a word such as `auto`, or Ray refuses it
        return
    socket.create_connection(port, CONNECT_SECONDS).close()


def alive_nodes() -> list[ClusterNode]:
    """Returns the nodes that are alive."""
    return [
        ClusterNode(
            id=info["NodeID"],
            name=f"{info['NodeManagerHostname']} ({info['NodeManagerAddress']}, "
            f"{info['NodeID'][:8]})",
            address=info["NodeManagerAddress"],
            resources=info["Resources"],
        )
        for info in ray.nodes()
        if info["Alive"]
    ]


def warn_of_open_ports(cluster_nodes: Sequence[ClusterNode]) -> None:
    """Log a warning if other machines may run code on the nodes through Ray's ports:
    token authentication is off, and the address of a node is not private. Machines in the
    same private network are not checked.
    """
    public = sorted(
        {node.address for node in cluster_nodes if not _is_private(node.address)}
    )
    if not public or has_token_authentication():
        return
    _log.warning(
        "any machine that reaches Ray's ports at %s can run code there: set "
        "RAY_AUTH_MODE=token for `ray start` on all nodes and for this command, with one "
        "token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token), or have the "
        "nodes in a network of their own",
        ", ".join(public),
    )


def has_token_authentication() -> bool:
    """Returns whether Ray sends its token with each call of this process, and refuses
    calls to it without that. Nodes without authentication take calls with a token, too.
    """
    # Not part of Ray's stable API. Ray has it since 2.52.
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_utils

        return bool(authentication_utils.is_token_auth_enabled())
    return False


def _is_private(address: str) -> bool:
    """Returns whether it is an address of this machine or of a private network."""
    with contextlib.suppress(ValueError):  # it is a name
        return ip_address(address).is_private
    return False


def draining_nodes() -> frozenset[str]:
    """Returns the ids of nodes that are being drained: they will leave, and get no new
    actors.
    """
    # Not part of Ray's stable API, which has no such call; Ray's own libraries use it.
    drained: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    return frozenset(drained)


def has_room(resources: Mapping[str, float], excluded: Collection[str]) -> bool:
    """Returns whether a replica fits now on a node that is not in `excluded` (ids of
    nodes).
    """
    free_by_node: Mapping[str, Mapping[str, float]]
    free_by_node = ray._private.state.available_resources_per_node()
    return any(
        all(free.get(name, 0) >= count for name, count in resources.items())
        for node, free in free_by_node.items()
        if node not in excluded
    )


def replica_resources(
    args: EngineArgs, cluster_nodes: Sequence[ClusterNode]
) -> dict[str, float]:
    """Returns the resources of a replica, by Ray's names: a GPU for each rank, or else a
    CPU. With `--device auto`, GPUs if any of the nodes has one.
    """
    on_gpus = args.executor == "torch" and (
        args.device == "cuda"
        or (args.device == "auto" and any(map(_has_gpu, cluster_nodes)))
    )
    return {GPU if on_gpus else CPU: args.parallel.ranks}


def check_nodes(args: EngineArgs, cluster_nodes: Sequence[ClusterNode]) -> None:
    """Raise ConfigError if no node has the resources of a replica, or if one that has
    them lacks this version of minfer, or cannot read the model. The error names each such
    node.
    """
    resources = replica_resources(args, cluster_nodes)
    able_nodes = [node for node in cluster_nodes if node.has(resources)]
    if not able_nodes:
        (name, count), *_ = resources.items()
        available = [
            f"{node.name} has {node.resources.get(name, 0):g}" for node in cluster_nodes
        ]
        raise ConfigError(
            f"each replica needs {count} {name} of one node: {'; '.join(available)}"
        )
    failed = _run_check(able_nodes, _version_check(), __version__)
    if not failed:  # another version may not be able to unpickle the settings
        failed = _run_check(able_nodes, model_error, args)
    # A node that has left meanwhile is no error.
    current_ids = {node.id for node in alive_nodes()}
    errors = [
        f"node {node.name}: {error}" for node, error in failed if node.id in current_ids
    ]
    if errors:
        raise ConfigError(f"the cluster cannot serve this model: {'; '.join(errors)}")


def _version_check() -> Callable[[str], str]:
    """Returns a check that a node has the version of minfer that the argument names. Ray
    pickles nested functions by value, so it runs even where minfer is missing.
    """

    def check(version: str) -> str:
        try:
            from minfer.version import __version__ as node_version
        except ImportError:
            return f"minfer is not installed; install {version}"
        if node_version == version:
            return ""
        return f"it has minfer {node_version}, and the server has {version}"

    return check


def _run_check(
    able_nodes: Sequence[ClusterNode], check: Callable[[Any], str], argument: object
) -> list[tuple[ClusterNode, str]]:
    """Run a check on each of these nodes; returns those with a result that is not empty,
    or that failed, with the result or the error.
    """
    task = ray.remote(check)
    references = [
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(argument)
        for node in able_nodes
    ]
    ray.wait(references, num_returns=len(references), timeout=CHECK_SECONDS)
    answers = zip(able_nodes, map(_answer, references), strict=True)
    return [(node, answer) for node, answer in answers if answer]


def _answer(reference: Any) -> str:
    try:
        return str(ray.get(reference, timeout=0))
    except TimeoutError:
        return f"it did not answer within {CHECK_SECONDS:g} s"
    except RayError as error:
        return without_breaks(error)[-300:]


def _has_gpu(node: ClusterNode) -> bool:
    return node.has({GPU: 1})
