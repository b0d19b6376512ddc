"""Recordings of an engine or a router: what they are, writing, reading, and replay.

the format     format.py, its records; codec.py, values as JSON; wire_names.py, names
recorded       decisions.py and projection.py, what a digest covers; writing.py
replayed       reading.py, turns.py, replay.py; divergence.py, the first difference
without text   redact.py and redact_state.py
of routers     routing_journal.py, routed_requests.py, agreement.py
"""
