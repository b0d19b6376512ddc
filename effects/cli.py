"""The command line: `minfer generate`, `minfer plan`.

Nothing heavy is imported before the arguments are known to be good: `--help` needs no torch.
Exit codes: 0; 1 if a request failed; 2 for bad arguments, settings or checkpoints, with one line
on standard error that names the thing and the remedy; 130 after an interrupt.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import minfer

if TYPE_CHECKING:
    from minfer.effects.options import EngineArgs
    from minfer.effects.outputs import RequestOutput
    from minfer.request import SamplingParams

# Defaults under which the bundled model shows what it can do.
PROMPT: Final = "def read_lines(path"
MAX_TOKENS: Final = 128
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
    from minfer.effects.edge import RequestError
    from minfer.effects.spec import CheckpointError
    from minfer.request import ParameterError

    return isinstance(error, ConfigError | RequestError | CheckpointError | ParameterError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minfer", description="Run a language model. Without --model, a small one that writes "
        "Python and comes with minfer.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"minfer {minfer.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
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
    _engine_options(generate)
    generate.add_argument(
        "--dry-run", action="store_true", help="plausible text at once, without loading weights"
    )
    generate.set_defaults(run=_generate)
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
    return parser


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to write")
    add = group.add_argument
    add("--max-tokens", type=int, default=MAX_TOKENS, metavar="N",
        help="output tokens at most; 0: as many as fit (default: %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=TEMPERATURE, metavar="T",
        help="0 is greedy (default: %(default)s)")  # fmt: skip
    add("--top-p", type=float, default=TOP_P, metavar="P",
        help="keep the likeliest tokens that hold this share (default: %(default)s)")  # fmt: skip
    add("--top-k", type=int, default=0, metavar="K",
        help="keep the K likeliest tokens; 0 keeps all (default: %(default)s)")  # fmt: skip
    add("--n", type=int, default=1, metavar="N", help="samples (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end before this text; may be given several times")  # fmt: skip
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID",
        help="end after one of these token ids")  # fmt: skip
    add("--ignore-eos", action="store_true", help="go on after the end of sequence")
    add("--echo", action="store_true", help="write the prompt first")
    add("--stats", action="store_true", help="write timings to standard error at the end")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    add = group.add_argument
    add("--model", metavar="FOLDER",
        help="a Hugging Face checkpoint folder (default: the bundled model)")  # fmt: skip
    add("--dtype", default="auto", metavar="TYPE",
        help="auto, float32, bfloat16 or float16 (default: the checkpoint's)")  # fmt: skip
    add("--load-format", default="auto", choices=("auto", "dummy"),
        help="dummy: random weights, from config.json alone")  # fmt: skip
    add("--max-model-len", type=int, metavar="N",
        help="tokens of prompt and output together (default: the model's)")  # fmt: skip
    add("--block-size", type=int, metavar="N", help="tokens of a KV block")
    add("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one forward")
    add("--gpu-memory-utilization", type=float, metavar="SHARE",
        help="share of the memory that may be used; on the CPU, of what is available")  # fmt: skip
    add("--kv-cache-memory-bytes", type=_bytes, metavar="BYTES",
        help="size of the KV cache, such as 512M or 2G; overrides the share")  # fmt: skip
    add("--num-gpu-blocks-override", type=int, metavar="N",
        help="number of KV blocks, on whatever device; overrides both")  # fmt: skip
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="keep the KV of prompts for those that begin alike (default: yes)")  # fmt: skip
    add("--scheduling-policy", choices=("fcfs", "priority"), help="who goes first (default: fcfs)")
    add("--steps-in-flight", type=int, metavar="N", help="steps planned ahead (default: 2)")
    add("--max-repeat", type=int, metavar="N", help="decode steps in one plan, at most")
    add("--seed", type=int, metavar="N", help="for all that is random (default: 0)")


def _bytes(text: str) -> int:
    """A size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x 2^30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M, 2G or 2000000000")
    number, unit = found.groups()
    return int(float(number) * (_DECIMAL | _BINARY)[unit[:1]])


def _engine_args(options: argparse.Namespace, **more: Any) -> "EngineArgs":
    """The settings that were given; what was left out keeps its default."""
    import attrs

    from minfer.effects.options import EngineArgs

    names = [field.name for field in attrs.fields(EngineArgs)]
    given = {name: getattr(options, name, None) for name in names}
    return EngineArgs(**{name: value for name, value in given.items() if value is not None}, **more)


def _plan(options: argparse.Namespace) -> int:
    from minfer.effects.memory import describe
    from minfer.effects.options import prepare

    setup = prepare(_engine_args(options), limit=options.memory)
    print(describe(setup.memory, options.model or "bundled"))
    return 0


def _generate(options: argparse.Namespace) -> int:
    params = _sampling_params(options)
    args = _engine_args(options, executor="dry" if options.dry_run else "torch")
    prompt = PROMPT if options.prompt is None else options.prompt
    if prompt == "-":
        prompt = sys.stdin.read()

    import attrs

    from minfer.effects.llm import LLM

    started = time.monotonic()
    with LLM(**attrs.asdict(args, recurse=False)) as llm:
        loaded = time.monotonic()
        stream = llm.stream(prompt, params)
        screen = _Screen(params.n)
        if options.echo or options.prompt is None:
            screen.write(prompt)
        for output in stream:
            screen.show(output)
        screen.write("\n")
    if options.stats:
        print(_stats(output, loaded - started), file=sys.stderr)
    for error in screen.errors:
        print(f"minfer: the request failed: {error}", file=sys.stderr)
    return 1 if screen.errors else 0


def _sampling_params(options: argparse.Namespace) -> "SamplingParams":
    from minfer.request import SamplingParams

    return SamplingParams(
        n=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens or None,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


class _Screen:
    """Standard output: one sample is written as it comes, the others wait for their turn."""

    def __init__(self, samples: int) -> None:
        self.waiting = [""] * samples
        self.ended = [False] * samples
        self.now = 0  # the sample that is being written
        self.errors: list[str] = []
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that is not Unicode is no reason to fail
        self._head()

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, output: "RequestOutput") -> None:
        for one in output.outputs:
            self.waiting[one.index] += one.text
            self.ended[one.index] |= one.finished()
            if one.finish_reason == "error":
                self.errors.append(one.error)
        while self.now < len(self.ended):
            self.write(self.waiting[self.now])
            self.waiting[self.now] = ""
            if not self.ended[self.now]:
                return
            self.now += 1
            self._head()

    def _head(self) -> None:
        if len(self.ended) > 1 and self.now < len(self.ended):
            self.write(f"{'' if self.now == 0 else chr(10)}--- sample {self.now} ---\n")


def _stats(output: "RequestOutput", loading: float) -> str:
    """Timings of a finished request, for people."""
    metrics, prompt = output.metrics, len(output.prompt_token_ids)
    lines = [
        f"loading       {loading:.2f} s",
        f"prompt        {prompt} tokens, {output.num_cached_tokens} of them cached",
        f"output        {metrics.output_tokens} tokens",
    ]
    if metrics.ttft is not None and metrics.latency is not None:
        lines.append(f"first token   {metrics.ttft * 1000:.1f} ms")
        lines.append(f"in all        {metrics.latency:.2f} s")
    if metrics.tpot:
        lines.append(f"after first   {1 / metrics.tpot:.1f} tokens/s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
