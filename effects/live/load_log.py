"""A line about an engine's load in its log, every ten seconds while it has any.

    running 12, waiting 3; tokens/s: 812.0 in, 455.3 out; KV cache 34.5 %, prefix hits
    61.0 %

Running and waiting are samples at the moment; the rates, and the share of prompt tokens
that were found in the prefix cache, are of the time since the line before. An engine
without requests logs nothing.
"""

import logging
import threading
from typing import Final

from minfer.effects.live.client import EngineClient, Snapshot

LOAD: Final = "minfer.load"  # the logger
INTERVAL_SECONDS: Final = 10.0
_log: Final = logging.getLogger(LOAD)


class LoadLog:
    """The log of one engine's load."""

    def __init__(self, first: Snapshot) -> None:
        self._last = first

    def line(self, snapshot: Snapshot) -> str | None:
        """Returns the line that is due, if one is: that of a later snapshot."""
        seconds = snapshot.time - self._last.time
        if seconds < INTERVAL_SECONDS:
            return None
        counts, earlier = snapshot.totals.counts, self._last.totals.counts
        self._last = snapshot

        def grown(name: str) -> float:
            return counts.get(name, 0) - earlier.get(name, 0)

        tokens_in, tokens_out = grown("prompt_tokens"), grown("generation_tokens")
        if not (tokens_in or tokens_out or snapshot.running or snapshot.waiting):
            return None
        used = 1 - snapshot.blocks_free / snapshot.blocks if snapshot.blocks else 0.0
        line = (
            f"running {snapshot.running}, waiting {snapshot.waiting}; tokens/s: "
            f"{tokens_in / seconds:.1f} in, {tokens_out / seconds:.1f} out; KV cache "
            f"{used:.1%}"
        )
        if queried := grown("prefix_cache_queries"):
            line += f", prefix hits {grown('prefix_cache_hits') / queried:.1%}"
        return line.replace("%", " %")

    def note(self, client: EngineClient) -> None:
        """Log the line that is due, if one is."""
        if line := self.line(client.snapshot()):
            _log.info("%s", line)


def log_load(client: EngineClient, stop: threading.Event) -> None:
    """Log an engine's load, in a thread of its own, until `stop` is set."""
    log = LoadLog(client.snapshot())

    def run() -> None:
        while not stop.wait(INTERVAL_SECONDS):
            log.note(client)

    threading.Thread(target=run, name="load log", daemon=True).start()
