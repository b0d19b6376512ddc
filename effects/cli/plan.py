"""`minfer plan`: the memory of a model and its KV cache, before weights are loaded."""

import argparse
from typing import Final

from minfer.effects.cli.options import engine_options
from minfer.effects.models.checkpoint.checkpoint import skipped_tensors
from minfer.effects.models.checkpoint.stored_matrices import stored_tensor_names
from minfer.effects.models.ranks import Parallel
from minfer.effects.setup.engine_args import engine_args
from minfer.effects.setup.memory import describe
from minfer.effects.setup.option_values import read_bytes
from minfer.effects.setup.prepare import Setup, prepare
from minfer.values.texts import counted

DESCRIPTION: Final = (
    "Show how much memory a model needs, and how many sequences of which length fit at "
    "once. Reads config.json, or a GGUF file's metadata, and loads no weights."
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--memory",
    "--model",
    "--dtype",
    "--device",
    "--max-model-len",
    "--block-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override",
    "--speculative-config",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer plan`."""
    parser.add_argument(
        "--memory",
        type=read_bytes,
        metavar="BYTES",
        help="plan for a machine with so much memory for minfer, such as 16G (default: "
        "a share of what is available here)",
    )
    engine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the memory plan; returns the exit code."""
    setup = prepare(engine_args(options), limit=options.memory)
    details = [("device", setup.device.name), *_ranks(setup.args.parallel)]
    if skipped := skipped_tensors(setup.spec, stored_tensor_names(setup.folder)):
        details.append(("not read", skipped))
    details += [*setup.described_tiers(), *_kernels(setup)]
    print(describe(setup.memory, options.model or "bundled", details))
    return 0


def _ranks(parallel: Parallel) -> list[tuple[str, str]]:
    """The layout of several ranks; sizes are of each of them."""
    if parallel.ranks == 1:
        return []
    layout = f"{counted(parallel.tensor, 'rank')} with a part of each matrix"
    if parallel.by_expert:
        layout += ", of mixtures with whole experts"
    if parallel.pipeline > 1:
        layout = f"{parallel.pipeline} stages of {layout}"
    return [("ranks", layout), ("memory", "of one rank, of the largest stage")]


def _kernels(setup: Setup) -> list[tuple[str, str]]:
    """The kernels of each operation, on the GPU of this machine, or its processor."""
    if not setup.device.total:
        if setup.spec.quantization is None:
            return []
        from minfer.effects.execution.cpu.cpu_backend import describe_products

        return describe_products(setup.spec)
    from minfer.effects.execution.device.routes import Routes  # it imports torch

    return Routes.for_device(setup.spec, setup.config, setup.device.kind).described()
