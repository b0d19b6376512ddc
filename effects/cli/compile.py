"""`minfer compile`: all kernels that serving a model can need, made before, and without
the GPU that they are for.
"""

import argparse
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import evolve
from tqdm import tqdm

from minfer.effects.cli.options import engine_options
from minfer.effects.setup.device import OLDEST
from minfer.effects.setup.memory import size_text
from minfer.effects.setup.prepare import Setup, prepare
from minfer.effects.setup.settings import EngineArgs, engine_args
from minfer.setting import ConfigError

if TYPE_CHECKING:
    from minfer.kernels.ahead import Made

DESCRIPTION: Final = (
    "Compile all kernels that serving a model on a GPU can need, and keep them on disk. "
    "No GPU is needed: a container image or another machine can bring them along, and "
    "then nothing is compiled at start. They serve the same model, with the same engine "
    "settings, under the same versions of minfer and Triton."
)
NOT_MADE: Final = 1  # exit code
# Bytes and blocks of a GPU that is not there: whatever fits, kernels are the same.
ROOM: Final = 1 << 43
BLOCKS: Final = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer compile` takes."""
    parser.add_argument(
        "--target",
        nargs="+",
        type=capability_of,
        metavar="sm_NN",
        help="compute capability of the GPUs: sm_80 (A100), sm_89 (L4, L40), sm_90 "
        "(H100, H200), sm_100 (B200), ... (default: that of the GPU here)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for what is compiled, which the environment's TRITON_CACHE_DIR is "
        "to name when it is used (default: where Triton looks anyway, ~/.triton/cache)",
    )
    engine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compile for each target; returns the exit code."""
    if options.output is not None:
        os.environ["TRITON_CACHE_DIR"] = str(options.output.resolve())
    if find_spec("triton") is None:
        raise ConfigError("there is no Triton here: pip install triton (on Linux)")
    targets = options.target or [_here()]
    setup = _setup(engine_args(options, streaming=True))
    codes = [_compile(setup, target) for target in targets]
    return max(codes)


def capability_of(text: str) -> tuple[int, int]:
    """A compute capability by its name: sm_90 is (9, 0). Raises ArgumentTypeError."""
    found = re.fullmatch(r"sm_?(\d+)(\d)[af]?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no target such as sm_90")
    capability = int(found[1]), int(found[2])
    if capability < OLDEST:
        major, minor = OLDEST
        raise argparse.ArgumentTypeError(
            f"{text} is too old: minfer's kernels need sm_{major}{minor} or later"
        )
    return capability


def _here() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here: say which one is meant, --target sm_90")
    return torch.cuda.get_device_capability()


def _setup(args: EngineArgs) -> Setup:
    """The engine's sizes, on a GPU that has room. Raises what `prepare` does."""
    if args.device == "cpu":
        raise ConfigError("nothing is compiled for the CPU: leave --device out")
    setup = prepare(evolve(args, device="cuda"), limit=ROOM)
    blocks = min(setup.config.num_blocks, BLOCKS)
    return evolve(setup, config=evolve(setup.config, num_blocks=blocks, watermark=0))


def _compile(setup: Setup, target: tuple[int, int]) -> int:
    """Compile for one target, and say so; returns the exit code."""
    from triton import __version__, knobs

    from minfer.effects.execution.needs import needed
    from minfer.kernels.ahead import cache_folder, make
    from minfer.kernels.launchers import build_launchers

    if knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET=1 compiles nothing: unset it")
    name = "sm_{}{}".format(*target)
    wanted = needed(setup.spec, setup.config, target)
    with tqdm(total=len(wanted), desc=name, unit=" kernels", disable=None) as bar:
        made = make(wanted, target=target, told=lambda *_: bar.update() and None)
    folder = cache_folder()
    print(f"{name}: {_found(made)}, {size_text(_bytes(folder))} in {folder}")
    print(f"for minfer with Triton {__version__} and the same engine settings")
    if why := build_launchers(made.kernels):
        print(f"minfer: a C compiler is needed at start: {why}", file=sys.stderr)
    for failed in made.failed:
        print(f"minfer: not compiled: {failed}", file=sys.stderr)
    return NOT_MADE if made.failed else 0


def _found(made: "Made") -> str:
    return (
        f"{made.wanted} kernels are needed, {made.compiled} of them were compiled in "
        f"{made.seconds:.1f} s"
    )


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
