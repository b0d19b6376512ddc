"""How fast the bundled models are on this CPU, beside those of another edition.

    git show COMMIT:effects/bundled/target/model.safetensors ...   # into BEFORE/target
    python -m bench.bundled.speed --before BEFORE

Both editions go on with the same beginnings of held-out files, greedily, in turns, in one
process. Their tokenizers differ, and so do the bytes that a token stands for: figures are
given in tokens and in bytes of text. The clock is the processor's, of all threads, since
other jobs may run beside; the ratio is within a pair.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from bench.bundled.sources import held_out_files
from bench.results import run, show, spread
from minfer import LLM, SamplingParams
from minfer.effects.live.driver import quiet_collector
from minfer.effects.setup.folders import bundled_folder

ROLES: Final = ("target", "draft")
BATCHES: Final = (1, 8, 32)
OPENING: Final = 500  # characters of a file that are a prompt
TOKENS: Final = 128  # of an answer
NOW, BEFORE = "now", "before"


@frozen
class Served:
    """What a batch took."""

    tokens: int
    size: int  # bytes of text
    seconds: float  # of processors

    @property
    def rates(self) -> dict[str, float]:
        """A second's worth."""
        return {
            "tokens a second": self.tokens / self.seconds,
            "bytes a second": self.size / self.seconds,
        }


def serve(llm: LLM, prompts: list[str]) -> Served:
    """Go on with some prompts, all at once."""
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begin = time.process_time()
    outputs = [one.outputs[0] for one in llm.generate(prompts, how, use_tqdm=False)]
    seconds = time.process_time() - begin
    size = sum(len(one.text.encode()) for one in outputs)
    return Served(sum(len(one.token_ids) for one in outputs), size, seconds)


def pairs(engines: dict[str, LLM], batch: int, rounds: int) -> dict[str, Any]:
    """Both editions in turns, after a round that does not count."""
    texts = [one.text for one in held_out_files() if len(one.text) > OPENING]
    found: dict[str, list[Served]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        prompts = [
            texts[(number * batch + at) % len(texts)][:OPENING] for at in range(batch)
        ]
        order = [*engines][:: 1 if number % 2 else -1]
        with quiet_collector():
            served = {name: serve(engines[name], prompts) for name in order}
        for name, one in served.items() if number else ():
            found[name].append(one)
    figures: dict[str, Any] = {}
    for unit in ("tokens a second", "bytes a second"):
        each = {name: [one.rates[unit] for one in some] for name, some in found.items()}
        ratios = [a / b for a, b in zip(each[NOW], each[BEFORE], strict=True)]
        figures[unit] = {name: spread(some) for name, some in each.items()}
        figures[unit]["ratio"] = spread(ratios)
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All roles and batches."""
    results: dict[str, Any] = {}
    for role in ROLES:
        folders = {NOW: bundled_folder().parent / role, BEFORE: args.before / role}
        engines = {
            name: LLM(str(folder), device="cpu", max_num_seqs=max(BATCHES))
            for name, folder in folders.items()
        }
        for batch in BATCHES:
            name = f"{role}, batch {batch}"
            results[name] = pairs(engines, batch, args.rounds)
            show({name: results[name]})
        for llm in engines.values():
            llm.close()
    return results


if __name__ == "__main__":
    run(
        "bundled_speed",
        measure,
        {
            "--before": {"type": Path, "required": True, "help": "the other edition"},
            "--rounds": 7,
        },
    )
