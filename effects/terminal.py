"""`minfer generate` and `minfer chat`: a model in a terminal."""

import argparse
import sys
import time

import attrs

from minfer.effects.cli import PROMPT, engine_args
from minfer.effects.llm import LLM
from minfer.effects.outputs import RequestOutput
from minfer.request import SamplingParams


def generate(options: argparse.Namespace) -> int:
    """Continue a text, written as it comes; returns the exit code."""
    params = sampling_params(options)
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    prompt = PROMPT if options.prompt is None else options.prompt
    if prompt == "-":
        prompt = sys.stdin.read()

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


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """What the options say about sampling. Raises ParameterError."""
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

    def show(self, output: RequestOutput) -> None:
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


def _stats(output: RequestOutput, loading: float) -> str:
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
