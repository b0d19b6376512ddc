"""`minfer verify`: its comparisons, one module for each question.

Comparisons find differences from transformers: token ids, templates, logits, greedy text.
A damaged checkpoint is damaged for both, so there are checks of the checkpoint by itself:
its tensors, its ids, and whether text is more probable to it than the same tokens
shuffled. Damage that leaves a model which works a little worse (two layers exchanged,
say) looks like a worse model.

Random weights are no damage: they predict no text, but compute like others. So they are
recognized, and comparisons with them are valid.
"""
