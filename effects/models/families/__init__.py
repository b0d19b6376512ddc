"""The family table: how models of one architecture differ from others.

family.py     what a row says: `Family` and `ExpertKeys`
table.py      all rows by architecture and by `model_type`
common.py     keys and values that several files share
The others have the rows, a file for each house that publishes models.
"""
