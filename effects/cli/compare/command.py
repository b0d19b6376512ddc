"""`minfer compare`: levels of a model beside each other: memory, quality and speed."""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minfer.effects.cli.compare.levels import (
    DEFAULT_LEVELS,
    Level,
    levels_of,
    naming,
    prepared,
)
from minfer.effects.cli.options import engine_options
from minfer.effects.cli.standard_streams import print_message
from minfer.effects.setup.engine_args import EngineArgs, engine_args
from minfer.extras import how_to_install
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from minfer.effects.cli.compare.measure_level import MeasuredLoad
    from minfer.effects.cli.compare.report import Comparison
    from minfer.effects.setup.prepare import Setup

DESCRIPTION: Final = (
    "Run a model at several levels, one after the other, and show them beside each "
    "other: memory of weights and KV, TTFT, TPOT and throughput by batch, and on a text "
    "the perplexity, the KL divergence from the first level, which is the base, and how "
    "often both have the same likeliest token. A level is auto (the checkpoint's own "
    "dtype), a dtype, a value of --quantization, a type of KV cache (kv:fp8) or of the "
    "states of recurrent layers (state:bfloat16), or another checkpoint with the same "
    "tokenizer. Exit code 1 if a level failed."
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--levels",
    "--text",
    "--tokens",
    "--batches",
    "--input-len",
    "--output-len",
    "--json",
    "--plot",
    "--model",
    "--device",
    "--load-format",
    "--max-model-len",
    "--max-num-seqs",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--enforce-eager",
    "--seed",
)
MAX_COUNT: Final = 1 << 20
PICTURES: Final = (".png", ".svg")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer compare`."""
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="?",
        metavar="MODEL",
        help="the same as --model MODEL",
    )
    add(
        "--levels",
        nargs="+",
        metavar="LEVEL",
        default=DEFAULT_LEVELS,
        help=f"the base, and what is compared with it (default: "
        f"{' '.join(DEFAULT_LEVELS)})",
    )
    add(
        "--text",
        type=Path,
        required=True,
        metavar="FILE",
        help="the text, in UTF-8; its first --tokens are read, in windows of "
        "--max-model-len",
    )
    add("--json", type=_file, metavar="FILE", help="write all figures as JSON, too")
    add(
        "--plot",
        type=_picture,
        metavar="FILE",
        help="draw them, too, as .png or .svg; needs matplotlib",
    )
    _number_options(parser)
    engine_options(parser)


def _number_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the text's length and of the load."""
    add = parser.add_argument
    add(
        "--tokens",
        type=_count_from_two,
        default=2048,
        metavar="N",
        help="most tokens of the text; the base's probabilities take 4 bytes x "
        "vocabulary x N on disk meanwhile (default: %(default)s)",
    )
    add(
        "--batches",
        type=_count,
        nargs="+",
        default=(1, 8),
        metavar="N",
        help="how many requests arrive at once, to measure speed (default: 1 8)",
    )
    add(
        "--input-len",
        type=_count,
        default=128,
        metavar="N",
        help="prompt tokens of each of them (default: %(default)s)",
    )
    add(
        "--output-len",
        type=_count_from_two,
        default=64,
        metavar="N",
        help="output tokens of each of them, from 2 (default: %(default)s)",
    )


def _count(text: str, minimum: int = 1) -> int:
    if not text.isdecimal() or not minimum <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from {minimum} to {MAX_COUNT}"
        )
    return int(text)


def _count_from_two(text: str) -> int:
    return _count(text, 2)


def _file(text: str) -> Path:
    """Returns a file that can be written, as far as can be known."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text!r} must end with {' or '.join(PICTURES)}"
        )
    return _file(text)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table; returns the exit code. Raises as `LLM` does."""
    from minfer.effects.cli.compare.measure_level import LevelFailedError, MeasuredLoad

    if options.plot and find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {how_to_install('bench')}")
    args = _engine_args(options)
    levels = levels_of(options.levels, args)
    load = MeasuredLoad(
        batches=tuple(sorted(set(options.batches))),
        prompt=options.input_len,
        output=options.output_len,
        seed=args.seed,
    )
    setups = prepared(levels)
    _check_load(load, levels, setups)
    try:
        comparison = _compare(options, levels, setups, load)
    except LevelFailedError as error:
        print_message(str(error))
        return 1
    _write(comparison, options.json, options.plot)
    return 0


def _engine_args(options: argparse.Namespace) -> EngineArgs:
    """Returns the settings of all levels. Raises ConfigError."""
    if options.checkpoint is not None:
        if options.model is not None:
            raise ConfigError("the model is given twice: as MODEL and as --model")
        options.model = options.checkpoint
    args = engine_args(options, executor="torch")
    if args.parallel.ranks > 1:
        raise ConfigError(
            "minfer compare runs models in one process; leave --tensor-parallel-size and "
            "--pipeline-parallel-size out"
        )
    return args


def _check_load(
    load: "MeasuredLoad", levels: Sequence[Level], setups: "Sequence[Setup]"
) -> None:
    """Raise ConfigError if a level cannot serve the load at once."""
    for level, setup in zip(levels, setups, strict=True):
        with naming(level):
            sizes, tokens = setup.config, load.prompt + load.output
            if tokens > sizes.max_model_len:
                raise ConfigError(
                    f"--input-len and --output-len are {tokens} tokens together, and "
                    f"the context has {sizes.max_model_len}; lower them"
                )
            fit = setup.memory.largest_batch(tokens)
            if max(load.batches) > fit:
                raise ConfigError(
                    f"of --batches {max(load.batches)}, {fit} requests of {tokens} "
                    "tokens run at once; lower it, or raise --max-num-seqs or the size "
                    "of the KV cache"
                )


def _compare(
    options: argparse.Namespace,
    levels: Sequence[Level],
    setups: "Sequence[Setup]",
    load: "MeasuredLoad",
) -> "Comparison":
    """Measure all levels, one after the other. Raises as `measure_level`."""
    import torch

    from minfer.effects.cli.compare.measure_level import LevelFailedError, measure_level
    from minfer.effects.cli.compare.report import Comparison
    from minfer.effects.cli.compare.score_text import BaseProbabilities, check_disk
    from minfer.effects.cli.compare.text_windows import read_windows

    threads = torch.get_num_threads()
    text = read_windows(options.text, options.tokens, levels, setups)
    vocab, results = setups[0].spec.vocab_size, []
    with ExitStack() as stack:
        base = None
        if len(levels) > 1:
            check_disk(text.positions, vocab)
            folder = tempfile.TemporaryDirectory(prefix="minfer-compare-")
            place = Path(stack.enter_context(folder))
            base = BaseProbabilities.of(place, text.positions, vocab)
        for i, level in enumerate(levels):
            print_message(f"level {level.name}, {i + 1} of {len(levels)}")
            try:
                with naming(level):
                    results.append(measure_level(level, text, load, base, is_base=i == 0))
            except LevelFailedError as error:
                raise LevelFailedError(f"level {level.name}: {error}") from error
    return Comparison(
        device=setups[0].device,
        threads=threads,
        text=text,
        load=load,
        is_random=levels[0].args.load_format == "dummy",
        levels=tuple(results),
    )


def _write(
    comparison: "Comparison", json_file: Path | None, picture: Path | None
) -> None:
    """Print the table, and write the files."""
    from minfer.effects.cli.compare.report import as_json, table

    print(table(comparison), flush=True)
    if json_file is not None:
        text = json.dumps(as_json(comparison), indent=1, allow_nan=False)
        json_file.write_text(text + "\n", "utf-8")
    if picture is not None:
        from minfer.effects.cli.compare.plot import draw

        draw(comparison, picture)
