"""Servers whose engines have several GPUs.

python -m bench.ranks_servers_gpu --parts replicas apart losses

replicas   several replicas of some ranks beside one: output tokens a second over HTTP,
           of random weights, 512 tokens in and 128 out, as many clients for each replica;
           with `--distributed ray`, Ray places the engines
apart      engines that compute prompts and engines that decode, of other parallel
           sizes, and one engine that does both: the bundled model in float32, greedy
           and seeded, must say the same
losses     a rank of two is killed, or stopped, under load: seconds until tokens flow,
           and whether answers are those of before
"""

import argparse
import asyncio
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.results import run, show
from bench.routing_live import until_ready
from bench.server_clients import write_model
from bench.server_gpu import OUTPUT, PROMPT, load, serving
from bench.shapes import SHAPES, TINY, qwen
from tests.effects.serving.process_deaths import Load, Server, bodies, long_bodies, server

SETTLE_SECONDS: Final = 15.0  # seconds in which idle engines capture graphs
RUNS: Final = 3
EXACT: Final = ("--dtype=float32", "--num-gpu-blocks-override=256")
SIZES: Final = [(2, 1), (1, 2)]  # ranks of an engine for prompts, and of one that decodes
LOSSES: Final = [
    (1, signal.SIGKILL),
    (0, signal.SIGKILL),
    (1, signal.SIGSTOP),
    (0, signal.SIGSTOP),
]


def throughput(url: str, args: argparse.Namespace, replicas: int) -> list[float]:
    """Output tokens a second of some runs, after one that does not count."""
    rates = list[float]()
    clients = args.clients * replicas
    for seed in range(RUNS + 1):
        rates.append(load(args, url, clients, seed)["output_throughput"])
        show({"replicas": replicas, "tokens/s": round(rates[-1])})
        if seed == 0:
            time.sleep(SETTLE_SECONDS)
    return sorted(rates[1:])


def replicas(args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of replicas of `args.ranks` ranks, and the last beside the first."""
    rates = dict[int, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), qwen(args.shape))
        for count in args.replicas:
            options = ["--model", folder, "--device", args.device, "--load-format=dummy"]
            options += ["--max-model-len=1024", "--no-enable-prefix-caching"]
            options += [f"--tensor-parallel-size={args.ranks}", f"--replicas={count}"]
            options.append(f"--api-processes={args.fronts}")
            if args.distributed:
                options.append(f"--distributed={args.distributed}")
            with serving(options) as (url, *_):
                if count > 1:
                    asyncio.run(until_ready(url, count))
                rates[count] = throughput(url, args, count)
    middle = {count: runs[RUNS // 2] for count, runs in rates.items()}
    first, last = args.replicas[0], args.replicas[-1]
    return {"tokens/s": rates, "times": middle[last] / middle[first]}


def learnt(served: Server, asked: list[dict[str, Any]]) -> Load:
    """What a server answers to all, one after the other."""
    served.drain()
    load = Load(served.url, asked)
    asyncio.run(load.learn())
    return load


def apart(args: argparse.Namespace) -> dict[str, Any]:
    """Engines of other parallel sizes for prompts and for decoding."""
    asked = long_bodies(2, 100)
    device = f"--device={args.device}"
    with server(*EXACT, device) as served:
        single = learnt(served, asked)
    results = dict[str, Any]()
    for prefill, decode in SIZES:
        sizes = f"--prefill-tensor-parallel-size={prefill}"
        options = ("--prefill=1", "--decode=1", sizes, f"--tensor-parallel-size={decode}")
        with server(*EXACT, device, *options) as served:
            load = learnt(served, asked)
            lines = served.get("/metrics").text.splitlines()
        counts = {
            line.partition("{")[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("minfer_kv_keyed_l")
        }
        pairs = zip(load.right, single.right, strict=True)
        equal = sum(answer.equals(expected) for answer, expected in pairs)
        result = {"requests": len(asked), "equal": equal, **counts}
        show({f"prefill {prefill}, decode {decode}": result})
        results[f"prefill {prefill}, decode {decode}"] = result
    return results


def losses(args: argparse.Namespace) -> dict[str, Any]:
    """Each rank of two is killed and stopped."""
    seconds = dict[str, Any]()
    ranks = f"--tensor-parallel-size={args.ranks}"
    with server(*EXACT, f"--device={args.device}", ranks) as served:
        served.drain()
        load = Load(served.url, bodies(2, 100))

        async def lose_ranks() -> None:
            await served.until_ready()
            await load.learn()
            async with load.clients():
                for rank, loss_signal in LOSSES:
                    await load.flows(time.monotonic())
                    await asyncio.sleep(2)
                    begin = time.monotonic()
                    await served.lose(rank, loss_signal)
                    lost_at = time.monotonic()
                    await load.flows(lost_at)
                    name = f"rank {rank}, {loss_signal.name}"
                    seconds[name] = {
                        "gone": lost_at - begin,
                        "flows": time.monotonic() - begin,
                    }
                    show({name: seconds[name]})

        asyncio.run(lose_ranks())
    ends = {"requests": len(load.ended), "lost": len(load.lost())}
    return {"seconds": seconds, **ends, "different": len(load.different())}


PARTS: Final = {"replicas": replicas, "apart": apart, "losses": losses}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The parts that are asked for."""
    return {
        "shape": args.shape,
        "ranks": args.ranks,
        "distributed": args.distributed,
        "device": args.device,
        **{name: PARTS[name](args) for name in args.parts},
    }


if __name__ == "__main__":
    run(
        "ranks_servers_gpu",
        measure,
        {
            "--parts": {"nargs": "+", "choices": [*PARTS], "default": [*PARTS]},
            "--shape": {"choices": [*SHAPES, *TINY], "default": "7B"},
            "--ranks": 2,
            "--replicas": {"type": int, "nargs": "+", "default": [1, 2]},
            "--distributed": {"choices": ("ray",), "help": "what places the engines"},
            "--clients": {"type": int, "default": 128, "help": "for each replica"},
            "--each": {"type": int, "default": 6, "help": "requests of a client"},
            "--fronts": 4,
            "--prompt": PROMPT,
            "--output": OUTPUT,
            "--device": {"default": "cuda", "choices": ["cpu", "cuda"]},
        },
    )
