"""Load on a server that speaks OpenAI's API, and what its clients measure.

Two shapes of load answer two questions. In a closed loop (`--max-concurrency N`), N
clients send one request after the other: what is the throughput of a server that is never
idle? In an open loop (`--request-rate R`), requests are sent when they are due, answered
or not: what are the latencies at that rate? Both together are an open loop with at most N
requests in flight.

The parts, in the order in which a run uses them:

    options   the command's options             client    one event loop that sends
    server    checks before the load            reply     an answer, as its events come
    prompts   prompts, made on demand           record    the measurements of a request
    pace      when requests are due             metrics   records become vLLM's numbers
    command   all of it                         report    a table and a JSON file of them

Latencies are the field's. With t0 when the request was sent, t1 when its first event with
text came, tn when the last one did, and T output tokens:

    TTFT = t1 - t0        E2EL = tn - t0        TPOT = (tn - t1) / (T - 1)

and ITL is the time between two events, as in `vllm bench serve`. A server may send
several tokens in one event; its ITL is then above its TPOT.
"""
