"""Load on a server that speaks OpenAI's API, and what its clients saw of it.

Two shapes of load, which answer two questions. In a closed loop, N clients send one
request after the other: how much does the server do when it is never idle? In an open
loop, requests come when they come, whether or not others have been answered, as those of
real users do: how long do they wait at that rate? Both at once is an open loop behind a
door that lets N in.

The parts, in the order in which a run meets them:

    options   what the command takes             load      all that a client process needs
    server    is it there, what does it serve    prompts   what is asked, made on demand
    pace      when requests are due              processes several clients, one line
    client    one event loop that sends          reply     an answer becomes a record
    http, sse the wire                           record    one request, as it was seen
    figures   records become figures             result    text, JSON and a plot of them

Latencies are the field's. With t0 when the request was sent, t1 when the first event with
text came, tn when the last one did, and T output tokens:

    TTFT = t1 - t0        E2EL = tn - t0        TPOT = (tn - t1) / (T - 1)

and ITL, between tokens: a gap of d seconds in which an event brought k tokens counts as
k latencies of d/k. Where a server sends several tokens in one event, the mere gaps
between events would say that it is slow; they are kept beside it, under their own name.
"""
