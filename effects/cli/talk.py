"""A conversation with a model: its history, and the commands in its lines."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Final

from minfer.effects.cli.options import sampling_params
from minfer.effects.cli.standard_streams import print_message, show_stats, write
from minfer.effects.live.input_processing.input_processor import (
    RequestError,
    TooLongError,
)
from minfer.effects.live.llm import LLM
from minfer.effects.text.chat_templates import ChatTemplateError
from minfer.lifecycle.arrive import longest_prompt

_HELP: Final = """\
/clear  forget the conversation, but not --system
/undo   take back the last message and its answer
/quit   leave; Ctrl-D does too, and Ctrl-C only ends an answer
A message that begins with / needs a space before it."""
_FULL: Final = (
    "the context is full; /undo takes the last exchange back, /clear starts anew"
)


class Talk:
    """A conversation.

    An exchange that fails is taken back; an answer that is cut short stays.
    """

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm = llm
        self.options = options
        self.params = sampling_params(options, llm.setup.default_params)
        system = {"role": "system", "content": options.system}
        self.begin = [] if options.system is None else [system]
        self.history = list(self.begin)
        self.failures = 0
        self.stopped = False  # by the user

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
                print_message(f"no command {command!r}; /help lists them")
            elif line.strip():
                self._answer(line)

    def stop(self) -> None:
        """End the answer that is being written."""
        self.stopped = True
        self.llm.frontend.cancel()

    def _answer(self, message: str) -> None:
        self.history.append({"role": "user", "content": message})
        answer = ""
        try:
            answer = self._stream(self.llm.render(self.history))
        except (RequestError, ChatTemplateError) as error:
            self.failures += 1
            print_message(_FULL if self._is_context_full(error) else str(error))
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            self.history.pop()  # many templates require alternating roles

    def _is_context_full(self, error: RequestError | ChatTemplateError) -> bool:
        """Whether a message that failed would fit into a new conversation."""
        if not isinstance(error, TooLongError):
            return False
        try:
            shortest = self.llm.render([*self.begin, self.history[-1]])
        except (RequestError, ChatTemplateError):
            return False
        context = self.llm.setup.config.max_model_len
        return len(shortest) <= longest_prompt(context, output=True)

    def _stream(self, ids: list[int]) -> str:
        """Write the answer as it comes; returns its text. Raises RequestError."""
        self.stopped = False
        answer = ""
        prompt = {"prompt_token_ids": ids}
        with contextlib.closing(self.llm.stream(prompt, self.params)) as stream:
            for output in stream:
                write(output.outputs[0].text)
                answer += output.outputs[0].text
                if self.stopped:
                    break
        write("" if answer.endswith("\n") else "\n")
        if output.outputs[0].finish_reason == "error":
            raise RequestError(f"the request failed: {output.outputs[0].error}")
        if len(ids) + output.metrics.output_tokens >= self.llm.setup.config.max_model_len:
            print_message(_FULL)
        if self.options.stats:
            show_stats(output)
        return answer
