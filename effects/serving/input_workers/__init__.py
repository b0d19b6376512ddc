"""Input processing in other processes: a body becomes a request with token ids.

Theory. JSON, checks, templates and tokenizers hold the interpreter's lock for a time in
proportion to the body; in the event loop, a body of 4 MB would stop every stream. So
bodies above a few KB go to worker processes, with a tokenizer and no engine.

    body --> queue --> worker --> PreparedRequest
              |         |
         by client   one body at a time,
         small ones  bounded in time and
         first       memory, or replaced

    worker_pool      the queue and its workers
    process          the parent's end of a worker
    worker_loop      the child: a loop over frames
    worker_main      its program for requests; `minfer route` has one of its own
    worker_limits    what a body may take of a worker's machine
    worker_messages  what the two send each other
    task             the work of a worker
"""
