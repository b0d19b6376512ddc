"""The family table: how models of one architecture differ from others.

family.py          what a row says: `Family`, whose values are in groups
attention_keys.py  groups about attention: biases, heads, scores, positions, windows
layer_keys.py      groups about norms, feed-forwards, factors and names of tensors
expert_keys.py     groups about experts
table.py           all rows by architecture and by `model_type`
text_halves.py     rows of text halves that are no models of their own
multimodal.py      multimodal models whose text half is a row of one of the two
common.py          keys and values that several files share
The others have the rows, a file for each house that publishes models.
"""
