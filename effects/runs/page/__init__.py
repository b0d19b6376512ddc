"""The page of a run: what is kept of its turns, and the HTML, style and scripts that show
it.
"""
