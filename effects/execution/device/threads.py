"""The number of CPU threads for a small model: one.

Other threads wake up too late to help with its products.
"""

import threading
from typing import Final

import torch

from minfer.effects.execution.device.streams import is_gpu
from minfer.effects.models.architecture.spec import ModelSpec

# Weights of a product up to which one thread is best: with one thread instead of two, the
# bundled model (131,000) generated 1.6 times as fast at batch 1, one with 262,000 as
# fast.
MAX_ONE_THREAD_WEIGHTS: Final = 1 << 17


def is_for_one_thread(spec: ModelSpec, device: torch.device) -> bool:
    """Returns whether a model's products on this device are too small for several
    threads.
    """
    feed_forwards = spec.feed_forwards
    largest = max((feed.largest_matrix for feed in feed_forwards), default=0)
    return not is_gpu(device) and largest <= MAX_ONE_THREAD_WEIGHTS


def use_one_thread() -> None:
    """Let torch use one thread for the calls of this thread; other threads keep their
    number.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return
    # it also sets that of new threads: another thread restores it
    torch.set_num_threads(1)
    restoring_thread = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    restoring_thread.start()
    restoring_thread.join()
