"""The Ray Serve application: a deployment of engines, and the ingress in front of it."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from minfer.effects.serving.distributed.engine_plan import with_absolute_paths
from minfer.effects.serving.distributed.ray_cluster import (
    CPU,
    GPU,
    check_nodes,
    connect,
    needs,
    nodes,
    warn_of_open_ports,
)
from minfer.effects.serving.distributed.serve_engine import ServedEngine
from minfer.effects.serving.distributed.serve_front import ServedFront
from minfer.effects.serving.distributed.serve_router import MinferRequestRouter
from minfer.effects.serving.processes.server import read_options
from minfer.effects.serving.router.router_options import MAX_BODY
from minfer.values.checks import ConfigError
from minfer.values.texts import without_breaks

REPORT_PERIOD: Final = 1.0  # seconds between two reports of a replica's load
# Requests that a replica has at once, in multiples of --max-num-seqs: of 2, one runs and
# one waits, ready to start. The rest wait in the ingress, where a new replica gets them.
REQUESTS_PER_SEAT: Final = 2
FRONT_REQUESTS: Final = 2**14  # at once, of one replica of the ingress
DRAIN_TIMEOUT: Final = 600.0  # seconds to end requests in when a replica is removed


def application(
    options: argparse.Namespace,
    routing: str | None,
    engines: Mapping[str, Any],
    fronts: int,
) -> Any:
    """The bound application for the options of `minfer serve`. Connects to Ray.

    `routing`: the name of a routing policy; None: Ray Serve's own router.
    `engines`: options of `serve.deployment` for the engines.
    `fronts`: the number of replicas of the ingress.

    Raises ConfigError for options that Ray Serve refuses, if Ray cannot be used, or if a
    node with the resources of an engine cannot serve the model: the error names each such
    node.
    """
    args, http = read_options(options)
    args = with_absolute_paths(args)
    key = http.bounds.reasoning_key
    for name in ("model", "speculative_config", "journal", "kv_disk"):
        setattr(options, name, getattr(args, name))
    if options.api_keys_file is not None:
        options.api_keys_file = str(Path(options.api_keys_file).resolve())
    if not ray.is_initialized():
        connect("serve")
    found = nodes()
    warn_of_open_ports(found)
    needed = needs(args, found)
    check_nodes(args, found, later=True)  # Ray Serve warns while it waits for one
    _check_mappings(engines)
    usual: dict[str, Any] = {
        "max_ongoing_requests": REQUESTS_PER_SEAT * args.max_num_seqs,
        "graceful_shutdown_timeout_s": DRAIN_TIMEOUT,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    if routing is not None:
        usual["request_router_config"] = RequestRouterConfig(
            request_router_class=MinferRequestRouter,
            request_router_kwargs={"policy": routing},
            request_routing_stats_period_s=REPORT_PERIOD,
        )
    resources = {"num_cpus": needed.get(CPU, 0), "num_gpus": needed.get(GPU, 0)}
    try:
        actor = resources | dict(engines.get("ray_actor_options", {}))
        given = {**usual, **engines, "ray_actor_options": actor}
        engine = serve.deployment(name="engine", **given)(ServedEngine).bind(options, key)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Ray Serve takes no such options: {without_breaks(error)}"
        ) from error
    front = serve.deployment(
        name="front",
        num_replicas=fronts,
        max_ongoing_requests=FRONT_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT,
        ray_actor_options={"num_cpus": 0},
    )
    most = options.max_body_size or MAX_BODY
    return front(serve.ingress()(ServedFront)).bind(engine, most)


def _check_mappings(engines: Mapping[str, Any]) -> None:
    """Raise ConfigError for mistakes that Ray Serve accepts, or does not name."""
    actor = engines.get("ray_actor_options", {})
    if not isinstance(actor, Mapping):
        raise ConfigError(f"ray_actor_options must be a mapping, not {actor!r}")
    scaling = engines.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        known = AutoscalingConfig.model_fields
        if unknown := [key for key in scaling if key not in known]:
            raise ConfigError(
                f"autoscaling_config has no {unknown[0]!r}; it has {', '.join(known)}"
            )
