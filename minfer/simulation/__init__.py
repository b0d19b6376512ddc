"""The real engine without a device: on a virtual clock, or over a memory of digests.

oracle.py      an executor whose tokens depend on every block that is read
cost.py        how long a step takes
guesses.py     which drafts are accepted; guesses_recorded.py, as in a recorded run
steady.py      many turns of a steady decode as one step
simulate.py    one engine; replicas.py, several behind the router; disaggregated.py
fork.py        a recorded run up to a turn, and how it goes on with one fact changed
"""
