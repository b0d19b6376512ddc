"""What a step of training sees: windows of tokens from each source, in fixed shares.

All tokens are on the device. Conversations are those of some shards at once; which, is a
matter of the step alone, so that a run which was interrupted goes on as it would have.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Final

import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch import Tensor

from bench.bundled import corpus
from bench.bundled.packing import (
    HEAVY,
    LEARNT,
    WINDOW,
    Pack,
    behind,
    circles,
    halves,
    texts,
)
from bench.bundled.prepare import CORPUS, TOKENIZER
from bench.bundled.shards import Shards
from bench.bundled.tasks.code import document
from bench.bundled.values import document as value

AT_ONCE: Final = 32  # shards that a step draws from
STEPS: Final = 12  # until the oldest of them is replaced
WEIGHT: Final = 32  # of a heavy token, in plain ones
RECIPES: Final = 8000
VALUES: Final = 80_000
BEHIND: Final = 0.5  # of values, come behind something else
# Shares of documents that are cut in two, as if their beginning had been typed.
CUT_OPENINGS: Final = 0.3
CUT_RECIPES: Final = 0.6
# Rows of 64: conversations, whole files from anywhere, definitions, recipes, circles,
# values of JSON and words in brackets.
SHARES: Final[Mapping[str, int]] = {
    "talk": 32,
    "files": 12,
    "openings": 12,
    "recipes": 2,
    "circles": 2,
    "values": 4,
}
SOURCES: Final = ("files", "openings")  # which are what was found, and no more


@frozen
class Tape:
    """A pack on the device."""

    tokens: Tensor
    starts: Tensor
    anywhere: bool  # windows may begin within a document

    @classmethod
    def of(cls, pack: Pack, device: str, *, anywhere: bool = False) -> "Tape":
        tokens = torch.from_numpy(pack.tokens).to(device)
        return cls(tokens, torch.from_numpy(pack.starts).to(device), anywhere)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Where windows begin."""
        many = len(self.tokens) - WINDOW if self.anywhere else len(self.starts)
        found = torch.randint(
            many, (count,), device=self.tokens.device, generator=generator
        )
        return found if self.anywhere else self.starts[found]


@frozen
class Python:
    """The sources as tapes, and the held-out files as one row of tokens."""

    tapes: Mapping[str, Tape]
    held_out: list[int]
    held_out_bytes: int
    counts: Mapping[str, int]


def read_python(
    folder: Path,
    device: str,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Python:
    """Read the corpus into tokens, by default those of the tokenizer beside it; `limit`
    bounds its documents, for a trial.
    """
    if tokenizer is None:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    found = corpus.read(folder / CORPUS)
    rng = Random(0)
    openings = found.openings
    rng.shuffle(openings)
    files = texts(tokenizer, found.files[:limit])
    definitions = halves(tokenizer, openings[:limit], rng, CUT_OPENINGS)
    recipes = [document(rng) for _ in range(RECIPES)]
    written = halves(tokenizer, recipes, rng, CUT_RECIPES)
    rounds = circles(
        rng, [*definitions[:20_000], *written], 20_000 if limit is None else limit
    )
    count = VALUES if limit is None else limit
    values = texts(tokenizer, [value(rng) for _ in range(count)])
    packs = {
        "files": files,
        "openings": definitions,
        "recipes": written,
        "circles": rounds,
        "values": behind(rng, definitions, values, BEHIND),
    }
    held = [0]
    for one in tokenizer.encode_batch(found.held_out, add_special_tokens=False):
        held += [*one.ids, 0]
    return Python(
        tapes={
            name: Tape.of(Pack.of(of), device, anywhere=name == "files")
            for name, of in packs.items()
        },
        held_out=held,
        held_out_bytes=found.about["held_out_bytes"],
        counts={name: sum(map(len, of)) for name, of in packs.items()},
    )


class Feed:
    """Windows for each step."""

    def __init__(
        self,
        python: Python,
        shards: Shards,
        rows: int,
        length: int,
        device: str,
        seed: int,
        python_share: float = 1.0,
    ) -> None:
        """`python_share`: of the rows that files and definitions usually have. Raises
        ValueError for fewer rows than sources.
        """
        if rows < len(SHARES):
            raise ValueError(f"{rows} rows, of {len(SHARES)} sources at least one each")
        self._tapes, self._shards = python.tapes, shards
        self._device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.rows = {
            name: max(1, rows * share // sum(SHARES.values()))
            for name, share in SHARES.items()
        }
        for name in SOURCES:
            self.rows[name] = max(1, round(self.rows[name] * python_share))
        self.rows["talk"] += rows - sum(self.rows.values())
        self._talk: dict[int, Tape] = {}
        self._span = torch.arange(length + 1, device=device)

    def batch(self, step: int) -> Tensor:
        """The windows of a step, source after source: tokens with their marks."""
        self._move(step // STEPS)
        parts = [self._from_talk(self.rows["talk"], step)]
        for name, tape in self._tapes.items():
            begins = tape.draw(self.rows[name], self.generator)
            parts.append(tape.tokens[begins[:, None] + self._span])
        return torch.cat(parts).int()

    def _move(self, first: int) -> None:
        """Have the shards that are looked at from a step on."""
        for number in range(first, first + AT_ONCE):
            if number not in self._talk:
                self._talk[number] = Tape.of(self._shards.get(number), self._device)
        for number in [number for number in self._talk if number < first]:
            del self._talk[number]

    def _from_talk(self, count: int, step: int) -> Tensor:
        """Windows of the shards by turns."""
        numbers, parts = sorted(self._talk), []
        for at in range(step * count, (step + 1) * count):
            tape = self._talk[numbers[at % len(numbers)]]
            parts.append(tape.tokens[tape.draw(1, self.generator)[:, None] + self._span])
        return torch.cat(parts)


def parted(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, what follows each, and how much that counts."""
    ids, marks = batch & (HEAVY - 1), batch[:, 1:]
    counts = (marks & LEARNT > 0).float() + (WEIGHT - 1) * (marks & HEAVY > 0).float()
    return ids[:, :-1], ids[:, 1:].long(), counts
