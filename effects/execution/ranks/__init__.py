"""Ranks that share a model: processes that run the same plans.

    rank 0, the engine's process      items, in order        another rank
    driver -> TorchExecutor -------------------------> run_rank_loop -> TorchExecutor
                   |                  sums, logits                          |
                   +--------------- torch.distributed ----------------------+

How they start, in order, is in `minfer.effects.live.engine.ranks`.

items.py          what all ranks do next, decided by rank 0, and its form as bytes
rank_messages.py  the other messages between rank 0 and another rank
rank_folder.py    who starts the ranks, and the folder in which they meet
joining.py        how they join rank 0
worker_group.py   rank 0's side: starts the others, broadcasts items, notices their ends
../rank_loop.py   the other side: does what rank 0 broadcasts
torch_ranks.py    sums and logits over ranks, by gloo or NCCL
peer_ranks.py     on GPUs, small sums through memory that all ranks can read
micro_batches.py  plans of an engine with pipeline stages, cut by rows
"""
