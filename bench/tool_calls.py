"""What tools cost a server: strict calls beside free answers, and large bodies.

`calls`: at each number of clients, chats that must call a strict tool, and the same chats
with as many tokens of free text, in alternation. The model has random weights, and the
tool's arguments have no end within `--output` tokens: so each answer has this many tokens
either way, and output tokens per second can be compared. Texts end by a bias towards
quotes, which the free answers have, too; `--texts bounded` gives them a `maxLength`.

`bodies`: one client sends chats with 100 kB of tools, strict and not: the processor time
of the API server's event loop for each, from the kernel's clock of that thread.

    python -m bench.tool_calls                   # 1.5B on a GPU, below 3 minutes
    python -m bench.tool_calls --model Qwen/Qwen2.5-1.5B-Instruct
    python -m bench.tool_calls --shape tiny --device cpu --clients 4 8 --rounds 2
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx
from attrs import frozen

from bench.results import run, show, spread
from bench.server_gpu import serving
from bench.shapes import SHAPES, TINY, qwen
from bench.structured import vocabulary
from minfer.effects.setup.folders import bundled_folder

# The bias of the token that ends a text: with random weights, all tokens are about as
# likely, and this makes every tenth of a text the quote (ln(150,000 / 10) is 9.6).
QUOTE_BIAS: Final = 9.6
BODY_BYTES: Final = 100_000  # of the tools of a large body
BODIES: Final = 40  # of each kind
CONTEXT: Final = 65_536  # tokens, for large bodies
TIMEOUT_SECONDS: Final = 600
TICKS: Final = os.sysconf("SC_CLK_TCK")


def edits(*, bounded: bool) -> dict[str, Any]:
    """A schema of more edits than an answer has tokens."""
    path, text = ({"maxLength": 24}, {"maxLength": 32}) if bounded else ({}, {})
    edit = {
        "type": "object",
        "properties": {
            "path": {"type": "string", **path},
            "kind": {"enum": ["insert", "replace", "delete"]},
            "line": {"type": "integer", "minimum": 1, "maximum": 100_000},
            "text": {"type": "string", **text},
        },
        "required": ["path", "kind", "line", "text"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"edits": {"type": "array", "items": edit, "minItems": 1000}},
        "required": ["edits"],
        "additionalProperties": False,
    }


def tool(name: str, schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A tool of a chat."""
    function = {"name": name, "parameters": schema, "strict": strict}
    return {"type": "function", "function": function}


