"""`minfer generate`: a text continued in the terminal, written as it comes."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from minfer.effects.cli.options import (
    TOY,
    TOY_LIMITS,
    dry_run_option,
    engine_options,
    llm_settings,
    sampling_options,
    sampling_params,
    structured_options,
)
from minfer.effects.cli.standard_streams import (
    accept_any_text,
    print_message,
    show_stats,
    write,
)
from minfer.effects.text.outputs import CompletionOutput, RequestOutput
from minfer.records.request import ParameterError
from minfer.sampling.params import ADVISED
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from minfer.effects.live.beams.beam_search import BeamSearchParams

DESCRIPTION: Final = (
    f"Continue a text; it is written as it comes. Ctrl-C ends it. {TOY_LIMITS}"
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--n",
    "--beams",
    "--echo",
    "--max-tokens",
    "--temperature",
    "--top-p",
    "--top-k",
    "--min-p",
    "--repetition-penalty",
    "--stop",
    "--ignore-eos",
    "--stats",
    "--json-schema",
    "--regex",
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
# Options besides those of `ADVISED` that a beam search does not use.
_NOT_OF_BEAMS: Final = (
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "json_schema",
    "regex",
)
# The defaults with which the bundled model works best.
PROMPT: Final = 'def fibonacci(n):\n    """Return'
STANDARD_INPUT: Final = "-"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer generate`."""
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text to continue; - reads it from standard input (default: a few words "
        "of Python, which are shown)",
    )
    add(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="how many continuations to write (default: %(default)s)",
    )
    add(
        "--beams",
        type=int,
        metavar="K",
        help="search for the likeliest continuation with K beams, instead of drawing",
    )
    add(
        "--length-penalty",
        type=float,
        metavar="P",
        help="with --beams: above 1 favours longer continuations (default: 1)",
    )
    add("--echo", action="store_true", help="write the prompt before each continuation")
    sampling_options(parser)
    structured_options(parser)
    engine_options(parser)
    dry_run_option(parser)


def run(options: argparse.Namespace) -> int:
    """Continue a text; returns the exit code. Raises as `LLM` does."""
    from minfer.effects.live.llm import LLM  # it imports the tokenizer

    settings = llm_settings(options)
    search = _search(options)
    accept_any_text()
    prompt = _prompt(options.prompt)
    echo = options.echo or options.prompt is None
    if options.model is None and sys.stderr.isatty():
        print_message(f"loading {TOY}")
    started = time.monotonic()
    with LLM(**settings) as llm:
        loading = time.monotonic() - started
        shown = prompt if echo else ""
        if search is not None:
            (result,) = llm.beam_search(prompt, search, use_tqdm=False)
            output, errors = _show(iter([result.request]), options.n, shown)
        else:
            params = sampling_params(options, llm.setup.default_params)
            with contextlib.closing(llm.stream(prompt, params)) as stream:
                output, errors = _show(stream, options.n, shown)
        write("\n")
    if options.stats:
        show_stats(output, loading)
    for error in errors:
        print_message(f"the request failed: {error}")
    return 1 if errors else 0


def _search(options: argparse.Namespace) -> "BeamSearchParams | None":
    """The beam search of the options, if any. Raises ParameterError."""
    if options.beams is None:
        if options.length_penalty is not None:
            raise ParameterError("length_penalty", "needs --beams; leave it out")
        return None
    from minfer.effects.live.beams.beam_search import BeamSearchParams

    for name in ADVISED:
        if getattr(options, name) is not None:
            raise ParameterError(name, "does not go with --beams; leave it out")
    for name in _NOT_OF_BEAMS:
        if getattr(options, name) not in (None, 0, []):
            raise ParameterError(name, "does not go with --beams; leave it out")
    return BeamSearchParams(
        beam_width=options.beams,
        n=options.n,
        max_tokens=options.max_tokens or None,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        ignore_eos=options.ignore_eos,
    )


def _prompt(argument: str | None) -> str:
    """The text to continue. Raises ConfigError if standard input has none."""
    if argument is None:
        return PROMPT
    if argument != STANDARD_INPUT:
        return argument
    if sys.stdin.isatty():
        print_message("reads the prompt from here; Ctrl-D on a line of its own ends it")
    text = sys.stdin.read()
    if not text:
        raise ConfigError(
            "the prompt is empty, as nothing came from standard input; pipe a text into "
            "minfer generate -, or give it as PROMPT"
        )
    return text


def _show(
    stream: Iterator[RequestOutput], samples: int, prompt: str
) -> tuple[RequestOutput, list[str]]:
    """Write samples one after the other, each after `prompt`.

    One sample at a time is written as it comes, while others wait for their turn. Returns
    the last output, and the errors of samples that failed.
    """
    waiting = [""] * samples
    ended: dict[int, CompletionOutput] = {}
    for now in range(samples):
        if samples > 1:
            write(f"--- sample {now} ---\n" if now == 0 else f"\n--- sample {now} ---\n")
        write(prompt)
        while True:
            write(waiting[now])
            waiting[now] = ""
            if now in ended:
                break
            output = next(stream)
            for sample in output.outputs:
                waiting[sample.index] += sample.text
                if sample.finished():
                    ended[sample.index] = sample
    return output, [
        sample.error for sample in ended.values() if sample.finish_reason == "error"
    ]
