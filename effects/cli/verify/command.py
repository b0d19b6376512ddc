"""`minfer verify`: checks a model on this machine, by comparison with transformers."""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from attrs import asdict

from minfer.effects.cli.options import engine_options
from minfer.effects.cli.verify.findings import FAILED, Check, failed, verdict
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.engine_args import engine_args
from minfer.values.checks import ConfigError

DESCRIPTION: Final = (
    "Run a checkpoint through minfer and through transformers on this machine, compare "
    "token ids, chat template, logits and the text that they lead to, and look for "
    "damage in the checkpoint. Ends with a verdict; exit code 1 if anything failed. With "
    "--load-format dummy, random weights are compared, so that a folder without weights "
    "says whether the architecture is supported."
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--prompts",
    "--tokens",
    "--json",
    "--model",
    "--dtype",
    "--device",
    "--max-model-len",
    "--load-format",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--enforce-eager",
    "--seed",
)
MAX_COUNT: Final = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer verify`."""
    add = parser.add_argument
    add(
        "--prompts",
        type=_count,
        default=8,
        metavar="N",
        help="how many prompts to compare with (default: %(default)s)",
    )
    add(
        "--tokens",
        type=_count,
        default=24,
        metavar="N",
        help="most tokens to continue each prompt by (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the findings as JSON")
    engine_options(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to {MAX_COUNT}"
        )
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Compare, print a table and a verdict; 0 if nothing failed, else 1.

    Raises as `LLM` does.
    """
    # They import torch, transformers and tokenizers.
    from minfer.effects.cli.verify.examine import examine
    from minfer.effects.models.fallback import quiet
    from minfer.effects.text.tokenizer import TextError

    args = engine_args(options, executor="torch")
    if args.parallel.ranks > 1:
        raise ConfigError(
            "minfer verify runs the model in one process; leave --tensor-parallel-size "
            "and --pipeline-parallel-size out"
        )
    if args.attention_window is not None:
        raise ConfigError(
            "minfer verify compares with transformers, which reads all tokens; leave "
            "--attention-window out"
        )
    checks: list[Check] = []
    try:
        with quiet():
            for check in examine(args, options.prompts, options.tokens):
                checks.append(check)
                if not options.json:
                    print(
                        f"{check.name:<16} {check.state:<8} {check.figures}", flush=True
                    )
    except CheckpointError as error:
        _report([*checks, Check("loading", FAILED, str(error))], as_json=options.json)
        raise
    except TextError as error:  # a tokenizer without tokens for all texts
        checks.append(Check("texts", FAILED, str(error)))
    return _report(checks, as_json=options.json)


def _report(checks: Sequence[Check], *, as_json: bool) -> int:
    if as_json:
        listed = [asdict(check) for check in checks]
        print(json.dumps({"checks": listed, "verdict": verdict(checks)}), flush=True)
    else:
        print(f"verdict: {verdict(checks)}", flush=True)
    return 1 if failed(checks) else 0
