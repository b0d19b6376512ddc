"""minfer as an application of Ray Serve: each replica is an engine with its HTTP API.

    pip install '.[ray-serve]'                     # in a clone, on each node
    cd tests/examples
    serve run --working-dir . ray_serve_app:build model=MODEL num_replicas=4 num_gpus=1

Their API, at http://127.0.0.1:8000/v1, is that of `minfer serve`. Ray Serve starts and
restarts replicas, adds and removes them by load if `max_replicas` is given, and sends
each request to the less busy of two.
"""

import json
import os
from typing import Any, Final

from pydantic import BaseModel
from ray import serve
from ray.serve.config import AutoscalingConfig
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from minfer import AsyncLLM
from minfer.effects.serving.application import Application

GRACE: Final = 600.0  # seconds that requests have to end in a replica that is removed


class Arguments(BaseModel):
    """What `serve run ray_serve_app:build` takes as NAME=VALUE."""

    model: str | None = None  # a folder on each node, or a name; None: the bundled model
    name: str = "minfer"  # of the model, for clients
    engine: str = "{}"  # other arguments of AsyncLLM, in JSON
    num_gpus: float = 0  # of a replica; with tensor parallelism, as many as it has ranks
    num_replicas: int = 1
    max_replicas: int | None = None  # with autoscaling; num_replicas are the fewest
    max_ongoing_requests: int = 512  # of a replica; more wait where Ray Serve's proxy is


class CurrentReplica:
    """Passes requests to the application of the replica in whose process it is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        replica = serve.get_replica_context().servable_object
        await replica.application(scope, receive, send)


class Engine:
    """A replica. When it is removed, it first answers the requests that it has."""

    def __init__(self, model: str | None, name: str, engine: dict[str, Any]) -> None:
        # A key from the environment of the node, not from arguments, which Ray shows.
        key = os.environ.get("MINFER_API_KEY", "")
        self.llm = AsyncLLM(model, **engine)
        self.application = Application(self.llm, [name], api_key=key)

    def check_health(self) -> None:
        """Have Ray Serve replace a replica whose engine broke."""
        if self.llm.errored:
            raise RuntimeError("the engine is broken")


def build(args: Arguments) -> serve.Application:
    """The application for these arguments."""
    scaling: dict[str, Any] = {"num_replicas": args.num_replicas}
    if args.max_replicas is not None:
        bounds = {"min_replicas": args.num_replicas, "max_replicas": args.max_replicas}
        scaling = {"autoscaling_config": AutoscalingConfig(**bounds)}
    with_http = serve.ingress(Starlette(routes=[Mount("/", CurrentReplica())]))
    deployment = serve.deployment(
        with_http(Engine),
        max_ongoing_requests=args.max_ongoing_requests,
        ray_actor_options={"num_gpus": args.num_gpus},
        graceful_shutdown_timeout_s=GRACE,
        **scaling,
    )
    return deployment.bind(args.model, args.name, json.loads(args.engine))
