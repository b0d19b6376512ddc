"""The command line: all commands, and their exit codes.

Each command is a module that adds its options and runs the command (see `commands.py`).
It is imported only when its command is used, and imports heavy modules when it runs:
`--help` needs no torch. Exit codes are those of `minfer.effects.cli.exit_codes`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import minfer
from minfer.effects.cli.commands import CommandLineParser, Entry, add_commands
from minfer.effects.cli.exit_codes import guarded
from minfer.effects.cli.plugins import policies_option
from minfer.effects.execution.ranks.rank_folder import is_other_rank, is_rank
from minfer.effects.setup.nearest import nearest
from minfer.values.checks import ConfigError

COMMANDS: Final = (
    Entry("generate", "continue a text", "minfer.effects.cli.generate"),
    Entry("chat", "talk with a model", "minfer.effects.cli.chat"),
    Entry("serve", "serve a model over HTTP, as OpenAI does", "minfer.effects.cli.serve"),
    Entry(
        "route",
        "pass requests on to several servers",
        "minfer.effects.cli.route",
    ),
    Entry("status", "show how a running server is", "minfer.effects.cli.status"),
    Entry("plan", "show what fits into memory", "minfer.effects.cli.plan"),
    Entry(
        "verify",
        "check that a model computes here what transformers computes",
        "minfer.effects.cli.verify.command",
    ),
    Entry(
        "compare",
        "show levels of quantization beside each other",
        "minfer.effects.cli.compare.command",
    ),
    Entry(
        "quantize",
        "write a quantized checkpoint",
        "minfer.effects.cli.quantize",
    ),
    Entry(
        "replay",
        "check or change what a recorded run decided",
        "minfer.effects.cli.replay",
    ),
    Entry(
        "explain",
        "say why a recorded request took as long as it did",
        "minfer.effects.cli.explain",
    ),
    Entry("view", "draw a recorded run as a page of HTML", "minfer.effects.cli.view"),
    Entry(
        "simulate",
        "predict how a load would be served, without a model",
        "minfer.effects.cli.simulate",
    ),
)

SERVERS: Final = ("serve", "route")
REMOVED: Final = {
    "compile": "serve compiles what it needs at start, and finds it in TRITON_CACHE_DIR "
    "the next time",
    "bench": """use GuideLLM, aiperf or vLLM's own client. 64 requests of 8 clients, to
`minfer serve --model Qwen/Qwen2.5-0.5B-Instruct`, are:

  guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000 \\
    --profile kind=concurrent,streams=8 --constraint kind=max_requests,count=64 \\
    --data kind=synthetic_text,prompt_tokens=512,output_tokens=128

  aiperf profile --url http://127.0.0.1:8000 --model Qwen/Qwen2.5-0.5B-Instruct \\
    --streaming --concurrency 8 --request-count 64 --use-server-token-count \\
    --synthetic-input-tokens-mean 512 --output-tokens-mean 128 \\
    --extra-inputs ignore_eos:true

  vllm bench serve --base-url http://127.0.0.1:8000 \\
    --model Qwen/Qwen2.5-0.5B-Instruct --max-concurrency 8 --num-prompts 64 \\
    --dataset-name random --random-input-len 512 --random-output-len 128 --ignore-eos""",
}

# vLLM's commands that minfer has under another name, or not.
OF_VLLM: Final = {
    "complete": "use generate, which continues a text",
    "collect-env": "minfer plan shows the device and its memory; use that",
    "launch": "use serve",
    "run-batch": "use LLM.generate in Python, or send the requests to minfer serve",
}
_MIN_SIMILARITY: Final = 0.6  # of words as short as commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""

    def run() -> int:
        arguments = sys.argv[1:] if argv is None else argv
        command = _command(arguments)
        if command in SERVERS and argv is None:
            # Set before imports and loading, which take seconds. Until the server runs
            # and handles the signal itself, the process can end at once.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        if is_rank():
            from minfer.effects.net.child import begin_as_child

            begin_as_child()
        if is_other_rank():  # whatever the command: rank 0 says what to do
            from minfer.effects.live.engine.ranks import follow_rank_0

            os._exit(follow_rank_0())  # threads may wait for rank 0
        _check_command(command)
        options = parser().parse_args(arguments)
        code: int = options.run(options)
        return code

    return guarded(run)


def _check_command(command: str) -> None:
    """Raise ConfigError for a command that there is not, with what would do."""
    if command in REMOVED:
        raise ConfigError(f"{command} was removed: {REMOVED[command]}")
    if command in OF_VLLM:
        raise ConfigError(f"there is no command {command}: {OF_VLLM[command]}")
    names = [entry.name for entry in COMMANDS]
    if command and command not in names:
        near = nearest(command, names, _MIN_SIMILARITY)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
        raise ConfigError(f"there is no command {command!r:.80}; {hint}")


def _command(arguments: Sequence[str]) -> str:
    """The first argument that is neither an option nor an option's value."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        if len(word) > 2 and "--policies".startswith(word):  # as argparse reads it
            next(words, None)
    return ""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    command_line = CommandLineParser(
        prog="minfer",
        description="Run a language model. Without --model, the bundled one, a "
        "toy that shows that the engine works: try `minfer generate`.",
        epilog="`minfer COMMAND --help` says what a command does and takes, "
        "and --help-all names its rare options, too.",
    )
    version = f"minfer {minfer.__version__}"
    command_line.add_argument("--version", action="version", version=version)
    policies_option(command_line, default=None)
    add_commands(command_line, COMMANDS)
    return command_line
