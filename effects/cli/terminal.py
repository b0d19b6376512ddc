"""`minfer generate` and `minfer chat`: a model in a terminal.

Standard output has the model's text and nothing else; all else goes to standard error.
What a model writes may contain control characters, with which a terminal can be made to
do things: on a terminal they are shown as symbols, in a file or a pipe they stay what
they are.
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from minfer.effects.cli.main import PROMPT, TEMPERATURE, TOP_P
from minfer.effects.live.edge import RequestError
from minfer.effects.live.llm import LLM
from minfer.effects.setup.options import engine_args
from minfer.effects.text.chat import ChatTemplateError
from minfer.effects.text.outputs import CompletionOutput, RequestOutput
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
    settings = _settings(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    echo = options.echo or prompt is None
    prompt = PROMPT if prompt is None else prompt
    started = time.monotonic()
    with LLM(**settings) as llm:
        loading = time.monotonic() - started
        params = sampling_params(options, llm.setup.default_params)
        with contextlib.closing(llm.stream(prompt, params)) as stream:
            output, errors = _show(stream, options.n, prompt if echo else "")
        _write("\n")
    if options.stats:
        _show_stats(output, loading)
    for error in errors:
        _say(f"the request failed: {error}")
    return 1 if errors else 0


def chat(options: argparse.Namespace) -> int:
    """Talk with a model until the input ends; returns the exit code."""
    with LLM(**_settings(options)) as llm:
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


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What to make an `LLM` with. What can be wrong is told before anything is loaded."""
    sampling_params(options, {})
    # Neither a terminal that is not Unicode nor input that is not UTF-8 may end the
    # program: what is wrong with the input, the edge says.
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
        change = getattr(
            stream, "reconfigure", None
        )  # which streams that stand in may lack
        if change is not None:
            change(errors=errors)
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    return attrs.asdict(args, recurse=False)


def sampling_params(
    options: argparse.Namespace, advice: Mapping[str, float]
) -> SamplingParams:
    """What the options say about sampling; else the model's `advice`. Raises
    ParameterError.
    """
    usual: dict[str, Any] = {"temperature": TEMPERATURE, "top_p": TOP_P, **advice}
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    )
    given = {name: getattr(options, name, None) for name in names}
    usual |= {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**usual, max_tokens=options.max_tokens or None)


def _write(text: str) -> None:
    sys.stdout.write(text.translate(_SHOWN) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(f"minfer: {text}", file=sys.stderr, flush=True)


def _show(
    stream: Iterator[RequestOutput], samples: int, prompt: str
) -> tuple[RequestOutput, list[str]]:
    """Write samples one after the other: one as it comes, while others wait for their
    turn.

    Returns the last output, and the errors of samples that failed.
    """
    waiting, ended = [""] * samples, dict[int, CompletionOutput]()
    for now in range(samples):
        if samples > 1:
            _write(f"{chr(10) if now else ''}--- sample {now} ---\n")
        _write("" if now else prompt)
        while True:
            _write(waiting[now])
            waiting[now] = ""
            if now in ended:
                break
            output = next(stream)
            for one in output.outputs:
                waiting[one.index] += one.text
                if one.finished():
                    ended[one.index] = one
    return output, [one.error for one in ended.values() if one.finish_reason == "error"]


def _show_stats(output: RequestOutput, loading: float | None = None) -> None:
    """Timings of a finished request, for people."""
    metrics, prompt = output.metrics, len(output.prompt_token_ids)
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


class _Talk:
    """A conversation. An exchange that fails is taken back; an answer that is cut short
    stays.
    """

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.options = llm, options
        self.params = sampling_params(options, llm.setup.default_params)
        system = {"role": "system", "content": options.system}
        self.begin = [] if options.system is None else [system]
        self.history = list(self.begin)
        self.failures = 0
        self.reading = False  # from a person
        self.stopped = False  # by a person

    def run(self, lines: Iterator[str]) -> None:
        """Answer line by line."""
        for line in lines:
            command = line.split()[0] if line.startswith("/") else ""
            if line.strip() == "/quit":
                return
            if command == "/clear":
                self.history = list(self.begin)
            elif command == "/undo":
                del self.history[max(len(self.begin), len(self.history) - 2) :]
            elif command == "/help":
                print(_HELP, file=sys.stderr)
            elif command:
                _say(f"no command {command!r}; /help lists them")
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
        """What Ctrl-C does: it ends an answer without unwinding anything, or
        the input.
        """
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
        with contextlib.closing(
            self.llm.stream({"prompt_token_ids": ids}, self.params)
        ) as stream:
            for output in stream:
                _write(output.outputs[0].text)
                answer += output.outputs[0].text
                if self.stopped:
                    break
        _write("" if answer.endswith("\n") else "\n")
        if output.outputs[0].finish_reason == "error":
            raise RequestError(f"the request failed: {output.outputs[0].error}")
        if len(ids) + output.metrics.output_tokens >= self.llm.setup.config.max_model_len:
            _say(f"the context is full{_ROOM}")
        if self.options.stats:
            _show_stats(output)
        return answer
