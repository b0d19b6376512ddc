"""HTTP: a client's body becomes one request; the engine's outputs become the answer.

    application       routes, key, health, metrics: an ASGI application
    endpoints         the tables of endpoints and of transports
    protocol          what an endpoint is: a body is read into one inner request (a
                      GenerationRequest), and an AnswerWriter makes events of the
                      engine's outputs
    request_receiver  from a connection to a request that could run, each step bounded
    answer_task       one request followed through the engine, and written as outputs come
    server_state      what all answers share: the model, its bounds, whether it stops
    description       all endpoints in OpenAPI's terms
    access/           API keys, tenants, hosts, and the bounds that the operator sets
    request_parsing/  bodies: fields, limits by the model, constraints, answers' parts
    input_workers/    bodies are read, rendered and tokenized in worker processes
    openai/           OpenAI's endpoints, one module each, and what they share
    anthropic/        Anthropic's, likewise
    tokens/           text to token ids and back, as vLLM's servers do it
    wire/             connections, and how events reach a client: as a body, as
                      server-sent events, on a socket
    observability/    metrics, logs, spans, records of requests, the live view
    page/             a prompt box and the live view in a browser
    processes/        the server's start and end, and its API servers; what watches and
                      restarts them is in `minfer.effects.cluster.processes`

A protocol knows no transport and a transport knows no protocol: between them are events.
"""
