"""Engines on other machines, started and restarted by a distributed engine: Ray.

    machine of `minfer serve`                      nodes of the cluster
    supervisor
      +-- engine (engine_keeper) --- Ray calls --> EngineActor (engine_actor)
      |      | writes addresses                       +-- engine_child: `run_engine`
      +-- front 0, 1 ... ---------- TCP links -------------^

Theory. Ray chooses the machine of each replica, starts it, and starts it again somewhere
when its process or machine is gone. All else is as with replicas on one machine: fronts
choose among engines, keep each request, and resubmit it when a link is over. So no token
passes through Ray, and a front needs no more of it than where an engine is now.

Ray Serve has its own way to place replicas, start them again, and lead requests to them;
what its users run is an application of it:

    serve_deployment    a deployment of engines, and the ingress in front of them
    serve_front         the ingress: HTTP (front_application), and calls of handles
    serve_router        its router: which engine gets a request
    serve_engine        an engine in a replica's process, called as an ASGI application
"""
