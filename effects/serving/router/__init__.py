"""A router: HTTP in front of other servers, of minfer's or vLLM's kind.

client --> Router (router_application) --> Forwarder (forwarding) --> backend
                |    prompt_keys: what the router knows of a body
                v
           Dispatcher (dispatcher): minfer.routing's state, waiting lines, journal
                ^
           HealthWatch (health): backends that join, drain and leave
"""
