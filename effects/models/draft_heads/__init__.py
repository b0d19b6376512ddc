"""Draft heads: which there are in checkpoints, their weights, and what they compute.

architecture/draft_head.py   what a head is: its sizes, and the theory
mtp_head.py                  reads the head of a target's own checkpoint
eagle3_head.py               reads an EAGLE-3 head, a checkpoint of its own
head_weights.py              the weights, and a checkpoint's tensors in them
head_step.py                 functions over them: drafts, keys, logits
head_files.py                loads weights from files, or makes random ones
"""
