"""HTTP: a client's body becomes one request; the engine's outputs become the answer.

    server        starts and stops: socket, signals, uvicorn
    supervisor    the parent process; processes plans restarts, pulse detects hangs
    application   routes, key, health, metrics: an ASGI application
    live_view     the engine's state while a viewer is connected; page/ shows it
    endpoints     the tables of endpoints and of transports
    intake        from a connection to a request that could run, each step bounded
    preparing/    bodies are read, rendered and tokenized in worker processes
    limits        the bounds of one request that follow from the model
    bounds        the bounds that the operator may set by options
    connections   how many there are, and how slow their clients may be
    keys          API keys and their quotas; authentication checks them
    description   all endpoints in OpenAPI's terms; docs makes a page of it
    answer        one request followed through the engine, and written as outputs come
    protocol      what an endpoint is: a body is read into one inner request (a
                  GenerationRequest), and a Writer makes events of the engine's outputs
    records       the requests in progress, and the last ones that ended
    openai/       OpenAI's endpoints, one module each, and what they share
    anthropic/    Anthropic's, likewise
    tokens/       text to token ids and back, as vLLM's servers do it
    transports/   how events reach a client: as a body, as server-sent events, on a socket

A protocol knows no transport and a transport knows no protocol: between them are events.
"""
