"""Conversations at once where layers keep a state: hits and first tokens of an engine.

    python -m bench.state_conversations --engine minfer
    python -m bench.state_conversations --engine vllm

The load of `state_hits`, on a GPU: 128 conversations of 10 turns, of Qwen3.5 2B's shape
with random weights, in a pool that holds a third of them; each asks on when it has its
answer and has thought. The share of hits is that of the tokens that a prompt has in
common with the turn before. The second command is for an environment with vLLM beside
minfer; its pool has as many bytes. `--tiny` is for a CPU: to try the script.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Final

from attrs import define, field

from bench.layers_gpu import COMMON, SHAPES, tiny
from bench.layers_vllm import greedy, memory_settings, set_environment
from bench.results import percentiles, run, show

MODEL: Final = "qwen3.5-2B"
# Of a token, in the six layers of attention: keys and values of two heads.
TOKEN_BYTES: Final = 6 * 2 * 2 * 256 * 2
MAX_LENGTH: Final = 20_000  # tokens of a conversation, at most
OPTIONS: Final = {
    "--engine": {"choices": ("minfer", "vllm"), "default": "minfer"},
    "--conversations": 128,
    "--turns": 10,
    "--first": 2000,  # tokens of a first question, on average,
    "--more": 600,  # of later ones,
    "--answer": 200,  # and of an answer
    "--holds": 1 / 3,  # of the keys and values of all conversations at their ends
    "--rows": 64,
    "--think": 5.0,  # seconds between an answer and the next question, on average
    "--seed": 0,
    "--start": {"type": Path, "help": "wait for this file before asking"},
    "--tiny": {"action": "store_true"},
}
# With --tiny: a load that a CPU takes in seconds.
TINY: Final = {
    "conversations": 4,
    "turns": 3,
    "first": 40,
    "more": 20,
    "answer": 8,
    "think": 0.01,
}


@define
class Load:
    """What was asked, and what became of it."""

    args: argparse.Namespace
    engine: Any  # an AsyncLLM of minfer or of vLLM
    shared: list[int] = field(factory=list)  # tokens of a prompt that were there before
    hits: list[int] = field(factory=list)  # those that were in the cache
    firsts: list[float] = field(factory=list)  # seconds to a first token

    async def converse(self, number: int) -> None:
        """Ask all questions of one conversation."""
        args, rng = self.args, Random(f"{self.args.seed} {number}")
        await asyncio.sleep(args.think * rng.random())
        history: list[int] = []
        for turn in range(args.turns):
            fresh = rng.uniform(0.5, 1.5) * (args.more if turn else args.first)
            words = 2000 if args.tiny else 100_000
            before = len(history)
            history += [rng.randrange(100, words) for _ in range(int(fresh))]
            answer = int(rng.uniform(0.5, 1.5) * args.answer)
            outputs = self.outputs(history, answer, f"{number}.{turn}")
            began, first, output = time.perf_counter(), None, None
            async for output in outputs:
                if first is None and output.outputs[0].token_ids:
                    first = time.perf_counter() - began
            if output is None or first is None:
                raise RuntimeError(f"request {number}.{turn} ended without a token")
            self.firsts.append(first)
            if turn:
                self.shared.append(before)
                self.hits.append(min(before, output.num_cached_tokens or 0))
            history += output.outputs[0].token_ids
            await asyncio.sleep(rng.expovariate(1 / args.think))

    def outputs(self, prompt: list[int], tokens: int, name: str) -> AsyncIterator[Any]:
        """Ask the engine."""
        ids = {"prompt_token_ids": list(prompt)}
        if self.args.engine == "vllm":
            parameters = greedy(tokens)
        else:
            from minfer import SamplingParams

            parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs: AsyncIterator[Any] = self.engine.generate(ids, parameters, name)
        return outputs

    async def all(self) -> dict[str, Any]:
        """Have all conversations at once."""
        began = time.perf_counter()
        numbers = range(self.args.conversations)
        await asyncio.gather(*(self.converse(number) for number in numbers))
        return {
            "requests": len(self.firsts),
            "seconds": time.perf_counter() - began,
            "hit share": sum(self.hits) / sum(self.shared),
            "first token, s": {**percentiles(self.firsts), "mean": mean(self.firsts)},
        }


def open_engine(args: argparse.Namespace, folder: str) -> Any:
    """Returns the engine with a pool of the size that was asked for."""
    tokens = args.first + (args.turns - 1) * args.more + args.turns * args.answer
    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 400 if args.tiny else MAX_LENGTH,
        "max_num_seqs": args.rows,
        "enable_prefix_caching": True,
    }
    size = args.holds * args.conversations * tokens * TOKEN_BYTES
    if args.engine == "vllm":
        settings |= memory_settings(size / 1e9)
        set_environment()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM as VllmEngine

        return VllmEngine.from_engine_args(AsyncEngineArgs(**settings))
    if not args.tiny:
        settings["kv_cache_memory_bytes"] = int(size)
    from minfer import AsyncLLM

    return AsyncLLM(**settings)


async def run_conversations(args: argparse.Namespace) -> dict[str, Any]:
    """Open the engine, warm it up, and have the conversations."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPES[MODEL], **COMMON}
        used = tiny(config) if args.tiny else config
        (Path(folder) / "config.json").write_text(json.dumps(used))
        engine = open_engine(args, folder)
    warm = argparse.Namespace(**{**vars(args), "seed": "warm", "think": 0.01, "turns": 2})
    await Load(warm, engine).all()
    print("warm", flush=True)
    while args.start is not None and not args.start.exists():
        await asyncio.sleep(0.1)
    figures = await Load(args, engine).all()
    show(figures)
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Have the conversations with one engine."""
    if args.tiny:
        vars(args).update(TINY)
    return {args.engine: asyncio.run(run_conversations(args))}


if __name__ == "__main__":
    run("state_conversations", measure, OPTIONS)
