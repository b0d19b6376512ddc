"""The family table: how models of one architecture differ from others.

family.py     what a row says: `Family` and `ExpertKeys`
table.py      all rows by architecture and by `model_type`
text_halves.py  rows of text halves that are no models of their own
multimodal.py   multimodal models whose text half is a row of one of the two
common.py     keys and values that several files share
The others have the rows, a file for each house that publishes models.
"""
