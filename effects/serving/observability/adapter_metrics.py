"""Counts of requests by adapter, and the adapters that run and wait.

Of an adapter's name a metric's label is made, so the number of names is bounded: requests
of the adapters beyond the first `MAX_LABELS` are counted together.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from minfer.effects.live.adapters.served_adapters import ServedAdapters
from minfer.effects.text.output_processor import OutputProcessor

MAX_LABELS: Final = 64
OTHERS: Final = "other adapters"  # no name: it has a space
# Prefixes of the names of an API server's counts; the adapter's name follows.
REQUESTS_PREFIX: Final = "adapter_requests "
TOKENS_PREFIX: Final = "adapter_generation_tokens "


class AdapterCounts:
    """The counts of one API server."""

    def __init__(self, adapters: ServedAdapters | None) -> None:
        self._adapters = adapters
        self._labels: dict[str, str] = {}  # by digest
        self._requests = Counter[str]()
        self._tokens = Counter[str]()

    def note_end(self, job: OutputProcessor, tokens: int) -> None:
        """Count a request that has ended, with the tokens of its outputs."""
        digest = job.request.adapter
        if not digest or self._adapters is None:
            return
        label = self._labels.get(digest)
        if label is None:
            known = set(self._labels.values())
            label = self._adapters.describe(digest)
            if len(known) >= MAX_LABELS and label not in known:
                label = OTHERS
            else:
                self._labels[digest] = label
        self._requests[label] += 1
        self._tokens[label] += tokens

    def counts(self) -> dict[str, float]:
        """Returns all counts."""
        requests = dict(self._requests)  # others may count meanwhile
        tokens = dict(self._tokens)
        return {
            **{f"{REQUESTS_PREFIX}{name}": float(n) for name, n in requests.items()},
            **{f"{TOKENS_PREFIX}{name}": float(n) for name, n in tokens.items()},
        }

    def names(self, digests: Iterable[str]) -> str:
        """Returns the names of adapters, with commas between them."""
        if self._adapters is None:
            return ""
        return ",".join(map(self._adapters.describe, digests))
