"""`minfer quantize`: a checkpoint's matrices rounded once, and written to a folder."""

import argparse
from pathlib import Path
from typing import Final

from minfer.effects.models.formats.write_compressed_tensors import scheme_config
from minfer.effects.models.quantization import LEVELS
from minfer.effects.setup.folders import model_folder
from minfer.values.checks import ConfigError

DESCRIPTION: Final = (
    "Round a checkpoint's matrices as --quantization does when it is loaded, and write "
    "them to a folder in the format of compressed-tensors, which minfer, vLLM and "
    "transformers read. One tensor at a time is in memory."
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
        help=f"how to round: {', '.join(_writable())}",
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
    from minfer.effects.models.quantize_checkpoint import quantize_checkpoint

    folder = model_folder(options.model)
    quantize_checkpoint(folder, options.quantization, options.output)
    print(f"wrote {options.output}")
    return 0


def _writable() -> list[str]:
    """The levels that the format has."""
    found = []
    for name, scheme in LEVELS.items():
        try:
            scheme_config(scheme)
        except ConfigError:
            continue
        found.append(name)
    return found
