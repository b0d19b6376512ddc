"""The command line: which commands there are, and what their errors become.

Each command is a module that says what it takes and runs it (see `Command`). It is
imported when its command is meant, and imports what is heavy when it runs: `--help`
needs no torch. Exit codes: 0; 1 if a request failed; 2 for bad arguments, settings or
checkpoints, with one line on standard error that names the thing and the remedy; 3 if
the engine, which must not, raised in a replay or a simulation; 130 after an interrupt.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, Protocol, cast

from attrs import frozen

import minfer
from minfer.config import ConfigError
from minfer.effects.cli.plugins import policies_option
from minfer.effects.models.config_reader import CheckpointError
from minfer.request import ParameterError
from minfer.runs.journal import JournalError
from minfer.runs.turns import EngineRaisedError

BAD_INPUT: Final = 2
ENGINE_RAISED: Final = 3
INTERRUPTED: Final = 130  # 128 and SIGINT, as a shell counts
READER_LEFT: Final = 141  # 128 and SIGPIPE


class Command(Protocol):
    """What the module of a command has."""

    DESCRIPTION: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Tell the parser what the command takes."""

    def run(self, options: argparse.Namespace) -> int:
        """Run it; returns the exit code."""


@frozen
class Entry:
    """A command as the list of all shows it, and the module that has it."""

    name: str
    help: str
    module: str


COMMANDS: Final = (
    Entry("generate", "continue a text", "minfer.effects.cli.generate"),
    Entry("chat", "talk with a model", "minfer.effects.cli.chat"),
    Entry("serve", "serve a model over HTTP, as OpenAI does", "minfer.effects.cli.serve"),
    Entry("plan", "show what fits into memory", "minfer.effects.cli.plan"),
    Entry(
        "verify",
        "check that a model computes here what transformers computes",
        "minfer.effects.cli.verify",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = parser().parse_args(argv)
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except EngineRaisedError as error:
        print(f"minfer: {error}", file=sys.stderr)
        return ENGINE_RAISED
    except BrokenPipeError:
        # Whoever read us has gone. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except ValueError as error:
        if not isinstance(error, _users_errors()):
            raise
        print(f"minfer: {error}", file=sys.stderr)
        return BAD_INPUT
    return code


def _users_errors() -> tuple[type[ValueError], ...]:
    """Errors that say what was wrong with what we were given."""
    from minfer.effects.live.edge import RequestError
    from minfer.effects.text.chat import ChatTemplateError

    return (
        ConfigError,
        RequestError,
        CheckpointError,
        ParameterError,
        ChatTemplateError,
        JournalError,
    )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"minfer: {message}; see {self.prog} --help\n")


class _CommandParser(_Parser):
    """The parser of a command, which learns its options when it is asked to parse."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.module = module

    def parse_known_args(  # type: ignore[override]  # a parser's overloads, all of them
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        command = cast("Command", import_module(self.module))
        self.description = command.DESCRIPTION
        command.add_options(self)
        policies_option(self, default=argparse.SUPPRESS)
        self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = _Parser(
        prog="minfer",
        description="Run a language model. Without --model, a small one that writes "
        "Python and comes with minfer: try `minfer generate`.",
        epilog="`minfer COMMAND --help` says what a command does and takes.",
    )
    version = f"minfer {minfer.__version__}"
    made.add_argument("--version", action="version", version=version)
    policies_option(made, default=None)
    commands = made.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    text = (
        "whose policies, attrs records, options and journals may then name; before "
        "the command"
    )
    parser.add_argument("--policies", type=_policies, metavar="MODULE", help=text)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        run: str, text: str, about: str, groups: list[_Options] | None = None
    ) -> None:
        """Add a command; `run` is its module, imported when it runs, and its function
        there.

        Without `groups`, its options are beside it: `NAME_options`, asked for if it is
        meant.
        """
        module, _, name = run.rpartition(".")
        added = commands.add_parser(name, help=text, description=about)
        added.set_defaults(run=run)
        if groups is None and name in argv:
            groups = [
                getattr(import_module(f"minfer.effects.{module}"), f"{name}_options")
            ]
        for add_options in groups or ():
            add_options(added)

    command(
        "cli.terminal.generate",
        "continue a text",
        "Continue a text; it is written as it comes. Ctrl-C ends it.",
        [_sampling_options, _generate_options, _engine_options, _dry_run],
    )
    command(
        "cli.terminal.chat",
        "talk with a model",
        "Talk with a model: the conversation so far is its prompt each time. Ctrl-C "
        "ends an "
        "answer, Ctrl-D the conversation.",
        [_sampling_options, _chat_options, _engine_options, _dry_run],
    )
    command(
        "serving.server.serve",
        "serve OpenAI's API over HTTP",
        "Serve a model over HTTP, as OpenAI's API does. Ctrl-C ends it.",
        [_server_options, _engine_options, _dry_run],
    )
    command(
        "cli.verify.verify",
        "compare a model's output with transformers'",
        "Run a checkpoint through minfer and through transformers on this machine and "
        "compare "
        "token ids, logits, chat template and special tokens. Exit code 1 if they "
        "differ.",
        [_verify_options, _engine_options],
    )
    command(
        "runs.replay.replay",
        "verify what a recorded engine decided",
        "Fold the engine over a journal and compare every decision with the recorded "
        "one; show "
        "the state at a turn, or change one thing there and go on.",
    )
    command(
        "runs.explain.explain",
        "say why a recorded request took as long as it did",
        "What a request waited for, who preempted it and for whom, where its prefix "
        "first "
        "missed, and where its latency went, out of a journal.",
    )
    command(
        "runs.simulate.simulate",
        "run a trace through the engine on a virtual clock",
        "Run arrivals through the real scheduler with a model of what steps cost: "
        "latencies, "
        "goodput, hits and preemptions of policies and sizes, side by side.",
    )
    command(
        "runs.view.view",
        "draw a journal as a page of HTML",
        "Write one self-contained page that shows a recorded or simulated run: "
        "sequences, "
        "blocks, batches, and the reasons of every decision.",
    )
    command(
        "cli.main.plan",
        "show what fits into memory",
        "Print the memory plan and the largest batch and context that fit. Reads "
        "config.json "
        "and loads nothing.",
        [_engine_options, _plan_options],
    )
    return parser


def _policies(module: str) -> str:
    """Have a module's classes known by their names."""
    sys.path.append(os.getcwd())
    try:
        found = vars(import_module(module))
    except Exception as error:  # whatever importing it runs into
        raise argparse.ArgumentTypeError(
            f"{module} cannot be imported: {error!r}"
        ) from None
    for one in found.values():
        if isinstance(one, type) and attrs.has(one):
            kind: Any = attrs.resolve_types(one)
            if RECORDS.setdefault(kind.__name__, kind) is not kind:
                why = (
                    f"minfer has a class {kind.__name__} of its own; give yours "
                    f"another name"
                )
                raise argparse.ArgumentTypeError(f"{module}: {why}")
            POLICIES.update({kind.__name__: kind} if hasattr(kind, "victim") else {})
    return module


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"the text to continue; - reads standard input (default: {PROMPT!r}, echoed)"
    add("prompt", nargs="?", metavar="PROMPT", help=text)
    add("--n", type=int, default=1, metavar="N", help="samples (default: %(default)s)")
    add("--echo", action="store_true", help="write the prompt first")


def _chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told before you speak"
    )
    parser.set_defaults(max_tokens=CHAT_TOKENS)


