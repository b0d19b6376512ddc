"""The command line: its options, and which function runs each command.

Nothing heavy is imported before the arguments are known to be good: `--help` needs no torch.
Exit codes: 0; 1 if a request failed; 2 for bad arguments, settings or checkpoints, with one line
on standard error that names the thing and the remedy; 130 after an interrupt.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

import minfer

if TYPE_CHECKING:
    from minfer.effects.options import EngineArgs

# Defaults under which the bundled model shows what it can do.
PROMPT: Final = "def read_lines(path"
MAX_TOKENS: Final = 128
CHAT_TOKENS: Final = 512  # of an answer
TEMPERATURE: Final = 0.7
TOP_P: Final = 0.9
_DECIMAL: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read us has gone. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        if not _is_users(error):
            raise
        print(f"minfer: {error}", file=sys.stderr)
        return 2
    return code


def _is_users(error: ValueError) -> bool:
    """Whether an error is about what the user gave us, and says so in its message."""
    from minfer.config import ConfigError
    from minfer.effects.chat import ChatTemplateError
    from minfer.effects.edge import RequestError
    from minfer.effects.spec import CheckpointError
    from minfer.request import ParameterError

    users = ConfigError | RequestError | CheckpointError | ParameterError | ChatTemplateError
    return isinstance(error, users)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"minfer: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="minfer", description="Run a language model. Without --model, a small one that writes "
        "Python and comes with minfer.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"minfer {minfer.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _writing(commands)
    _running(commands)
    return parser


def _writing(commands: Any) -> None:
    """The commands that write text in a terminal."""
    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Continue a text; it is written as it comes. Ctrl-C ends it.",
    )
    generate.add_argument(
        "prompt", nargs="?", metavar="PROMPT",
        help=f"the text to continue; - reads standard input (default: {PROMPT!r}, echoed)",
    )  # fmt: skip
    _sampling_options(generate)
    generate.add_argument("--n", type=int, default=1, metavar="N",
                          help="samples (default: %(default)s)")  # fmt: skip
    generate.add_argument("--echo", action="store_true", help="write the prompt first")
    _engine_options(generate)
    _dry_run(generate)
    generate.set_defaults(run=_lazily("terminal", "generate"))
    chat = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model: the conversation so far is its prompt each time. Ctrl-C "
        "ends an answer, Ctrl-D the conversation.",
    )
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before you speak")
    _sampling_options(chat)
    chat.set_defaults(max_tokens=CHAT_TOKENS)
    _engine_options(chat)
    _dry_run(chat)
    chat.set_defaults(run=_lazily("terminal", "chat"))


def _running(commands: Any) -> None:
    """The commands that serve a model, or say what is to be expected of it."""
    serve = commands.add_parser(
        "serve",
        help="serve OpenAI's API over HTTP",
        description="Serve a model over HTTP, as OpenAI's API does. Ctrl-C ends it.",
    )
    serve.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="as --model")
    _server_options(serve)
    _engine_options(serve)
    _dry_run(serve)
    serve.set_defaults(run=_lazily("server", "serve"))
    verify = commands.add_parser(
        "verify",
        help="compare a model's output with transformers'",
        description="Run a checkpoint through minfer and through transformers on this machine and "
        "compare token ids, logits, chat template and special tokens. Exit code 1 if they differ.",
    )
    _verify_options(verify)
    _engine_options(verify)
    verify.set_defaults(run=_lazily("verify", "verify"))
    plan = commands.add_parser(
        "plan",
        help="show what fits into memory",
        description="Print the memory plan and the largest batch and context that fit. Reads "
        "config.json and loads nothing.",
    )
    _engine_options(plan)
    plan.add_argument(
        "--memory", type=_bytes, metavar="BYTES",
        help="plan for so much memory instead of a share of what is available here",
    )  # fmt: skip
    plan.set_defaults(run=_plan)


def _lazily(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """A command whose module is imported when it runs."""

    def run(options: argparse.Namespace) -> int:
        command = getattr(import_module(f"minfer.effects.{module}"), name)
        code: int = command(options)
        return code

    return run


def _dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="plausible text at once, without loading weights"
    )


def _server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--served-model-name", nargs="+", metavar="NAME",
        help="what clients call the model (default: its folder's name)")  # fmt: skip
    add("--api-key", default=os.environ.get("MINFER_API_KEY", ""), metavar="KEY",
        help="what clients must send (default: the environment's MINFER_API_KEY)")  # fmt: skip
    add("--max-body-size", type=_bytes, default=2**22, metavar="BYTES",
        help="of a request (default: 4M)")  # fmt: skip
    add("--max-waiting", type=int, metavar="N", help="samples in line beyond which come 503s")
    add("--access-log", action="store_true", help="write a line for each request")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=_count, default=8, metavar="N", help="to compare (default: %(default)s)")
    add("--tokens", type=_count, default=24, metavar="N",
        help="to continue each prompt by, at most (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print the findings as JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1000")
    return int(text)


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to write")
    add = group.add_argument
    add("--max-tokens", type=int, default=MAX_TOKENS, metavar="N",
        help="output tokens at most; 0: as many as fit (default: %(default)s)")  # fmt: skip
    advice = "(default: the model's advice, or"
    add("--temperature", type=float, metavar="T", help=f"0 is greedy {advice} {TEMPERATURE})")
    add("--top-p", type=float, metavar="P",
        help=f"keep the likeliest tokens that hold this share {advice} {TOP_P})")  # fmt: skip
    add("--top-k", type=int, metavar="K",
        help=f"keep the K likeliest tokens; 0 keeps all {advice} 0)")  # fmt: skip
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times")  # fmt: skip
    add("--stop-token-ids", type=int, action="append", default=[], metavar="ID",
        help="end after this token id; may be given several times")  # fmt: skip
    add("--ignore-eos", action="store_true", help="go on after the end of sequence")
    add("--stats", action="store_true", help="write timings to standard error at the end")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    add = group.add_argument
    add("--model", metavar="MODEL",
        help="a Hugging Face checkpoint: its folder, or its name on the hub, such as org/name or "
        "org/name@revision (default: the bundled model)")  # fmt: skip
    add("--dtype", default="auto", metavar="TYPE",
        help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")  # fmt: skip
    add("--load-format", default="auto", choices=("auto", "dummy"),
        help="dummy: random weights, from config.json alone")  # fmt: skip
    add("--max-model-len", type=int, metavar="N",
        help="tokens of prompt and output together (default: the model's)")  # fmt: skip
    add("--block-size", type=int, metavar="N", help="tokens of a KV block (default: 64)")
    add("--max-num-seqs", type=int, metavar="N", help="sequences that run at once (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (default: 2048)")
    add("--gpu-memory-utilization", type=float, metavar="SHARE",
        help="share of the memory that may be used; on the CPU, of what is available")  # fmt: skip
    add("--kv-cache-memory-bytes", type=_bytes, metavar="BYTES",
        help="size of the KV cache, such as 512M or 2G; overrides the share")  # fmt: skip
    add("--num-gpu-blocks-override", type=int, metavar="N",
        help="number of KV blocks, on whatever device; overrides both")  # fmt: skip
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="keep the KV of prompts for those that begin alike (default: yes)")  # fmt: skip
    add("--scheduling-policy", metavar="NAME",
        help="who goes first: fcfs, priority, ageing, deadline, shortest, fair, window or static, "
        "with options as in ageing:seconds=5 (default: fcfs)")  # fmt: skip
    add("--steps-in-flight", type=int, metavar="N", help="steps planned ahead (default: 2)")
    add("--max-repeat", type=int, metavar="N", help="decode steps in one plan (default: 1)")
    add("--seed", type=int, metavar="N", help="for all that is random (default: 0)")


def _bytes(text: str) -> int:
    """A size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x 2^30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M, 2G or 2000000000")
    number, unit = found.groups()
    return int(float(number) * (_DECIMAL | _BINARY)[unit[:1]])


def engine_args(options: argparse.Namespace, **more: Any) -> "EngineArgs":
    """The settings that were given; what was left out keeps its default."""
    import attrs

    from minfer.effects.options import EngineArgs

    names = [field.name for field in attrs.fields(EngineArgs)]
    given = {name: getattr(options, name, None) for name in names}
    return EngineArgs(**{name: value for name, value in given.items() if value is not None}, **more)


def _plan(options: argparse.Namespace) -> int:
    from minfer.effects.memory import describe
    from minfer.effects.options import prepare

    setup = prepare(engine_args(options), limit=options.memory)
    print(describe(setup.memory, options.model or "bundled"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
