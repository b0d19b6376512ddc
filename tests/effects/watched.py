"""What an engine in this process did, turn by turn."""

from minfer.effects.live.served_model import ServedModel
from minfer.records.state import EngineState, Transition, Turn


class Watched(list[Transition]):
    """The transitions of an engine from now on; a journal that it has goes on."""

    def __init__(self, llm: ServedModel) -> None:
        super().__init__()
        driver = llm.worker.driver
        self.inner = driver.record
        driver.record = self

    def __call__(self, turn: Turn) -> None:
        if self.inner is not None:
            self.inner(turn)
        self.append(turn.transition)

    def close(self, state: EngineState) -> None:
        if self.inner is not None:
            self.inner.close(state)


def settle(llm: ServedModel) -> None:
    """Wait for the engine's thread to end: outputs are out before the turn is counted."""
    thread = llm.worker.thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
