"""All that a client process needs to put its share of a load on a server."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from minfer.effects.runs.load.http import Address
from minfer.effects.runs.load.prompts import Ask, ListedPrompts, Prompts


@frozen
class Target:
    """Who is asked, and how."""

    address: Address
    model: str
    chat: bool = False
    stream: bool = True
    key: str = field(default="", repr=False)
    body: Mapping[str, Any] = field(factory=dict)  # other fields of every request

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def request(self, ask: Ask, *, messages: bool = False) -> bytes:
        """A request, head and body; `messages`: the prompt is a whole conversation."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": ask.max_tokens}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        rest = json.dumps({**fields, **self.body}, separators=(",", ":"))
        name, prompt = b'{"prompt":', ask.prompt
        if self.chat:
            name = b'{"messages":'
            if not messages:
                prompt = b'[{"role":"user","content":' + prompt + b"}]"
        body = name + prompt + b"," + rest[1:].encode()
        return self.address.head("POST", self.path, self.key, len(body)) + body


@frozen
class Load:
    """What is asked of whom, how much of it, and how fast."""

    target: Target
    prompts: Prompts
    count: int | None  # requests; None: until `duration` is over
    due: Sequence[float] = ()  # seconds; none in a closed loop
    duration: float | None = None  # seconds, after which nothing is sent any more
    max_concurrency: int | None = None
    timeout: float = 600.0  # seconds for one request
    warm: bool = False  # these requests only warm the server up

    def request(self, number: int) -> bytes:
        """The bytes of a request."""
        ask = self.prompts.ask(-1 - number if self.warm else number)
        whole = isinstance(self.prompts, ListedPrompts) and ask.prompt[:1] == b"["
        return self.target.request(ask, messages=whole)

    def of_run(self, run: int) -> "Load":
        """The same load with the prompts of another run."""
        return evolve(self, prompts=self.prompts.of_run(run))

    def warm_up(self, count: int) -> "Load":
        """As many of its requests, as many at once as the load itself has them, without
        its pace.
        """
        most = min(count, self.max_concurrency or count)
        more: dict[str, Any] = {"count": count, "max_concurrency": most, "warm": True}
        return evolve(self, due=(), duration=None, **more)
