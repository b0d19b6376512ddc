"""An application of Ray Serve: a deployment of engines, and the ingress in front."""

import argparse
import logging
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from minfer.effects.serving.distributed.engine_plan import anywhere
from minfer.effects.serving.distributed.ray_cluster import (
    CPU,
    GPU,
    check_nodes,
    needs,
    nodes,
)
from minfer.effects.serving.distributed.serve_engine import ServedEngine
from minfer.effects.serving.distributed.serve_front import ServedFront
from minfer.effects.serving.distributed.serve_router import MinferRequestRouter
from minfer.effects.serving.processes.server import read_options
from minfer.effects.serving.router.router_options import MAX_BODY
from minfer.values.checks import ConfigError

REPORT: Final = 1.0  # seconds from one report of a replica's load to the next
# Requests that a replica has at once, for each of its seats: those that wait there begin
# at once when a seat gets free. All others wait in front, and go to a replica that joins.
LINE: Final = 2
FRONT_REQUESTS: Final = 2**14  # at once, of one front
DRAIN: Final = 600.0  # seconds that requests have to end in when a replica goes


def application(
    options: argparse.Namespace,
    routing: str | None,
    engines: Mapping[str, Any],
    fronts: int,
) -> Any:
    """The application for the options of `minfer serve`. `routing` is a policy's name;
    None: Ray Serve's own router. `engines` are Ray Serve's options of the engines'
    deployment; the ingress has so many `fronts`.

    Raises ConfigError for options that Ray Serve refuses, and, which says it of each
    node, if nodes that have what an engine needs cannot serve the model.
    """
    args = anywhere(read_options(options)[0])
    options.model, options.journal = args.model, args.journal
    if not ray.is_initialized():
        ray.init(namespace="serve", logging_level=logging.WARNING)
    found = nodes()
    needed = needs(args, found)
    able = [node for node in found if node.has(needed)]
    if able:  # else nodes may join: Ray Serve says so while it waits
        check_nodes(args, able)
    usual: dict[str, Any] = {
        "max_ongoing_requests": LINE * args.max_num_seqs,
        "graceful_shutdown_timeout_s": DRAIN,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    if routing is not None:
        usual["request_router_config"] = RequestRouterConfig(
            request_router_class=MinferRequestRouter,
            request_router_kwargs={"policy": routing},
            request_routing_stats_period_s=REPORT,
        )
    resources = {"num_cpus": needed.get(CPU, 0), "num_gpus": needed.get(GPU, 0)}
    try:
        actor = resources | dict(engines.get("ray_actor_options", {}))
        given = {**usual, **engines, "ray_actor_options": actor}
        engine = serve.deployment(name="engine", **given)
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"Ray Serve takes no such options: {why}") from error
    front = serve.deployment(
        name="front",
        num_replicas=fronts,
        max_ongoing_requests=FRONT_REQUESTS,
        graceful_shutdown_timeout_s=DRAIN,
        ray_actor_options={"num_cpus": 0},
    )
    return front(serve.ingress()(ServedFront)).bind(
        engine(ServedEngine).bind(options), options.max_body_size or MAX_BODY
    )
