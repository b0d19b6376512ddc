"""`minfer quantize`: write a checkpoint with quantized matrices."""

import argparse
from pathlib import Path
from typing import Final

from minfer.effects.models.checkpoint.quantize_checkpoint import (
    WRITABLE,
    quantize_checkpoint,
)
from minfer.effects.setup.folders import model_folder

DESCRIPTION: Final = (
    "Quantize a checkpoint's matrices as --quantization does at load, and write the "
    "checkpoint to a folder in the format of compressed-tensors, which minfer, vLLM and "
    "transformers read. Only one tensor at a time is in memory."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer quantize`."""
    parser.add_argument(
        "--model",
        required=True,
        help="an unquantized Hugging Face checkpoint: its folder, or its name on the "
        "hub, such as org/name or org/name@revision",
    )
    parser.add_argument(
        "--quantization",
        required=True,
        metavar="LEVEL",
        help=f"how to quantize: {', '.join(WRITABLE)}",
    )
    parser.add_argument(
        "--output",
        "-o",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="the folder to make; it must be absent or empty",
    )


def run(options: argparse.Namespace) -> int:
    """Write the checkpoint; returns the exit code."""
    folder = model_folder(options.model)
    quantize_checkpoint(folder, options.quantization, options.output)
    print(f"wrote {options.output}")
    return 0
