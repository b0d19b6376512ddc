"""Many engines as one: what they need and HTTP does not.

    link             messages of API servers and engines; requests that crash engines
    engine_server    the engine's process, and its end of all links
    engine_client    an API server's end: an `EngineClient` over one engine or several
    dispatch         which engine, or server behind a proxy, gets a request
    processes        a server's processes: started, watched, restarted, ended
    ray              engines on the machines of a Ray cluster

    HTTP ---> engine_client --- link ---> engine_server ---> engine
                    |                        ^
                dispatch                 processes (or ray) start and watch it

Theory. An API server has all of a request: its prompt and parameters, and every token
that came. So nothing is lost when an engine dies: the API server makes a new link and
resubmits the request, with its tokens as history, and continues where it was. A link is
one connection: its messages come in order, once, or not at all. Any fault (a process
dies, stalls or comes back) is one case: the link is over, both ends forget it, and the
API server makes a new one.

`remote_engine`, `engine_server` and `quarantine` know neither sockets nor processes:
messages come by method calls, and go out by callbacks (`quarantine` returns requests), so
that tests can inject any fault between them.

README.md, beside this, has the five paths through these folders, step by step.
"""
