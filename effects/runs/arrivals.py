"""What a trace is: who came when, with how long a prompt, and how much they were given.

But for journals there are no texts: prompts are made up, and begin alike where a trace
says so; `max_tokens` is the length that came out.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from attrs import evolve, field, frozen

from minfer.checks import ConfigError
from minfer.config import EngineConfig
from minfer.request import Request
from minfer.runs.guesses_recorded import Recorded
from minfer.runs.redact import redacted_config
from minfer.runs.simulate import Arrival
from minfer.sequence import SampleId

LONGEST: Final = 10_000_000  # tokens: a longer prompt or output is a mistake


class TraceError(ConfigError):
    """A trace that cannot be used: which, in which row, and why."""


@frozen
class Row:
    """One request of a trace. Requests with the same leading `ids` begin alike."""

    time: float  # seconds
    prompt: int  # tokens
    output: int  # tokens
    # each stands for `span` tokens and all before, the last for the rest
    ids: tuple[int, ...]
    span: int = LONGEST

    def request(self, name: str, block_size: int, **more: Any) -> Request:
        """The request; token ids and content keys are made up from `ids`: nothing is
        hashed.
        """
        ids, span, top = self.ids, self.span, len(self.ids) - 1
        prompt = tuple([one for one in ids[:-1] for _ in range(span)])
        prompt += (ids[-1],) * (self.prompt - len(prompt))
        ends = range(block_size, self.prompt + 1, block_size)
        keys = tuple([b"%d %d" % (ids[min((end - 1) // span, top)], end) for end in ends])
        return Request(id=name, prompt=prompt, max_tokens=self.output, keys=keys, **more)


@frozen
class Trace:
    """Arrivals in order of time, the first at 0: `rows`, or `events` as a journal has
    them.
    """

    rows: tuple[Row, ...] = ()
    events: tuple[Arrival, ...] = ()
    config: EngineConfig | None = None  # the journal's
    # output tokens, where not `max_tokens`
    lengths: dict[SampleId, int] = field(factory=dict)
    drafts: Recorded | None = None  # what the journal says of them

    @property
    def sizes(self) -> list[int]:
        """Tokens of each request, prompt and output."""
        asked = (what for _, what in self.events if isinstance(what, Request))
        sizes = [len(one.prompt) + one.max_tokens for one in asked]
        return sizes or [row.prompt + row.output for row in self.rows]

    def arrivals(
        self, block_size: int, speed: float = 1.0, mix: int | None = None
    ) -> Iterator[Arrival]:
        """What comes, `speed` times as fast, made as it is asked for.

        `mix` is a seed to draw from what rows do not say: 60% of all are one client's, a
        tenth is urgent, half want their first token within 1 s, half within 10 s. Raises
        TraceError if a journal without token ids cannot say which blocks of that size are
        equal.
        """
        # A simulation keeps no secrets.
        rng = Random(mix)  # noqa: S311
        for number, row in enumerate(self.rows):
            more = {} if mix is None else _drawn(rng)
            yield row.time / speed, row.request(str(number), block_size, **more)
        if self.config is not None:
            self._check_blocks(self.config, block_size)
        others = self.config is not None and block_size != self.config.block_size
        for time, what in self.events:
            if others and isinstance(what, Request):
                yield time / speed, evolve(what, keys=())  # the engine makes its own
            else:
                yield time / speed, what

    def _check_blocks(self, config: EngineConfig, block_size: int) -> None:
        """Raise TraceError for blocks of which a journal cannot say which are equal."""
        size = config.block_size
        if block_size % size and config == redacted_config(config):
            raise TraceError(
                f"this journal cannot be simulated in blocks of {block_size}: without "
                f"token ids equal blocks are known of {size} tokens and multiples"
            )


def _drawn(rng: Random) -> dict[str, Any]:
    """What a row does not say of its request."""
    priority = -1 if rng.random() < 0.1 else 0
    client = "big" if rng.random() < 0.6 else rng.choice(("a", "b", "c"))
    deadline = rng.choice((1.0, 10.0))
    return {"priority": priority, "client": client, "deadline": deadline}
