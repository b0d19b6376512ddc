"""Engines on several machines, which Ray places, starts and restarts.

    machine of `minfer serve`                           nodes of the cluster
    supervisor
      +-- engine (engine_keeper)
      |      +-- engine 0 ... (ray_engine) -- calls --> EngineActor (engine_actor)
      |             writes addresses                       +-- engine_child: the engine
      +-- api 0, 1 ... ----------------- TCP links ----------------^

Theory. Ray is a way to start processes: it chooses the node of each engine, and another
one when that fails. All else is as with replicas on one machine: the same table decides
when an engine is restarted, API servers choose among engines, keep each request, and
resubmit it when a link breaks. No token passes through Ray; all that an API server needs
is the current address of each engine.
"""
