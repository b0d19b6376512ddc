"""The device as a step sees it: its rows, streams, step shapes, and the backend
interface.
"""
