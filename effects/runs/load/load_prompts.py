"""The prompts of requests: random tokens, or the prompts of a file.

A prompt is made when its request is, from its number alone: no request waits until a
hundred thousand prompts are made, and several processes make the same ones. Random tokens
are drawn from a table of them that is already JSON, as a prompt of 20,000 tokens must not
block the event loop that measures other requests.

Random prompts share no prefix; otherwise the server's prefix cache would be measured.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from attrs import frozen

from minfer.effects.runs.load.request_record import LoadError

FIRST_ID: Final = 16  # special tokens are below it, or at the vocabulary's end
_DRAWN: Final = 2**16  # entries of a table: two random bytes choose one
# The words of prompts that are text; most tokenizers have a token for each.
_WORDS: Final = (
    "the of and to in is that it was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which "
    "she do how their if will up other about out many then them these so some her would "
    "make like him into time has look two more write go see number no way could people"
)


@frozen
class LoadPrompt:
    """A prompt as the field of a JSON object, and the limit of its output tokens."""

    field: bytes
    max_tokens: int


class Prompts(Protocol):
    """The same prompt for the same number, in any process."""

    def prompt(self, number: int) -> LoadPrompt:
        """The prompt of a request; that of the warm-up has the number -1."""


@frozen
class RandomPrompts:
    """Random tokens: ids below `vocab_size`, or in a chat, words."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0  # lengths are uniform within this share of themselves
    chat: bool = False
    vocab_size: int = 2000
    seed: str = "0"

    def prompt(self, number: int) -> LoadPrompt:
        """The prompt of a request."""
        rng = Random(f"{self.seed}/{number}")  # noqa: S311 - a load has no secrets
        length = _around(rng, self.input_len, self.range_ratio)
        output = _around(rng, self.output_len, self.range_ratio)
        table = _table(self.vocab_size, self.chat)
        tokens = [table[i] for i in array("H", rng.randbytes(2 * length))]
        if not self.chat:
            return LoadPrompt(b'"prompt":[' + b",".join(tokens) + b"]", output)
        content = b'{"role":"user","content":"' + b" ".join(tokens) + b'"}'
        return LoadPrompt(b'"messages":[' + content + b"]", output)


@cache
def _table(vocab_size: int, words: bool) -> list[bytes]:
    """Tokens to draw from, as JSON."""
    ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
    known = (
        [word.encode() for word in _WORDS.split()] if words else [b"%d" % i for i in ids]
    )
    return [known[i % len(known)] for i in range(_DRAWN)]


def _around(rng: Random, mean: int, ratio: float) -> int:
    """A length within a share of its mean."""
    return rng.randint(
        max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    )


@frozen
class ListedPrompts:
    """Prompts of a file, in turn, and again from the first."""

    prompts: Sequence[LoadPrompt]

    def prompt(self, number: int) -> LoadPrompt:
        """The prompt of a request."""
        return self.prompts[number % len(self.prompts)]


def read_prompts(path: Path, output_len: int, *, chat: bool) -> ListedPrompts:
    """The prompts of a file of JSON lines. Raises LoadError."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise LoadError(f"--dataset-path {path}: {why}") from None
    prompts = [*_read_prompts(path, lines, output_len, chat=chat)]
    if not prompts:
        raise LoadError(f"--dataset-path {path}: there are no prompts in it")
    return ListedPrompts(prompts)


def _read_prompts(
    path: Path, lines: Sequence[str], output_len: int, *, chat: bool
) -> Iterator[LoadPrompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{path}, line {number}: {error}") from None
        field = _field(entry, chat=chat) if isinstance(entry, dict) else None
        if field is None:
            wanted = "a prompt (text) or messages" if chat else "a prompt (text or ids)"
            raise LoadError(f"{path}, line {number}: it must be an object with {wanted}")
        tokens = entry.get("output_tokens", entry.get("max_tokens", output_len))
        if type(tokens) is not int or tokens < 1:
            raise LoadError(
                f"{path}, line {number}: output_tokens must be a whole number from 1"
            )
        written = json.dumps(field, ensure_ascii=False, separators=(",", ":"))[1:-1]
        yield LoadPrompt(written.encode("utf-8", "replace"), tokens)


def _field(entry: dict[str, Any], *, chat: bool) -> dict[str, Any] | None:
    """The field of a request that has an entry's prompt; None if it cannot be sent."""
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if not chat:
        ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
        return {"prompt": prompt} if prompt and (ids or isinstance(prompt, str)) else None
    if messages is None and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}] if prompt else None
    listed = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    return {"messages": messages} if listed and messages else None
