"""`minfer chat`: a conversation with a model in the terminal, or through pipes."""

import argparse
import sys
from typing import Final

from minfer.effects.cli.keyboard import Keyboard
from minfer.effects.cli.options import (
    TOY,
    TOY_LIMITS,
    dry_run_option,
    engine_options,
    llm_settings,
    sampling_options,
    template_options,
)
from minfer.effects.cli.standard_streams import accept_any_text, print_message

DESCRIPTION: Final = (
    "Talk with a model, line by line: the conversation so far is its prompt each time. "
    "Ctrl-C ends an answer, Ctrl-D the conversation; /help lists what else there is. "
    f'{TOY_LIMITS} Ask it "What is 17 + 25?", "Sort 42, 7, 19, 3.", or "Write a Python '
    'function is_prime."'
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--system",
    "--chat-template",
    "--max-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--min-p",
    "--repetition-penalty",
    "--stop",
    "--stats",
    "--model",
    "--dtype",
    "--device",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--speculative-config",
    "--journal",
    "--seed",
    "--dry-run",
)
ANSWER_TOKENS: Final = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer chat`."""
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told before you speak"
    )
    template_options(parser.add_argument)
    sampling_options(parser)
    engine_options(parser)
    dry_run_option(parser)
    parser.set_defaults(max_tokens=ANSWER_TOKENS)


def run(options: argparse.Namespace) -> int:
    """Talk with a model until the input ends; returns the exit code."""
    # They import the tokenizer.
    from minfer.effects.cli.talk import Talk
    from minfer.effects.live.llm import LLM

    settings = llm_settings(options)
    accept_any_text()
    with LLM(**settings) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            # Raises, with what is missing.
            llm.render([{"role": "user", "content": "?"}])
        talk = Talk(llm, options)
        if not sys.stdin.isatty():
            talk.run(line.rstrip("\r\n") for line in sys.stdin)
            return 1 if talk.failures else 0
        print_message(f"{options.model or TOY} listens; /help tells more")
        talk.run(Keyboard(talk.stop).lines())
    return 0
