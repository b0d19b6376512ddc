"""One thread for a small model, and others' threads as they were."""

import threading

import pytest
import torch

from minfer.records.request import Request
from tests.effects.execution.tiny_engine import Model, Run

pytestmark = pytest.mark.usefixtures("device_kind")


def test_a_small_model_works_in_one_thread_and_leaves_other_threads_theirs(
    model: Model,
) -> None:
    num_threads = list[int]()

    def serve() -> None:
        run = Run.start(model)
        run.serve([Request(id="a", prompt=(3, 4), max_tokens=3)])
        runner = run.driver.executor.runner  # type: ignore[attr-defined]
        num_threads.append(1 if runner.stream else torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        for work in (serve, lambda: num_threads.append(torch.get_num_threads())):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert num_threads == [1, 2]
