"""Fresh conversations while training goes on: processes write shards, one after another.

A shard is a function of the seed and its number, so that a run that was interrupted sees
what it would have seen. Training looks at some shards at once, a window that moves on;
those who write stay some shards ahead of it, and no more.
"""

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy
from attrs import frozen
from tokenizers import Tokenizer

from bench.bundled.dialogues import any_dialogue
from bench.bundled.packing import Conversations, Pack
from bench.bundled.tasks.tasks import Stage

SHARD: Final = 1_000_000  # tokens
BATCH: Final = 500  # conversations
AHEAD: Final = 24  # shards beyond what was asked for
PATIENCE: Final = 300.0  # seconds for a shard
LATER: Final = 780  # shards of the first stage: about half of all


def stage_of(number: int) -> Stage:
    """When in training a shard comes."""
    return Stage.LATER if number >= LATER else Stage.FIRST


def make(tokenizer: Tokenizer, seed: int, number: int, tokens: int, stage: Stage) -> Pack:
    """A shard."""
    rng = Random(f"{seed} {number}")
    conversations = Conversations(tokenizer)
    documents, total = [], 0
    while total < tokens:
        dialogues = [any_dialogue(rng, stage) for _ in range(BATCH)]
        for one in conversations.tokens(dialogues):
            documents.append(one)
            total += len(one)
    return Pack.of(documents)


@frozen
class Shards:
    """The shards of a seed, as they are written."""

    folder: Path
    wanted: Any  # a number that is shared: those who write may go so far

    def get(self, number: int) -> Pack:
        """A shard; waits until it is there. Raises TimeoutError."""
        self.wanted.value = max(self.wanted.value, number + AHEAD)
        path, waited = self.folder / f"{number}.npz", 0.0
        while not path.exists():
            if waited > PATIENCE:
                raise TimeoutError(f"shard {number} did not come in {PATIENCE:.0f} s")
            time.sleep(0.02)
            waited += 0.02
        with numpy.load(path) as arrays:
            found = Pack(arrays["tokens"], arrays["starts"])
        path.unlink()
        return found


@contextmanager
def writing(
    tokenizer: Path,
    seed: int,
    first: int,
    workers: int,
    size: int = SHARD,
    stage: Stage | None = None,
) -> Iterator[Shards]:
    """Processes that write shards from number `first` on, while the context is open: of
    one stage, or of that which a number is of.
    """
    context = multiprocessing.get_context("spawn")
    wanted = context.Value("q", first + AHEAD)
    folder = Path(tempfile.mkdtemp(prefix="bundled-shards-"))
    processes = [
        context.Process(
            target=_write,
            args=(tokenizer, seed, first + at, workers, wanted, folder, size, stage),
            daemon=True,
        )
        for at in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        yield Shards(folder, wanted)
    finally:
        for process in processes:
            process.terminate()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    tokenizer: Path,
    seed: int,
    number: int,
    step: int,
    wanted: Any,
    folder: Path,
    size: int,
    stage: Stage | None,
) -> None:
    """One of the processes: every `step`-th shard."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    read = Tokenizer.from_file(str(tokenizer))
    while True:
        while number > wanted.value:
            time.sleep(0.05)
        own = stage_of(number) if stage is None else stage
        pack = make(read, seed, number, size, own)
        part = folder / f"{number}.part.npz"
        numpy.savez(part, tokens=pack.tokens, starts=pack.starts)
        part.rename(folder / f"{number}.npz")
        number += step
