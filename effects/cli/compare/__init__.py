"""What `minfer verify` compares, one module a question.

Comparisons find what minfer does otherwise than transformers: token ids, templates,
logits, greedy text. A damaged checkpoint is damaged for both, so there are checks of the
checkpoint by itself: its tensors, its ids, and whether text is more probable to it than
the same tokens shuffled. Damage that leaves a model which works a little worse (two
layers exchanged, say) looks like a worse model.

Random weights are no damage: they say nothing about text, but compute as others do. So
they are told apart, and what was compared with them counts.
"""