def many_tools(*, strict: bool) -> list[dict[str, Any]]:
    """Tools of 100 kB together, described at length as agents do."""
    description = "Edits a file of the project, and says what came of it. " * 20
    schema = {**edits(bounded=True), "description": description}
    size = len(json.dumps(tool("edit_00", schema, strict=strict)))
    return [
        tool(f"edit_{number:02}", schema, strict=strict)
        for number in range(BODY_BYTES // size)
    ]


# --- calls ------------------------------------------------------------------------------


@frozen
class Chats:
    """The chats of all clients."""

    output: int  # tokens of each answer
    each: int  # chats of a client, one after the other
    schema: Mapping[str, Any]  # of the tool's arguments
    quote: int  # the token that ends a text

    def body(self, model: str, number: int, *, strict: bool) -> dict[str, Any]:
        """A chat that must call the tool, or the same chat without a constraint."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": f"Edit file {number}. " * 20}],
            "tools": [tool("edit", self.schema, strict=strict)],
            "max_tokens": self.output,
            "temperature": 1,
            "seed": number,
            "logit_bias": {str(self.quote): QUOTE_BIAS},
        }
        if strict:
            return {**body, "tool_choice": "required", "parallel_tool_calls": False}
        return {**body, "ignore_eos": True}

    async def answer_all(self, url: str, clients: int, *, strict: bool) -> dict[str, Any]:
        """What clients get that send one chat after the other."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=clients)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            async with http.get(f"{url}/v1/models") as listed:
                model = (await listed.json())["data"][0]["id"]
            tokens = 0

            async def client_chats(client: int) -> None:
                nonlocal tokens
                for turn in range(self.each):
                    body = self.body(model, client * self.each + turn, strict=strict)
                    async with http.post(
                        f"{url}/v1/chat/completions", json=body
                    ) as answer:
                        answer.raise_for_status()
                        tokens += (await answer.json())["usage"]["completion_tokens"]

            began = time.perf_counter()
            await asyncio.gather(*map(client_chats, range(clients)))
            seconds = time.perf_counter() - began
        rate = tokens / seconds
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": rate}


def calls(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Strict calls and free answers, in alternation, after a round to warm up."""
    results: dict[str, Any] = {}
    with httpx.Client(timeout=TIMEOUT_SECONDS) as http:
        asked = http.post(f"{url}/tokenize", json={"prompt": '"'}).json()
    chats = Chats(
        output=args.output,
        each=args.each,
        schema=edits(bounded=args.texts == "bounded"),
        quote=asked["tokens"][-1],
    )
    for clients in args.clients:
        rounds = []
        for round_number in range(args.rounds + 1):
            pair = {}
            for kind in ("strict", "free") if round_number % 2 else ("free", "strict"):
                answers = chats.answer_all(url, clients, strict=kind == "strict")
                pair[kind] = asyncio.run(answers)
            if round_number:
                rounds.append(pair)
        ratios = [
            pair["strict"]["tokens_per_second"] / pair["free"]["tokens_per_second"]
            for pair in rounds
        ]
        results[str(clients)] = {"rounds": rounds, "strict_to_free": spread(ratios)}
        show(
            {
                "clients": clients,
                "strict_tok_s": round(rounds[-1]["strict"]["tokens_per_second"]),
                "free_tok_s": round(rounds[-1]["free"]["tokens_per_second"]),
                "strict_to_free": spread(ratios),
                "same_tokens": all(
                    pair["strict"]["tokens"] == pair["free"]["tokens"] for pair in rounds
                ),
            }
        )
    return results


# --- bodies -----------------------------------------------------------------------------


def loop_seconds(parent: int) -> dict[int, float]:
    """Processor time of the main thread of each API server, by its process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()
    seconds = {}
    for child in children:
        name = Path(f"/proc/{child}/comm").read_text("ascii").strip()
        if name.startswith("minfer api"):
            stat = Path(f"/proc/{child}/task/{child}/schedstat").read_text("ascii")
            seconds[int(child)] = int(stat.split()[0]) / 1e9
    return seconds


def bodies(url: str, parent: int) -> dict[str, Any]:
    """Milliseconds of the event loop for a chat with 100 kB of tools."""
    results: dict[str, Any] = {}
    with httpx.Client(timeout=TIMEOUT_SECONDS) as http:
        model = http.get(f"{url}/v1/models").json()["data"][0]["id"]
        for kind in ("free", "required", "strict"):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Edit a file."}],
                "tools": many_tools(strict=kind == "strict"),
                "tool_choice": "required" if kind == "required" else "auto",
                "max_tokens": 1,
            }
            for count in (2, BODIES):  # the first ones are cached, and compiled
                before = loop_seconds(parent)
                for _ in range(count):
                    answer = http.post(f"{url}/v1/chat/completions", json=body)
                    answer.raise_for_status()
                after = loop_seconds(parent)
            spent = sum(after.values()) - sum(before.values())
            results[kind] = {
                "body_bytes": len(json.dumps(body)),
                "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
                "event_loop_ms": 1e3 * spent / BODIES,
            }
            show({"tools": kind, **results[kind]})
    return results


# --- the server -------------------------------------------------------------------------


@contextmanager
def model_options(args: argparse.Namespace) -> Iterator[list[str]]:
    """Options of `minfer serve` for the model: a checkpoint, or a shape without one."""
    if args.model:
        yield ["--model", args.model]
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {**qwen(args.shape), "max_position_embeddings": CONTEXT}
        vocab_size = len(
            json.loads((bundled_folder() / "tokenizer.json").read_text())["model"][
                "vocab"
            ]
        )
        config["vocab_size"] = max(config["vocab_size"], vocab_size + 512)
        (folder / "config.json").write_text(json.dumps(config))
        vocabulary(folder, config["vocab_size"])
        template = json.loads((bundled_folder() / "tokenizer_config.json").read_text())
        template["model_max_length"] = CONTEXT
        (folder / "tokenizer_config.json").write_text(json.dumps(template))
        yield ["--model", str(folder), "--load-format", "dummy"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {
        "shape": args.model or args.shape,
        "output": args.output,
        "texts": args.texts,
    }
    shared = ["--device", args.device, "--tool-call-parser", "hermes"]
    with model_options(args) as model:
        short_options = ["--max-model-len", "2048", "--no-enable-prefix-caching"]
        seats = ["--max-num-seqs", str(max(args.clients))]
        with serving([*model, *shared, *short_options, *seats]) as (url, _, ready):
            results["ready_seconds"] = ready
            results["calls"] = calls(args, url)
        long = ["--max-model-len", str(args.context)]
        with serving([*model, *shared, *long]) as (url, process, _):
            results["bodies"] = bodies(url, process.pid)
    return results


if __name__ == "__main__":
    run(
        "tool_calls",
        measure,
        {
            "--shape": {"choices": (*SHAPES, *TINY), "default": "1.5B"},
            "--model": {"default": "", "help": "a checkpoint, instead of a shape"},
            "--device": "cuda",
            "--clients": {"type": int, "nargs": "+", "default": [64, 256]},
            "--rounds": {"type": int, "default": 3, "help": "pairs at each number"},
            "--each": {"type": int, "default": 3, "help": "chats of a client"},
            "--output": 128,
            "--texts": {"choices": ("quoted", "bounded"), "default": "quoted"},
            "--context": CONTEXT,
        },
    )
