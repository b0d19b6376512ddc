"""An engine in another process: the line to it, and both of its ends.

    messages      what crosses the line, as a schema
    frames        messages on a stream of bytes, numbered
    remote        a front's end: an `EngineClient` that outlives the engine it speaks to
    kept          what a front keeps of its requests
    state         how the engine is, as a front was told
    host          the engine's end: the fronts that are there, and what they want
    shares        what of the news is whose
    quarantine    who runs alone after engines have died, and who is given up
    questions     what fronts ask each other, by way of the host
    sockets       both ends on local sockets

Theory. A front knows all of a request: what was asked, and every token that came. So an
engine that dies takes nothing along: the front makes a new link and asks again, with the
tokens it has as history, and goes on where it was. A link is one connection: what it
carries comes in order, once, or not at all, as every frame has a number. Whatever else
happens (a frame is lost, doubled or late, a process dies, stalls or comes back) is one
case: the link is over, both ends forget it, and the front makes a new one.

`remote`, `host` and `quarantine` know neither sockets nor processes: they take messages
and give messages, so that tests can put any fault between them.
"""
