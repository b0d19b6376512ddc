"""The page of a run: columns of its turns, and the HTML, style and scripts that show
them.
"""
