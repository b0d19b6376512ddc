"""Traces: for each request its arrival, the length of its prompt and of its output.

Only journals have texts: other prompts are made up, with shared prefixes where a trace
names them; `max_tokens` is the recorded length of the output.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from attrs import field, frozen

from minfer.journal.redact import redacted_config
from minfer.records.config import EngineConfig
from minfer.records.request import PromptOnly, Request
from minfer.records.sequence import SampleId
from minfer.simulation.fork import rekeyed
from minfer.simulation.guesses_recorded import RecordedDrafts
from minfer.simulation.simulate import Arrival
from minfer.values.checks import ConfigError

MAX_TOKENS: Final = 10_000_000  # tokens: a longer prompt or output is a mistake


class TraceError(ConfigError):
    """A trace that cannot be used; the message has its name, the row and the reason."""


@frozen
class TraceRow:
    """One request of a trace. Requests with equal leading `ids` have equal prefixes."""

    time: float  # seconds
    prompt: int  # tokens
    output: int  # tokens
    # each stands for `span` tokens and all before, the last for the rest
    ids: tuple[int, ...]
    span: int = MAX_TOKENS

    def request(self, name: str, block_size: int, **fields: Any) -> Request:
        """The request; token ids and content keys are derived from `ids`: nothing is
        hashed.
        """
        ids, span, top = self.ids, self.span, len(self.ids) - 1
        prompt = tuple([span_id for span_id in ids[:-1] for _ in range(span)])
        prompt += (ids[-1],) * (self.prompt - len(prompt))
        ends = range(block_size, self.prompt + 1, block_size)
        keys = tuple([b"%d %d" % (ids[min((end - 1) // span, top)], end) for end in ends])
        return Request(
            id=name,
            prompt=prompt,
            max_tokens=self.output,
            prompt_only=None if self.output else PromptOnly(),
            keys=keys,
            **fields,
        )


@frozen
class ArrivalTrace:
    """Arrivals in order of time, the first at 0: `rows`, or the `events` of a journal."""

    rows: tuple[TraceRow, ...] = ()
    events: tuple[Arrival, ...] = ()
    config: EngineConfig | None = None  # the journal's
    # output tokens, where not `max_tokens`
    lengths: dict[SampleId, int] = field(factory=dict)
    drafts: RecordedDrafts | None = None  # the journal's results of drafts

    @property
    def sizes(self) -> list[int]:
        """The tokens of each request, prompt and output."""
        requests = (event for _, event in self.events if isinstance(event, Request))
        sizes = [len(request.prompt) + request.max_tokens for request in requests]
        return sizes or [row.prompt + row.output for row in self.rows]

    def arrivals(
        self, block_size: int, speed: float = 1.0, mix: int | None = None
    ) -> Iterator[Arrival]:
        """The arrivals, `speed` times as fast, generated lazily.

        `mix` is a seed to draw fields that rows do not have: 60% of requests are of one
        client, a tenth is urgent, half want their first token within 1 s, half within
        10 s. Raises TraceError if a journal without token ids does not show which blocks
        of that size are equal.
        """
        # A simulation has no secrets.
        rng = Random(mix)  # noqa: S311
        for number, row in enumerate(self.rows):
            fields = {} if mix is None else _draw_fields(rng)
            yield row.time / speed, row.request(str(number), block_size, **fields)
        if self.config is not None:
            self._check_blocks(self.config, block_size)
        recorded_size = block_size if self.config is None else self.config.block_size
        for time, event in self.events:
            if recorded_size != block_size and isinstance(event, Request):
                yield time / speed, rekeyed(event, recorded_size, block_size)
            else:
                yield time / speed, event

    def _check_blocks(self, config: EngineConfig, block_size: int) -> None:
        """Raise TraceError if a journal does not show which such blocks are equal."""
        size = config.block_size
        if block_size % size and config == redacted_config(config):
            raise TraceError(
                f"this journal cannot be simulated in blocks of {block_size}: without "
                f"token ids equal blocks are known of {size} tokens and multiples"
            )


def _draw_fields(rng: Random) -> dict[str, Any]:
    """Random fields that a row does not have."""
    priority = -1 if rng.random() < 0.1 else 0
    client = "big" if rng.random() < 0.6 else rng.choice(("a", "b", "c"))
    deadline = rng.choice((1.0, 10.0))
    return {"priority": priority, "client": client, "deadline": deadline}
