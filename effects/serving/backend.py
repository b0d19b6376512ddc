"""What all answers of a server share: the model, and whether the server stops."""

from concurrent.futures import ThreadPoolExecutor

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.live.errors import EngineDeadError
from minfer.effects.serving.errors import SHUTTING_DOWN


class Backend:
    """A model that answers; `pool` is where long prompts are prepared."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.pool = ThreadPoolExecutor(2, "minfer-edge")
        self.closing = False

    def close(self) -> None:
        """End all answers: their clients are told that the server stops."""
        self.closing = True
        self.llm.front.abandon(EngineDeadError(SHUTTING_DOWN))
