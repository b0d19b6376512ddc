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
"""
