"""Engines on several machines, which Ray places, starts and restarts.

    machine of `minfer serve`                      nodes of the cluster
    supervisor
      +-- engine (engine_keeper) --- Ray calls --> EngineActor (engine_actor)
      |      | writes addresses                       +-- engine_child: `run_engine`
      +-- front 0, 1 ... ---------- TCP links -------------^

Theory. Ray chooses the node of each replica, starts it, and restarts it on any node with
room when its process or node fails. All else is as with replicas on one machine: fronts
choose among engines, keep each request, and resubmit it when a link breaks. No token
passes through Ray; all that a front needs is the current address of each engine.

Ray Serve places and restarts replicas, and routes requests to them, in its own way. For
its users, minfer is a Ray Serve application:

    serve_deployment    a deployment of engines, and the ingress in front of them
    serve_front         the ingress: HTTP (front_application), and calls through handles
    serve_router        the request router: which engine gets a request
    serve_engine        an engine in a replica's process, called as an ASGI application
"""
