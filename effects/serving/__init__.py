"""HTTP: what a client asks becomes one request, what the engine yields its answer.

    server        starts and stops: socket, signals, uvicorn
    supervisor    the process above the others; processes decides, pulse tells who hangs
    application   routes, key, health, metrics: an ASGI application
    live_view     how the engine is, for as long as somebody looks; page/ shows it
    endpoints     the tables: which endpoints there are, and over what they are reached
    intake        from a connection to a request that could run, each step bounded
    preparing/    bodies are read, rendered and tokenized in processes of their own
    limits        what one request may be, as it follows from the model
    bounds        what whoever runs the server may choose
    connections   how many there are, and how slow their clients may be
    keys          who may ask for how much; authentication lets them in
    description   all of them in OpenAPI's terms; docs makes a page of it
    answer        one request followed through the engine, and written as outputs come
    protocol      what an endpoint is: a body is read into one inner request (a
                  GenerationRequest), and a Writer makes events of the engine's outputs
    records       what is known of requests: those that are served, and the last that were
    openai/       OpenAI's endpoints, one module each, and what they share
    anthropic/    Anthropic's, likewise
    tokens/       text to token ids and back, as vLLM's servers do it
    transports/   how events reach a client: as a body, as server-sent events, on a socket

A protocol knows no transport and a transport knows no protocol: between them are events.
"""