def _dry_run(parser: argparse.ArgumentParser) -> None:
    text = "plausible text at once, without loading weights"
    parser.add_argument("--dry-run", action="store_true", help=text)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    text = "plan for so much memory instead of a share of what is available here"
    parser.add_argument("--memory", type=read_bytes, metavar="BYTES", help=text)


def _server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="as --model")
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)"
    )
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model (default: its folder's name)",
    )
    add(
        "--api-key",
        default=os.environ.get("MINFER_API_KEY", ""),
        metavar="KEY",
        help="what clients must send (default: the environment's MINFER_API_KEY)",
    )
    add(
        "--max-body-size",
        type=read_bytes,
        default=2**22,
        metavar="BYTES",
        help="of a request (default: 4M)",
    )
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help="samples in line beyond which come 503s",
    )
    add("--access-log", action="store_true", help="write a line for each request")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompts",
        type=_count,
        default=8,
        metavar="N",
        help="to compare (default: %(default)s)",
    )
    add(
        "--tokens",
        type=_count,
        default=24,
        metavar="N",
        help="to continue each prompt by, at most (default: %(default)s)",
    )
    add("--json", action="store_true", help="print the findings as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000")
    return int(text)


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to write").add_argument
    add(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help="output tokens at most; 0: as many as fit (default: %(default)s)",
    )
    advice = "(default: the model's advice, or"
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 is greedy {advice} {TEMPERATURE})",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help=f"keep the likeliest tokens that hold this share {advice} {TOP_P})",
    )
    add(
        "--top-k",
        type=int,
        metavar="K",
        help=f"keep the K likeliest tokens; 0 keeps all {advice} 0)",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help=f"keep tokens at least P times as likely as the likeliest {advice} 0)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    add(
        "--stop-token-ids",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end after this token id; may be given several times",
    )
    add("--ignore-eos", action="store_true", help="go on after the end of sequence")
    add("--stats", action="store_true", help="write timings to standard error at the end")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    for setting in attrs.fields(EngineArgs):
        if setting.metadata:
            group.add_argument(f"--{setting.name.replace('_', '-')}", **setting.metadata)


def plan(options: argparse.Namespace) -> int:
    """Print the memory plan; returns the exit code."""
    setup = prepare(engine_args(options), limit=options.memory)
    more = [("device", setup.device.name)]
    if setup.device.total:
        from minfer.effects.execution.routes import Routes

        sizes = setup.config.block_size, setup.config.max_num_batched_tokens
        more += Routes.for_device(setup.spec, *sizes, setup.device.kind).described()
    print(describe(setup.memory, options.model or "bundled", more))
    return 0
