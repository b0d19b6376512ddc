"""`minfer generate` and `minfer chat`: a model in a terminal.

Standard output has the model's text and nothing else; all else goes to standard error. What a
model writes may contain control characters, with which a terminal can be made to do things: on a
terminal they are shown as symbols, in a file or a pipe they stay what they are.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from minfer.effects.chat import ChatTemplateError
from minfer.effects.cli import PROMPT, TEMPERATURE, TOP_P, engine_args
from minfer.effects.edge import RequestError
from minfer.effects.llm import LLM
from minfer.effects.outputs import RequestOutput
from minfer.request import SamplingParams

# Control characters and what stands for them: C0 but tab and newline, DEL, C1.
_SHOWN: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SHOWN.update({127: 0x2421, **dict.fromkeys(range(128, 160), 0xFFFD)})
_HELP: Final = """\
/clear  forget the conversation, but not --system
/undo   take back the last message and its answer
/quit   leave; Ctrl-D does too, and Ctrl-C only ends an answer
A message that begins with / needs a space before it."""
_ROOM: Final = "; /undo takes the last exchange back, /clear starts anew"


def generate(options: argparse.Namespace) -> int:
    """Continue a text, written as it comes; returns the exit code."""
    sampling_params(options, {})  # numbers out of range are told before anything is loaded
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    prompt = PROMPT if options.prompt is None else options.prompt
    _forgive_encodings()
    if prompt == "-":
        prompt = sys.stdin.read()

    started = time.monotonic()
    with LLM(**attrs.asdict(args, recurse=False)) as llm:
        loaded = time.monotonic()
        stream = llm.stream(prompt, sampling_params(options, llm.setup.default_params))
        screen = _Screen(options.n)
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


def sampling_params(options: argparse.Namespace, advice: Mapping[str, float]) -> SamplingParams:
    """What the options say about sampling; else the model's `advice`. Raises ParameterError."""
    usual: dict[str, Any] = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0, **advice}
    given = {name: getattr(options, name) for name in usual}
    return SamplingParams(
        **{name: usual[name] if value is None else value for name, value in given.items()},
        n=getattr(options, "n", 1),
        max_tokens=options.max_tokens or None,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def _forgive_encodings() -> None:
    """Let neither a terminal that is not Unicode nor input that is not UTF-8 end the program."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        change = getattr(stream, "reconfigure", None)  # which streams that stand in may lack
        if change is not None:
            change(errors=errors)  # what is wrong with the input, the edge says


class _Screen:
    """Standard output: one sample is written as it comes, the others wait for their turn."""

    def __init__(self, samples: int) -> None:
        self.waiting = [""] * samples
        self.ended = [False] * samples
        self.now = 0  # the sample that is being written
        self.errors: list[str] = []
        self._head()

    def write(self, text: str) -> None:
        sys.stdout.write(text.translate(_SHOWN) if sys.stdout.isatty() else text)
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


def _stats(output: RequestOutput, loading: float | None = None) -> str:
    """Timings of a finished request, for people."""
    metrics, prompt = output.metrics, len(output.prompt_token_ids)
    lines = [] if loading is None else [f"loading       {loading:.2f} s"]
    lines += [
        f"prompt        {prompt} tokens, {output.num_cached_tokens} of them cached",
        f"output        {metrics.output_tokens} tokens",
    ]
    if metrics.ttft is not None and metrics.latency is not None:
        lines.append(f"first token   {metrics.ttft * 1000:.1f} ms")
        lines.append(f"in all        {metrics.latency:.2f} s")
    if metrics.tpot:
        lines.append(f"after first   {1 / metrics.tpot:.1f} tokens/s")
    return "\n".join(lines)


def chat(options: argparse.Namespace) -> int:
    """Talk with a model until the input ends; returns the exit code."""
    sampling_params(options, {})
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    _forgive_encodings()
    with LLM(**attrs.asdict(args, recurse=False)) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            llm.render([{"role": "user", "content": "?"}])  # which says what is missing
        talk = _Talk(llm, options)
        if not sys.stdin.isatty():
            talk.run(line.rstrip("\r\n") for line in sys.stdin)
            return 1 if talk.failures else 0
        _say(f"{options.model or 'the bundled model'} listens; /help tells more")
        signal.signal(signal.SIGINT, talk.interrupt)
        talk.run(talk.typed())
    return 0


def _say(text: str) -> None:
    print(f"minfer: {text}", file=sys.stderr, flush=True)


class _Talk:
    """A conversation. An exchange that fails is taken back; an answer that is cut short stays."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.options, self.screen = llm, options, _Screen(1)
        self.params = sampling_params(options, llm.setup.default_params)
        system = options.system
        self.begin = [] if system is None else [{"role": "system", "content": system}]
        self.history = list(self.begin)
        self.failures = 0
        self.reading = False  # from a person
        self.stopped = False  # by a person

    def run(self, lines: Iterator[str]) -> None:
        """Answer line by line."""
        for line in lines:
            if line.strip() == "/quit":
                return
            if line.startswith("/"):
                self._command(line.split()[0])
            elif line.strip():
                self._answer(line)

    def typed(self) -> Iterator[str]:
        """Lines from a person, with the terminal's line editing where there is one."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - from now on `input` has it
        interrupted = False
        while True:
            self.reading = True
            try:
                line = input("> " if sys.stdout.isatty() else "")
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if interrupted:
                    raise
                interrupted = True
                _say("Ctrl-C again leaves, as Ctrl-D does")
            else:
                self.reading = interrupted = False
                yield line

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C does: it ends an answer without unwinding anything, or the input."""
        if self.reading:
            raise KeyboardInterrupt
        self.stopped = True
        self.llm.worker.cancel(list(self.llm.worker.jobs))

    def _answer(self, message: str) -> None:
        self.history.append({"role": "user", "content": message})
        answer = ""
        try:
            answer = self._stream(self.llm.render(self.history))
        except (RequestError, ChatTemplateError) as error:
            self.failures += 1
            _say(f"{error}{_ROOM if len(self.history) > len(self.begin) + 1 else ''}")
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            self.history.pop()  # many templates want the two to take turns

    def _stream(self, ids: list[int]) -> str:
        """Write the answer as it comes; returns its text. Raises RequestError."""
        self.stopped, answer = False, ""
        with contextlib.closing(self.llm.stream({"prompt_token_ids": ids}, self.params)) as stream:
            for output in stream:
                self.screen.write(output.outputs[0].text)
                answer += output.outputs[0].text
                if self.stopped:
                    break
        self.screen.write("" if answer.endswith("\n") else "\n")
        if output.outputs[0].finish_reason == "error":
            raise RequestError(f"the request failed: {output.outputs[0].error}")
        if len(ids) + output.metrics.output_tokens >= self.llm.setup.config.max_model_len:
            _say(f"the context is full{_ROOM}")
        if self.options.stats:
            print(_stats(output), file=sys.stderr)
        return answer

    def _command(self, name: str) -> None:
        if name == "/clear":
            self.history = list(self.begin)
        elif name == "/undo":
            del self.history[max(len(self.begin), len(self.history) - 2) :]
        elif name == "/help":
            print(_HELP, file=sys.stderr)
        else:
            _say(f"no command {name!r}; /help lists them")
