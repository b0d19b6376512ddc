"""The terminal output of commands.

Standard output has the model's text and nothing else; all else goes to standard error. A
model's text may contain control characters, which can make a terminal do things: on a
terminal they are shown as symbols; in a file or a pipe they are unchanged.
"""

import io
import sys
from typing import Final

from minfer.effects.text.outputs import RequestOutput

# Control characters and what stands for them: C0 but tab and newline, DEL, C1.
_VISIBLE: Final = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    127: 0x2421,
    **dict.fromkeys(range(128, 160), 0xFFFD),
}


def write(text: str) -> None:
    """Write a piece of the model's text."""
    sys.stdout.write(text.translate(_VISIBLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_message(text: str) -> None:
    """Print a message for the user on standard error, on a line of its own."""
    print(f"minfer: {text}", file=sys.stderr, flush=True)


def accept_any_text() -> None:
    """Have no text end the program.

    Neither a terminal that is not Unicode nor input that is not UTF-8 does: errors of the
    input are for the input processor.
    """
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):  # and not a replacement of it
            stream.reconfigure(errors=errors)


def show_stats(output: RequestOutput, loading: float | None = None) -> None:
    """Write timings of a finished request, for people; `loading` in seconds."""
    metrics = output.metrics
    prompt = len(output.prompt_ids)
    stats = {
        "loading": None if loading is None else f"{loading:.2f} s",
        "prompt": f"{prompt} tokens, {output.num_cached_tokens} of them cached",
        "output": f"{metrics.output_tokens} tokens",
        "first token": None if metrics.ttft is None else f"{metrics.ttft * 1000:.1f} ms",
        "in all": None if metrics.latency is None else f"{metrics.latency:.2f} s",
        "after first": f"{1 / metrics.tpot:.1f} tokens/s" if metrics.tpot else None,
    }
    for name, value in stats.items():
        if value is not None:
            print(f"{name:<13} {value}", file=sys.stderr)
