"""All figures of one CUDA GPU beside their targets, vLLM's figures and what the hardware
allows.

    python -m bench.gpu [--parts PART ...] [--report]

runs the parts that are named, or else what the result file lacks: it is rewritten after
each part and model, so an interrupted run goes on where it was. Targets stand in
bench/README.md. `--report` needs no GPU: it only fills the table there from the file, and
draws the throughputs beside that.
"""

import argparse
import json
import re
import subprocess
import tempfile
import traceback
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch

from bench import gpu_workloads
from bench.gpu_workloads import SEED, Figures, Lab
from bench.results import ROOT, canvas, circumstances, run, write

README: Final = ROOT / "bench" / "README.md"
# First what needs the whole GPU, then what shares an engine: the fewest are opened.
PARTS: Final = {
    "7B": (
        "start",
        "kernels",
        "flash_decoding",
        "throughput",
        "latency",
        "decode",
        "prefill",
        "host",
        "journal",
        "transformers",
        "chunked",
        "prefix",
    ),
    "1.5B": ("throughput", "latency", "decode", "graphs"),
    "0.5B": ("throughput", "latency", "decode"),
}
HIGHER: Final = ("tok/s", "TB/s", "TFLOP/s", "times", "% less")  # is better
VLLM, FLOOR = "vLLM 0.26.0", "floor"
TARGETS: Final = ("at least", "aim", VLLM, FLOOR)
TABLE_HEAD: Final = f"| figure | measured | to vLLM | {' | '.join(TARGETS)} |"


def by_name(tasks: dict[str, Any]) -> Figures:
    """Every figure, by "PART MODEL: NAME"."""
    entries = tasks.items()
    return {
        f"{task}: {name}": figure
        for task, did in entries
        for name, figure in did["figures"].items()
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def measured(figure: dict[str, Any]) -> str:
    spread = (
        f" ({number(figure['low'])} to {number(figure['high'])})"
        if figure["repetitions"] > 1
        else ""
    )
    return f"{number(figure['median'])} {figure['unit']}{spread}"


def ratio(figure: dict[str, Any], other: float) -> str:
    """How many times better than `other`."""
    better = figure["median"] / other
    return f"{better if figure['unit'] in HIGHER else 1 / better:.2f}"


def targets() -> dict[str, dict[str, float]]:
    """What the README's table names for each figure, by column."""
    _, _, table = README.read_text("utf-8").partition(TABLE_HEAD)
    _, *lines = takewhile(bool, table.splitlines()[1:])
    rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    pairs = ((name, zip(TARGETS, cells, strict=True)) for name, _, _, *cells in rows)
    return {
        name: {k: float(v.replace(",", "")) for k, v in pair if v} for name, pair in pairs
    }


def report(figures: Figures, path: Path) -> None:
    """Fill the README's table, and draw throughputs to `path`."""
    text, rows = README.read_text("utf-8"), targets()
    for name in rows.keys() & figures.keys():
        result, peer = figures[name], rows[name].get(VLLM)
        filled = (
            f"| {name} | {measured(result)} | {ratio(result, peer) if peer else ''} |"
        )
        text = re.sub(rf"\| {re.escape(name)} \|[^|]*\|[^|]*\|", filled, text)
    README.write_text(text, "utf-8")
    names = [name for name in rows if name.startswith("throughput") and name in figures]
    axes = (figure := canvas(9, 3.5)).subplots()
    for i, label in enumerate(("minfer", VLLM, FLOOR)):
        values = [
            (rows[name] | {"minfer": figures[name]["median"]})[label] for name in names
        ]
        axes.bar(
            [place + 0.27 * i for place in range(len(names))], values, 0.25, label=label
        )
    labels = [name.removeprefix("throughput ").replace(": ", "\n") for name in names]
    axes.set_xticks([place + 0.27 for place in range(len(names))], labels, fontsize=7)
    axes.set(ylabel="output tokens/s", yscale="log")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def baseline() -> Figures:
    """What was committed last."""
    command = ["git", "show", "HEAD:bench/results/gpu.json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return (
        by_name(json.loads(process.stdout)["results"]["tasks"]) if process.stdout else {}
    )


def measure(args: argparse.Namespace) -> None:
    path = args.folder / f"{args.name}.json"
    results = (
        json.loads(path.read_text("utf-8"))["results"] if path.exists() else {"tasks": {}}
    )
    tasks, before, wanted, broken = results["tasks"], baseline(), targets(), list[str]()
    if args.report:
        report(by_name(tasks), path.with_suffix(".svg"))
        return
    if not torch.cuda.is_available():
        raise SystemExit("python -m bench.gpu needs a CUDA GPU; only --report does not")
    gpu = torch.cuda.get_device_name()
    if results.setdefault("gpu", gpu) != gpu:
        raise SystemExit(
            f"{path} is of GPU {results['gpu']}, this is {gpu}: use another --folder"
        )
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        for workload, model in (
            (workload, model)
            for model, workloads in PARTS.items()
            for workload in workloads
        ):
            task = f"{workload} {model}"
            if not (workload in args.parts if args.parts else task not in tasks):
                continue
            try:
                figures = getattr(gpu_workloads, workload)(lab, model)
            except Exception:  # whatever it is, the others go on
                traceback.print_exc()
                lab.close()
                broken.append(task)
                continue
            tasks[task] = {**circumstances(SEED), "figures": figures}
            write(args.name, results, SEED, args.folder)
            for name, figure in by_name({task: tasks[task]}).items():
                beside = (
                    {FLOOR: figure[FLOOR]} if FLOOR in figure else wanted.get(name, {})
                )
                beside |= {"baseline": before[name]["median"]} if name in before else {}
                text = ", ".join(
                    f"{k} {number(v)}: {ratio(figure, v)}x" for k, v in beside.items()
                )
                print(f"{name:52} {measured(figure):36} {text}", flush=True)
        lab.close()
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


if __name__ == "__main__":
    known = sorted(set().union(*PARTS.values()))
    run(
        "gpu",
        measure,
        {
            "--parts": {
                "nargs": "+",
                "choices": known,
                "default": (),
                "help": ", ".join(known),
            },
            "--report": {
                "action": "store_true",
                "help": "only fill bench/README.md, and draw",
            },
        },
    )
