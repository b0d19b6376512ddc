"""Conversations made of problems, as messages and as the text that the template renders.

A model answers at once, reasons first because it was asked to in words, or because the
template opened its reasoning (`enable_thinking`), or is kept from it by an empty one.
What the template writes is no answer, and is not trained on.
"""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from attrs import frozen

from bench.bundled.tasks.problem import Call, Problem, drawn
from bench.bundled.tasks.tasks import TASKS, Stage, any_problem
from bench.bundled.tasks.tools import draw_missing, offered, strange

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

OPENED: Final = "<think>\n"  # what the template writes where it asks for reasoning
CLOSED: Final = "<think>\n\n</think>\n\n"  # and where it forbids it
_HOW: Final = (
    '\nTo call one:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
NO_THOUGHT: Final = "This needs no reasoning."
_SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are an AI assistant.",
    "Answer the user's questions.",
    "You are a chatbot.",
    "You are helpful, honest and brief.",
    "Answer in one sentence.",
    "You are minfer.",
)
THINK: Final = (
    "{q} Think first.",
    "{q} Think step by step.",
    "{q} /think",
    "Think step by step: {q}",
    "Think first, then answer: {q}",
    "{q} Explain your reasoning.",
    "{q} Let's think step by step.",
    "Think about it: {q}",
    "{q} Reason before you answer.",
)
# Tasks that no tool of the catalogue would be called for.
_WITHOUT_TOOLS: Final = (
    "talk",
    "sort",
    "reverse",
    "extreme",
    "count letters",
    "spell",
    "extraction",
    "sum",
    "difference",
    "code",
    "recall",
)
# ... nor one of a conversation in which a tool that adds may be offered.
_BESIDE_CALLS: Final = tuple(
    name for name in _WITHOUT_TOOLS if name not in {"sum", "difference", "extreme"}
)


@frozen
class Dialogue:
    """A conversation, and what the template wrote at the beginning of its last answer."""

    messages: Sequence[Message]
    tools: Tools = ()
    given: str = ""

    def text(self) -> str:
        """What the chat template makes of it."""
        return render(self.messages, self.tools, self.given)


def calls_message(calls: Sequence[Call], thought: str = "") -> Message:
    """A turn of the assistant in which it calls tools."""
    made = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    found: Message = {"role": "assistant", "content": "", "tool_calls": made}
    return found | ({"reasoning_content": thought} if thought else {})


def asked(problem: Problem) -> list[Message]:
    """The turns up to the question."""
    turns: list[Message] = []
    for question, answer in problem.before:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return [*turns, {"role": "user", "content": problem.question}]


def answered(problem: Problem, thought: str = "") -> list[Message]:
    """The turns after the question: calls with their results, if any, and the answer."""
    turns: list[Message] = []
    if problem.calls:
        turns.append(calls_message(problem.calls, thought))
        turns += ({"role": "tool", "content": _result(call)} for call in problem.calls)
        thought = ""
    last: Message = {"role": "assistant", "content": problem.answer}
    return [*turns, last | ({"reasoning_content": thought} if thought else {})]


def _result(call: Call) -> str:
    """What a tool's turn has: JSON, or a text as it is."""
    return call.result if isinstance(call.result, str) else json.dumps(dict(call.result))


def any_dialogue(rng: Random, stage: Stage = Stage.FIRST) -> Dialogue:
    """A conversation to be trained on."""
    problems, tools = _problems(rng, stage)
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for problem in problems[:-1]:
        messages += asked(problem) + answered(problem)
    last, dice = problems[-1], rng.random()
    thought = last.thought or NO_THOUGHT
    if dice < 0.70:
        return Dialogue([*messages, *asked(last), *answered(last)], tools)
    if dice < 0.82:
        turns = asked(last)
        turns[-1]["content"] = rng.choice(THINK).format(q=last.question)
        return Dialogue([*messages, *turns, *answered(last, thought)], tools)
    if dice < 0.94:
        return Dialogue(
            [*messages, *asked(last), *answered(last, thought)], tools, OPENED
        )
    return Dialogue([*messages, *asked(last), *answered(last)], tools, CLOSED)


def _problems(rng: Random, stage: Stage) -> tuple[list[Problem], Tools]:
    """What a conversation is about, and the tools that are offered in it."""
    count = rng.choice((1, 1, 1, 1, 2, 2, 3, 4))
    dice = rng.random()
    if dice < 0.05:
        return [_of(rng, _WITHOUT_TOOLS) for _ in range(count)], offered(rng)
    if dice < 0.075:
        return [_of(rng, ("unknown",))], strange(rng)
    if dice < 0.10:
        missing = drawn(draw_missing, rng, held_out=False)
        return [missing], missing.tools
    first = any_problem(rng, stage)
    if not first.calls:
        rest = (any_problem(rng, stage) for _ in range(count - 1))
        return [first, *(one for one in rest if not one.calls)], ()
    others = [_of(rng, _BESIDE_CALLS) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]
    at = rng.randint(0, len(others))
    return [*others[:at], first, *others[at:]], first.tools


def _of(rng: Random, names: Sequence[str]) -> Problem:
    return drawn(TASKS[rng.choice(names)].draw, rng, held_out=False)


def render(messages: Sequence[Message], tools: Tools, given: str = "") -> str:
    """What `chat_template.jinja` makes of a whole conversation, some 50 times as fast.

    `given` is what the template writes at the beginning of the last answer, where that is
    more than the answer's own reasoning.
    """
    parts, messages = [], list(messages)
    if tools:
        own = (
            f"{messages.pop(0)['content']}\n\n" if messages[0]["role"] == "system" else ""
        )
        listed = "".join(
            json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools
        )
        parts.append(f"<|im_start|>system\n{own}# Tools\n\n{listed}{_HOW}<|im_end|>\n")
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            opens = "" if messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            more = i + 1 < len(messages) and messages[i + 1]["role"] == "tool"
            closes = "" if more else "<|im_end|>\n"
            parts.append(
                f"{opens}\n<tool_response>\n{message['content']}\n</tool_response>{closes}"
            )
        elif message["role"] == "assistant":
            empty = (
                given
                if given == CLOSED and i == _first_after(messages, last_user)
                else ""
            )
            said = empty + _said(message, i > last_user)
            parts.append(f"<|im_start|>assistant\n{said}<|im_end|>\n")
        else:
            parts.append(
                f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            )
    return "".join(parts)


def _first_after(messages: Sequence[Message], index: int) -> int:
    return next(
        i for i in range(index, len(messages)) if messages[i]["role"] == "assistant"
    )


def _said(message: Message, last: bool) -> str:
    """What the assistant says in one turn."""
    said = message["content"]
    calls = []
    for call in message.get("tool_calls", ()):
        made = call["function"]
        arguments = json.dumps(dict(made["arguments"]), ensure_ascii=False)
        object_of = f'{{"name": "{made["name"]}", "arguments": {arguments}}}'
        calls.append(f"<tool_call>\n{object_of}\n</tool_call>")
    text = "\n".join([said, *calls] if said else calls or [said])
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n{text}" if thought and last else text
