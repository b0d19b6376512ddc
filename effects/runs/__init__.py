"""Recorded and simulated runs as a user meets them: replay, explain, simulate, view,
traces; and load, put on a server that runs.
"""
