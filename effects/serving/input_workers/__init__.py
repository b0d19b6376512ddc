"""Preparing: the bytes of a body become a request with token ids, in other processes.

Theory. JSON, checks, templates and tokenizers hold the interpreter's lock for a time in
proportion to the body; in the event loop, a body of 4 MB would stop every stream. So
bodies above a few KB go to worker processes, with a tokenizer and no engine.

    body --> line --> worker --> Prepared       line    the queue: fair by client
              |         |                       pool    the queue and its workers
         by client   one body at a time,        process the parent's end of a worker
         small ones  bounded in time and        worker  the child: a loop over frames
         first       memory, or replaced        frames  bytes between the two
                                                task    the work of a worker
"""
