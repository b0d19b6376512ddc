"""This tree and another on one CUDA GPU, interleaved: how many times as fast is this one?

    python -m bench.gpu_pairs --before TREE

Two processes have an engine each, of the same model with random weights, with a KV cache
of the same size. They are asked in turn, so that the machine's noise hits both alike;
what counts is the ratio of each pair. First runs compile kernels and capture
graphs: they do not count. The engines are asked through `minfer.LLM` alone, so that the
same script serves trees whose insides differ.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
CASES: Final = {
    "7B": ("batch 1", "batch 8", "batch 256", "nano"),
    "0.5B": ("batch 1", "batch 8", "batch 256", "nano"),
}
WARM: Final = 2  # runs of each case that do not count
PAIRS: Final = 10
# Seconds before the first run: an idle engine captures graphs, which would slow the other
# one down.
REST_SECONDS: Final = 50.0
# Bytes of KV cache of each engine: two of a 7B fit into 80 GB, and no case but "nano" of
# a 7B has to preempt.
CACHE: Final = 12 << 30
PROMPT: Final = 512  # tokens of equal requests
OUTPUT: Final = 128


# --- a worker: one engine of one tree ---------------------------------------------------


def serve(folder: str) -> None:
    """Answer cases with output tokens a second, prefill and text included."""
    from minfer import LLM

    llm = LLM(
        folder,
        load_format="dummy",
        device="cuda",
        max_num_seqs=256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE,
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case, number = json.loads(line)
        print(json.dumps(measure_case(llm, case, number)), flush=True)
    llm.close()


def measure_case(llm: Any, case: str, number: int) -> float:
    """One run of a case; equal requests differ from run to run, and so do prefixes."""
    from minfer import SamplingParams

    if case == "nano":
        dice = random.Random(0)
        size = partial(dice.randint, 100, 1024)
        prompts = [[dice.randint(0, 10_000) for _ in range(size())] for _ in range(256)]
        params = [
            SamplingParams(temperature=0.6, max_tokens=size(), ignore_eos=True)
            for _ in prompts
        ]
    else:
        batch = int(case.removeprefix("batch "))
        dice = random.Random(f"{case} {number}")
        prompts = [dice.choices(range(1, 100_000), k=PROMPT) for _ in range(batch)]
        params = [
            SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        ] * batch
    began = time.perf_counter()
    outputs = [
        output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)
    ]
    seconds = time.perf_counter() - began
    if any(output.finish_reason != "length" for output in outputs):
        raise RuntimeError(f"{case}: a request failed: {outputs[0].error}")
    return sum(len(output.token_ids) for output in outputs) / seconds


# --- the comparison ---------------------------------------------------------------------


@contextmanager
def worker(tree: Path, script: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the worker's part of a script with the code of `tree`."""
    with subprocess.Popen(
        [sys.executable, str(script.resolve()), "--serve", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        if process.stdin is not None:
            process.stdin.close()


def read_answer(process: subprocess.Popen[str]) -> Any:
    """The next answer of a worker. Raises RuntimeError if it has ended."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("a worker has ended; see its messages above")
    return json.loads(line)


def ask(process: subprocess.Popen[str], case: str, number: int) -> float:
    """One run of a case by a worker: output tokens a second."""
    if process.stdin is None:
        raise RuntimeError("a worker without a pipe")
    process.stdin.write(json.dumps([case, number]) + "\n")
    process.stdin.flush()
    return float(read_answer(process))


def model_folder(root: str, name: str) -> str:
    """A folder with a config, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models

    from bench.shapes import SHAPES, qwen

    folder = Path(root) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen(name)))
    words = {f"{number:x}": number for number in range(SHAPES[name][5])}
    Tokenizer(models.WordLevel(words, "0")).save(str(folder / "tokenizer.json"))
    return str(folder)


def paired(before: Path, folder: str, cases: tuple[str, ...]) -> dict[str, Any]:
    """All cases of one model, with both trees in turn."""
    from bench.results import show, spread

    results: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(tree, Path(__file__), folder))
            for tree in (before, HERE)
        ]
        for process in workers:
            read_answer(process)
        time.sleep(REST_SECONDS)
        for case in cases:
            runs: list[list[float]] = []
            for number in range(WARM + PAIRS):
                order = workers[
                    :: 1 if number % 2 else -1
                ]  # neither is always the second
                rates = {process: ask(process, case, number) for process in order}
                runs.append([rates[process] for process in workers])
            counted = runs[WARM:]
            old, new = (median(column) for column in zip(*counted, strict=True))
            ratios = spread([now / earlier for earlier, now in counted])
            results[case] = {"before": old, "now": new, "times as fast": ratios}
            show({"model": Path(folder).name, "case": case, **results[case]})
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("python -m bench.gpu_pairs needs a CUDA GPU")
    with tempfile.TemporaryDirectory() as root:
        return {
            "gpu": torch.cuda.get_device_name(),
            "pairs": PAIRS,
            "models": {
                model: paired(
                    args.before.resolve(),
                    model_folder(root, model),
                    tuple(case for case in cases if not args.cases or case in args.cases),
                )
                for model, cases in CASES.items()
                if not args.models or model in args.models
            },
        }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        from bench.results import run

        run(
            "gpu_pairs",
            measure,
            {
                "--before": {"type": Path, "required": True, "help": "another tree"},
                "--models": {"nargs": "*", "default": [], "choices": [*CASES]},
                "--cases": {"nargs": "*", "default": [], "help": "some cases alone"},
            },
        )
