"""Beam search in this tree and in another, interleaved: how many times as long does this
one take?

    python -m bench.beam_search --before TREE [--device cuda]

Two processes have an engine each, of the same model: on a CPU the one that comes with
minfer, on a GPU a Qwen2.5 0.5B with random weights. They are asked in turn, so that the
machine's noise hits both alike; what counts is the ratio of each pair. First runs compile
kernels: they do not count. The engines are asked through `minfer.LLM` alone, so that the
same script serves trees whose insides differ.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
WIDTHS: Final = (4, 16)  # beams
OUTPUT: Final = 128  # tokens
PROMPT: Final = 100  # tokens
CACHE: Final = 2 << 30  # bytes of KV cache on a GPU
WARM: Final = 3  # runs of each case that do not count
PAIRS: Final = 5


# --- a worker: one engine of one tree ---------------------------------------------------


def serve(device: str, folder: str) -> None:
    """Answer each width and number of a run with its seconds: of the clock, and of CPU
    time.
    """
    from minfer import LLM

    dummy: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": CACHE}
    llm = LLM(folder, device=device, **dummy) if folder else LLM(device=device)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        width, number = json.loads(line)
        print(json.dumps(searched(llm, width, number)), flush=True)
    llm.close()


def searched(llm: Any, width: int, number: int) -> tuple[float, float]:
    """One search; prompts differ from run to run."""
    from minfer import BeamSearchParams

    dice = random.Random(number)
    ids = range(1, llm.setup.spec.vocab_size)
    prompt = {"prompt_token_ids": dice.choices(ids, k=PROMPT)}
    params = BeamSearchParams(beam_width=width, max_tokens=OUTPUT, ignore_eos=True)
    began, busy = time.perf_counter(), time.process_time()
    (result,) = llm.beam_search(prompt, params, use_tqdm=False)
    seconds = time.perf_counter() - began, time.process_time() - busy
    if any(len(sequence.tokens) != PROMPT + OUTPUT for sequence in result.sequences):
        raise RuntimeError("a search did not come to its end")
    return seconds


# --- the comparison ---------------------------------------------------------------------


def paired(before: Path, device: str, folder: str) -> dict[str, Any]:
    """All widths, with both trees in turn."""
    from bench.gpu_pairs import REST_SECONDS, read_answer, worker
    from bench.results import show, spread

    results: dict[str, Any] = {}
    with ExitStack() as stack:
        trees = (before, HERE)
        workers = [
            stack.enter_context(worker(tree, Path(__file__), device, folder))
            for tree in trees
        ]
        for process in workers:
            read_answer(process)
        if device != "cpu":
            time.sleep(REST_SECONDS)
        for width in WIDTHS:
            runs = [_pair(workers, width, number) for number in range(WARM + PAIRS)][
                WARM:
            ]
            case: dict[str, Any] = {}
            for index, metric in enumerate(("seconds", "CPU seconds")):
                old, new = ([pair[tree][index] for pair in runs] for tree in (0, 1))
                ratios = [now / earlier for earlier, now in zip(old, new, strict=True)]
                case[metric] = {
                    "before": median(old),
                    "now": median(new),
                    "times as long": spread(ratios),
                }
            results[f"{width} beams"] = case
            show({"beams": width, **case})
    return results


def _pair(
    workers: list[subprocess.Popen[str]], width: int, number: int
) -> list[tuple[float, float]]:
    """One run by each; neither is always the second."""
    from bench.gpu_pairs import read_answer

    seconds: dict[int, tuple[float, float]] = {}
    for index in (0, 1) if number % 2 else (1, 0):
        pipe = workers[index].stdin
        if pipe is None:
            raise RuntimeError("a worker without a pipe")
        pipe.write(json.dumps([width, number]) + "\n")
        pipe.flush()
        seconds[index] = read_answer(workers[index])
    return [seconds[0], seconds[1]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    with tempfile.TemporaryDirectory() as root:
        model, folder, gpu = "bundled", "", ""
        if args.device == "cuda":
            from bench.gpu_pairs import model_folder

            model, gpu = "0.5B", torch.cuda.get_device_name()
            folder = model_folder(root, model)
        return {
            "device": gpu or args.device,
            "model": model,
            "pairs": PAIRS,
            "prompt": PROMPT,
            "output": OUTPUT,
            "searches": paired(args.before.resolve(), args.device, folder),
        }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3])
    else:
        from bench.results import run

        run(
            "beam_search",
            measure,
            {
                "--before": {"type": Path, "required": True, "help": "another tree"},
                "--device": {"choices": ("cpu", "cuda"), "default": "cpu"},
            },
        )
