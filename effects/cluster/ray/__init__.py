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
"""
