"""Preparing: the bytes of a body become a request with token ids, away from the streams.

Theory. JSON, checks, templates and tokenizers hold the interpreter's lock for as long as
a body is large; done in the event loop, a body of 4 MB is silence in every stream. So
what is above a few KB goes to processes of their own, with a tokenizer and no engine.

    body --> line --> worker --> Prepared       line    who goes next: fair by client
              |         |                       pool    the line, and what empties it
         by client   one body at a time,        process the parent's end of a worker
         small ones  bounded in time and        worker  the child: a loop over frames
         first       memory, or replaced        frames  bytes between the two
                                                task    what a worker does
"""
