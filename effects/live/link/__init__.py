"""An engine in another process, or several: the links to them, and both of their ends.

    link_messages    what is sent over the link, as a schema
    frames           messages on a stream of bytes, numbered
    remote           a front's end: an `EngineClient` that outlives its engines
    replica_link     a front's link to one of several engines, its replicas
    placement        which request of a front goes to which replica, and moves
    front_router     a front's router among replicas
    front_requests   what a front keeps of its requests
    front_request    what it keeps of one request: its tokens, and engines that died
    engine_status    the engines' state, as reported to a front
    host             the engine's end: the connected fronts and their requests
    replica_news     what an engine sends to routers: cached keys, and its load
    front_counts     the counts of fronts, for metrics
    output_routing   splits outputs by front
    quarantine       runs suspects alone after engines have died, and gives requests up
    request_queries  questions between fronts, by way of the host
    prefill_first    prompts computed by some replicas, outputs by others
    sockets          both ends on local sockets
    tcp_links        both ends on two machines

Theory. A front has all of a request: its prompt and parameters, and every token that
came. So nothing is lost when an engine dies: the front makes a new link and resubmits the
request, with its tokens as history, and continues where it was. A link is one connection:
its messages come in order, once, or not at all, as every frame has a number. Any fault (a
frame is lost, doubled or late, a process dies, stalls or comes back) is one case: the
link is over, both ends forget it, and the front makes a new one.

`remote`, `host` and `quarantine` know neither sockets nor processes: they take messages
and return messages, so that tests can inject any fault between them.
"""
