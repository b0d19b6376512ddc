"""Commands on recorded and simulated runs: replay, explain, simulate, view, traces; and
load on a running server.
"""
