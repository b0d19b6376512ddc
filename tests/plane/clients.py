"""Scripted clients: what they send, how they behave, and what they must get."""

import asyncio
import codecs
import json
from contextlib import aclosing
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from minfer.effects.live.engine.engine_worker import EngineDeadError
from minfer.effects.live.input_processing.input_processor import (
    OverloadedError,
    RequestError,
)
from minfer.records.request import Request, SamplingParams
from tests.core.world import reference
from tests.plane.faults import POISON

if TYPE_CHECKING:
    from tests.plane.plane import Plane

WORDS = (
    "def ",
    "add",
    "(a, b)",
    ":\n",
    "    return ",
    "x" * 9,
    "é",
    "日本",
    "🙂",
    " ",
    "import os",
)
STOPS = ("e", "t", "é", "in", "  ", "zz", "\n", "ab")
KEY = "key"
BAD: tuple[
    tuple[Any, int], ...
] = (  # a body, or what is changed in a good one; the status
    (b"", 400),
    (b"{", 400),
    (b"[" * 3000, 400),
    (b'{"prompt": "\xff"}', 400),
    (b"[]", 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b"{} " + b" " * 9000, 413),
    ({"n": 0}, 400),
    ({"prompt": []}, 400),
    ({"prompt": None}, 400),
    ({"prompt": [1, 9999]}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": [5] * 500}, 400),
    ({"promt": "a"}, 400),
    ({"stop": ["x"] * 65}, 400),
    ({"seed": 2**64}, 400),
    ({"temperature": -1}, 400),
    ({"model": "other"}, 404),
    ({"suffix": "a"}, 400),
    ({"max_tokens": -1}, 400),
    ("media", 415),
    ({"stop_token_ids": [5000]}, 400),
    ({"n": 128, "prompt": ["a"] * 99}, 400),
    ("key", 401),
)
GETS = (
    ("/health", 200),
    ("/metrics", 200),
    ("/v1/models", 200),
    ("/v1/models/plane", 200),
    ("/v1/models/none", 404),
    ("/nowhere", 404),
    ("/v1/completions", 405),
)


class Choice(NamedTuple):
    """What one sample must be."""

    tokens: list[int]
    text: str
    reason: str


def solo(plane: "Plane", ids: list[int], params: SamplingParams, sample: int) -> Choice:
    """A sample computed alone, without the code under test."""
    config, words = plane.llm.setup.config, plane.llm.tokenizer
    assert words is not None
    assert params.seed is not None
    stops = frozenset(params.stop_token_ids) | (set() if params.ignore_eos else {0, 2})
    request = Request(
        id="",
        prompt=tuple(ids),
        max_tokens=params.max_tokens or 999,
        stop_ids=stops,
        seed=params.seed,
        sampling=params,
    )
    tokens = reference(
        request, sample, config.block_size, plane.vocab, config.max_model_len
    )
    spelled = tokens[: -1 if tokens[-1] in stops else None]
    for count in range(1, len(spelled) + 1) if params.stop else ():
        visible = [token for token in spelled[:count] if token not in words.special_ids]
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = utf8.decode(b"".join(map(words.token_bytes, visible)))
        stop_positions = [
            (text.find(s) + len(s), text.find(s)) for s in params.stop if s in text
        ]
        if stop_positions:
            return Choice(tokens[:count], text[: min(stop_positions)[1]], "stop")
    return Choice(
        tokens, words.decode(spelled), "stop" if tokens[-1] in stops else "length"
    )


class Client:
    """A client with one request. `live` sets the outcome: "whole", "refused",
    "broken" (it began, and ended with an error) or "gone" (the client left), and `why`,
    an error's code.
    """

    outcome = why = ""
    twin = False

    @property
    def least(self) -> int:
        """Tokens of output for which there has to be room."""
        return 1

    def __init__(self, plane: "Plane", rng: Random) -> None:
        self.plane, self.rng, self.got = (
            plane,
            rng,
            list[Any](),
        )  # all that came, as it came
        self.params: dict[str, Any] = {
            "temperature": rng.choice((0, 1)),
            "n": rng.choice((1, 1, 1, 2, 3)),
            "seed": rng.choice(POISON)
            if plane.faults.hits("poison", rng)
            else rng.randrange(9),
            "max_tokens": rng.choice((1, 2, 5, 12, 12, 30, 200)),
            "stop": rng.sample(STOPS, rng.choice((0, 0, 0, 1, 3))),
            "stop_token_ids": [
                rng.randrange(plane.vocab) for _ in range(rng.choice((0, 0, 2)))
            ],
            "ignore_eos": rng.random() < 0.3,
        }
        self.slow = rng.choice((0.002, 0.3)) * plane.faults.hits("slow", rng)
        self.leaves = plane.faults.hits("leave", rng)

    def prompt(self) -> str | list[int]:
        """A prompt that begins like others."""
        words = [*WORDS[: self.rng.choice((0, 4, 7))], *self.rng.choices(WORDS, k=4)]
        text = "".join(words)
        return text if self.rng.random() < 0.7 else [ord(char) % 90 + 4 for char in text]

    def expect(self, prompts: list[Any]) -> None:
        """Work out what must come for prompts."""
        words, params = self.plane.llm.tokenizer, SamplingParams(**self.params)
        assert words is not None
        self.ids = [
            words.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        longest = max(map(len, self.ids)) + self.least
        self.fits = longest <= self.plane.llm.setup.config.max_model_len
        self.samples = len(prompts) * params.n
        samples = [(ids, n) for ids in self.ids for n in range(params.n) if self.fits]
        self.choices = [solo(self.plane, ids, params, n) for ids, n in samples]

    async def live(self) -> None:
        raise NotImplementedError

    def refusals(self) -> set[str]:
        """Codes of what it must be told for what it sent."""
        return set() if self.fits else {"context_length_exceeded"}

    def judge(self) -> None:
        """Raise AssertionError unless it got what it should."""
        plane, poisonous = self.plane, self.params["seed"] in POISON
        assert self.outcome, "it was never answered"
        refusals = self.refusals()
        if self.outcome == "whole":
            assert not poisonous, "a poisonous request was served"
            assert not refusals, f"it was served, and should be told: {refusals}"
        elif self.outcome != "gone" and self.why not in refusals:
            hostile = {
                "overloaded": plane.llm.setup.config.max_waiting < 999,
                "twin": self.twin,
                "engine_error": poisonous or plane.neighbours(),
                "engine_dead": plane.stopped,
                "cancelled": plane.stopped,
            }
            assert hostile.get(self.why), f"{self.outcome}: {self.why}"

    def judge_text(self, texts: list[str], ends: list[Any]) -> None:
        """What came is what should, or its beginning where it did not end."""
        for choice, text, end in zip(self.choices, texts, ends, strict=True):
            is_whole = end in ("stop", "length")
            assert is_whole or self.outcome != "whole", "a choice has no end"
            assert (text, end) == choice[1:] or not is_whole, (
                f"{text!r}, {end} is not {choice}"
            )
            assert choice.text.startswith(text), f"{text!r} is not {choice.text!r}"


class Http(Client):
    """A client over HTTP: a script of `receive` and `send`, with uvicorn's manners."""

    def __init__(self, plane: "Plane", rng: Random, path: str = "") -> None:
        super().__init__(plane, rng)
        self.status, self.data, self.gone, self.complete = 0, b"", False, False
        self.over = asyncio.Event()  # it left, or the answer is complete
        self.path, self.method, self.right = path, "GET", 200  # the status that is due
        self.media, self.key, self.body = "application/json", KEY, b""
        self.stream = rng.random() < 0.6 and not path
        if self.params["max_tokens"] > 30 and rng.random() < 0.9:
            self.params["max_tokens"] = 25  # else it would only be refused, as a rule
        self.wish = self._wish()
        if plane.faults.hits("aside", rng) and not path:
            (self.path, self.right), self.stream = rng.choice(GETS), False
        elif not path:
            chat, self.method = "messages" in self.wish, "POST"
            self.path = "/v1/chat/completions" if chat else "/v1/completions"
            self._spoil()
            self.body = self.body or json.dumps(self.wish).encode()
        if self.method == "GET" or self.right != 200:
            self.samples, self.choices = 0, []

    @property
    def least(self) -> int:
        """All that it asks for: over HTTP it is a promise, where Python's is a bound."""
        max_tokens: int = self.params["max_tokens"]
        return max_tokens

    def _wish(self) -> dict[str, Any]:
        rng, words, wish = self.rng, self.plane.llm.tokenizer, dict[str, Any]()
        assert words is not None
        if self.stream:
            wish["stream_options"] = {"include_usage": rng.random() < 0.5}
        if rng.random() < 0.3:
            wish["messages"] = [
                {"role": "user", "content": "".join(rng.choices(WORDS, k=3))}
            ]
            self.expect([self.plane.llm.render(wish["messages"])])
        else:
            prompts = [self.prompt() for _ in range(rng.choice((1, 1, 1, 2)))]
            wish |= {"prompt": prompts, "echo": rng.random() < 0.2}
            self.expect(prompts)
            emitted = [
                prompt if isinstance(prompt, str) else words.decode(prompt)
                for prompt in prompts
            ]
            for index, choice in enumerate(self.choices if wish["echo"] else ()):
                text = emitted[index // self.params["n"]] + choice.text
                self.choices[index] = choice._replace(text=text)
        return {
            **self.params,
            **wish,
            "stream": self.stream,
            "user": rng.choice("ab"),
            "cache_salt": rng.choice(("", "s")),
            "priority": rng.randrange(3),
            "deadline": rng.choice((None, 0.5, 9.0)),
            "model": rng.choice((None, "plane")),
            "metadata": {"long": "x" * rng.choice((0, 0, 0, 5000))},
        }

    def _spoil(self) -> None:
        if self.plane.faults.hits("bad", self.rng):
            change, self.right = self.rng.choice(BAD)
            self.path, self.wish, self.stream = "/v1/completions", {"prompt": "a"}, False
            self.wish |= change if isinstance(change, dict) else {}
            self.body = change or b" " if isinstance(change, bytes) else b""
            self.media = "text/plain" if change == "media" else self.media
            self.key = "wrong" if change == "key" else KEY

    async def live(self) -> None:
        rng, size = self.rng, len(self.body)
        fields = {"content-type": self.media, "authorization": f"Bearer {self.key}"}
        fields |= {"content-length": str(size)} if rng.random() < 0.5 else {}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "headers": headers,
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
        }
        if self.leaves:
            after = rng.choice((0.0, 0.01, 0.1, 1.0))
            asyncio.get_running_loop().call_later(after, self.leave)
        step = -(-size // rng.choice((1, 1, 2, 4))) or 1
        self.unsent = [
            self.body[start : start + step] for start in range(0, size, step)
        ] or [b""]
        await self.plane.service(scope, self.receive, self.send)
        self._conclude()

    def leave(self) -> None:
        self.gone = not self.complete
        self.over.set()

    async def receive(self) -> dict[str, Any]:
        if self.unsent and not self.gone:
            chunk = self.unsent.pop(0)
            if self.unsent:
                await asyncio.sleep(self.rng.choice((0, 0.01, 0.2)))
            return {"type": "http.request", "body": chunk, "more_body": bool(self.unsent)}
        await self.over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.slow:  # it waits for the client before it writes
            await asyncio.sleep(self.slow)
        if not self.gone:
            self.plane.hear()
            self.got.append(message)
            end = message["type"] == "http.response.body" and not message.get("more_body")
            self.complete = self.complete or end
            if end:
                self.over.set()

    def _conclude(self) -> None:
        """What it was told, as a whole; the order of messages is ASGI's."""
        assert self.complete or self.gone, "it was left without an answer"
        self.outcome = "gone"
        if self.got:
            kinds = [
                message["type"].removeprefix("http.response.") for message in self.got
            ]
            assert kinds == ["start", *["body"] * (len(kinds) - 1)], kinds
            assert all(message["more_body"] for message in self.got[1:-1]), "two ends"
            self.status = self.got[0]["status"]
            self.data = b"".join([message.get("body", b"") for message in self.got[1:]])
        if self.complete and self.status != 200:
            self.outcome = "refused"
            self.why = json.loads(self.data).get("error", {}).get("code") or "none"
        elif self.complete:
            self.outcome = "whole"
            if self.stream and not self.data.endswith(b"data: [DONE]\n\n"):
                self.outcome, self.why = "broken", self.reported()[-1]["error"]["code"]

    def reported(self) -> list[Any]:
        """The objects in the answer."""
        if not self.stream:
            return [json.loads(self.data)] if self.complete else []
        lines = [line.removeprefix("data: ") for line in self.data.decode().split("\n\n")]
        return [json.loads(line) for line in lines if line not in ("", "[DONE]")]

    def judge(self) -> None:
        if self.method == "GET" or self.right != 200:
            ill = self.path == "/health" and self.status == 503
            right = not self.complete or self.status == self.right or ill
            assert right, f"{self.status} is not {self.right}: {self.data!r}"
            return
        super().judge()
        if self.status == 200 and self.fits:
            self._judge_answer()

    def _judge_answer(self) -> None:
        texts, ends = [""] * self.samples, list[Any]([None] * self.samples)
        reported = self.reported()
        for choice in (
            choice for event in reported for choice in event.get("choices", ())
        ):
            index, emitted = (
                choice["index"],
                choice.get("delta", choice.get("message", choice)),
            )
            assert ends[index] is None, "a choice goes on after its end"
            texts[index] += emitted.get("content", emitted.get("text", ""))
            ends[index] = choice["finish_reason"]
        self.judge_text(texts, ends)
        if self.outcome == "whole":
            self._judge_lengths((reported[-1].get("usage") or {}) if reported else {})

    def _judge_lengths(self, usage: dict[str, Any]) -> None:
        """Its usage is right, and the engine heard of its stop strings: it ended then, or
        soon.
        """
        lengths = [len(choice.tokens) for choice in self.choices]
        if usage:
            assert usage["prompt_tokens"] == sum(map(len, self.ids))
            assert usage["completion_tokens"] == sum(lengths)
        name = dict(self.got[0]["headers"])[b"x-request-id"]
        for index, length in enumerate(lengths):
            prompt, sample = divmod(index, self.params["n"])
            ran = self.plane.lengths[f"{name.decode()}-{prompt}", sample]
            assert length <= ran <= length + 2, f"{ran} tokens for {length}"


class Reader(Client):
    """A client of the library in the same loop, which chooses its request's id."""

    def __init__(self, plane: "Plane", rng: Random) -> None:
        super().__init__(plane, rng)
        self.wish = self.prompt()
        self.twin = plane.faults.hits("twin", rng)
        self.name = (
            f"twin{rng.randrange(2)}" if self.twin else f"reader{len(plane.clients)}"
        )
        self.expect([self.wish])
        self.streaming, self.enough = (
            rng.random() < 0.7,
            rng.randrange(9) if self.leaves else 10**6,
        )

    async def live(self) -> None:
        llm, params = self.plane.llm, SamplingParams(**self.params)
        try:
            options: Any = {"request_id": self.name, "streaming": self.streaming}
            async with aclosing(
                llm.generate_deltas(self.wish, params, **options)
            ) as stream:
                async for output in stream:
                    self.plane.hear()
                    self.got.append(output)
                    await asyncio.sleep(self.slow)
                    if len(self.got) >= self.enough:
                        break
        except OverloadedError:
            self.outcome, self.why = "refused", "overloaded"
        except RequestError as error:
            is_served = self.name in llm.frontend.processors and "is being served" in str(
                error
            )
            self.outcome, self.why = (
                "refused",
                "twin" if is_served else "context_length_exceeded",
            )
        except EngineDeadError:
            self.outcome, self.why = "broken", "engine_dead"
        else:
            ends = {
                sample.finish_reason for output in self.got for sample in output.outputs
            }
            self.outcome = "whole" if self.got and self.got[-1].finished else "gone"
            for end, reason in (("error", "engine_error"), ("cancelled", "engine_dead")):
                if end in ends:
                    self.outcome, self.why = "broken", reason

    def judge(self) -> None:
        super().judge()
        samples = range(self.samples if self.fits else 0)
        samples_outputs = [
            [p for out in self.got for p in out.outputs if p.index == index]
            for index in samples
        ]
        ends = [
            [output.finish_reason for output in outputs if output.finish_reason]
            for outputs in samples_outputs
        ]
        assert all(len(end) <= 1 for end in ends), "a sample ended twice"
        emitted = [
            "".join([output.text for output in outputs]) for outputs in samples_outputs
        ]
        self.judge_text(emitted, [*map(next, map(iter, [[*end, None] for end in ends]))])
        for choice, outputs, end in zip(self.choices, samples_outputs, ends, strict=True):
            tokens = [token for output in outputs for token in output.token_ids]
            upto = None if end and end[0] in ("stop", "length") else len(tokens)
            assert tokens == choice.tokens[:upto], f"{tokens} are not {choice.tokens}"
