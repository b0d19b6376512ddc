"""Public chat templates, rendered by minfer and by transformers from the same messages.

    python -m bench.template_renderings FOLDER

FOLDER has a folder for each source, named by package and version, with templates as
*.jinja; none is kept here. Each is rendered for every case: plain turns, system messages,
tools, calls and their results, reasoning, switches of thinking. A case is `equal`, or has
its difference. Some follow from what minfer promises, and have a reason; those without
one are faults.
"""

import argparse
import difflib
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from bench.results import run, show
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.chat_templates import ChatOptions, ChatTemplateError, render_chat
from minfer.effects.text.system_messages import place_system_messages
from minfer.effects.text.template_probe import TemplateProbe
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers

Messages = list[dict[str, Any]]
TOKENS: Final = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
SYSTEM: Final = {"role": "system", "content": "Answer briefly."}
USER: Final = {"role": "user", "content": "How warm is it in Zürich & 東京?"}
ANSWER: Final = {"role": "assistant", "content": 'It is "warm".\n'}
NEXT: Final = {"role": "user", "content": "And tomorrow?"}
ARGUMENTS: Final = {"city": "Zürich", "days": [1, 2.5], "unit": None, "exact": True}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name, as 東京."},
                "days": {"type": "array", "items": {"type": "number"}},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "exact": {"type": "boolean", "default": False},
            },
            "required": ["city"],
        },
    },
}
NOW: Final = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS: Final = [WEATHER, NOW]
NULLABLE: Final = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "What there is.",
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"type": ["string", "null"], "enum": ["a", None]},
                "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}


def call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in an assistant's message."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, name: str, content: str) -> dict[str, Any]:
    """A tool's message."""
    key = f"call0000{number}"
    return {"role": "tool", "tool_call_id": key, "name": name, "content": content}


CALLED: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(1, "get_weather", ARGUMENTS)],
}
BOTH: Final = {
    **CALLED,
    "tool_calls": [call(1, "get_weather", {"city": "a"}), call(2, "now", {})],
}
RESULT: Final = result(1, "get_weather", '{"degrees": 21.5, "sky": "blue"}')
RESULTS: Final = [RESULT, result(2, "now", "noon")]
THOUGHT: Final = {"reasoning_content": "I need the weather."}
PARTS: Final = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}


@frozen(kw_only=True)
class Case:
    """A conversation and the options of its rendering."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(factory=dict)
    prompt: bool = True  # whether the answer is begun
    continues: bool = False
    # What minfer does otherwise on purpose, if the texts differ.
    reason: str = ""


PLACED: Final = "every system message is shown (effects/text/system_messages.py)"
NO_NULL: Final = "content that is null is left out, or empty, as the template takes it"
CASES: Final[Mapping[str, Case]] = {
    "plain": Case(messages=[USER]),
    "plain, not begun": Case(messages=[USER], prompt=False),
    "system": Case(messages=[SYSTEM, USER]),
    "several turns": Case(messages=[SYSTEM, USER, ANSWER, NEXT]),
    "continued": Case(
        messages=[USER, {"role": "assistant", "content": "It is"}],
        prompt=False,
        continues=True,
    ),
    "content in parts": Case(
        messages=[PARTS],
        reason="texts are lines where the template reads no list of them",
    ),
    "thinking on": Case(
        messages=[SYSTEM, USER], kwargs={"enable_thinking": True, "thinking": True}
    ),
    "thinking off": Case(
        messages=[SYSTEM, USER], kwargs={"enable_thinking": False, "thinking": False}
    ),
    "effort": Case(messages=[USER], kwargs={"reasoning_effort": "high"}),
    "reasoning of an earlier turn": Case(
        messages=[USER, {**ANSWER, **THOUGHT}, NEXT],
    ),
    "tools": Case(messages=[USER], tools=TOOLS),
    "tools with nulls": Case(messages=[USER], tools=[NULLABLE]),
    "system and tools": Case(messages=[SYSTEM, USER], tools=TOOLS),
    "call": Case(messages=[SYSTEM, USER, CALLED, RESULT], tools=TOOLS),
    "call without text": Case(
        messages=[USER, {**CALLED, "content": None}, RESULT],
        tools=TOOLS,
        reason=NO_NULL,
    ),
    "call with text": Case(
        messages=[USER, {**CALLED, "content": "I look."}, RESULT], tools=TOOLS
    ),
    "call with reasoning": Case(
        messages=[USER, {**CALLED, **THOUGHT}, RESULT], tools=TOOLS
    ),
    "call without arguments": Case(
        messages=[
            USER,
            {**CALLED, "tool_calls": [call(1, "now", {})]},
            result(1, "now", "noon"),
        ],
        tools=TOOLS,
    ),
    "two calls": Case(messages=[USER, BOTH, *RESULTS], tools=TOOLS),
    "call, answer and question": Case(
        messages=[SYSTEM, USER, CALLED, RESULT, ANSWER, NEXT], tools=TOOLS
    ),
    "calls without tools": Case(messages=[USER, CALLED, RESULT, ANSWER, NEXT]),
    "two system messages": Case(messages=[SYSTEM, SYSTEM, USER]),
    "late system message": Case(messages=[SYSTEM, USER, ANSWER, SYSTEM, NEXT]),
    "call with nulls": Case(
        messages=[USER, {**CALLED, "content": None}, RESULT],
        tools=[*TOOLS, NULLABLE],
        reason=NO_NULL,
    ),
}


def with_text_arguments(messages: Messages) -> Messages:
    """Messages whose arguments of calls are text, as in OpenAI's API."""
    return [
        {**message, "tool_calls": [*map(_as_text, message["tool_calls"])]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_text(one: Mapping[str, Any]) -> dict[str, Any]:
    function = one["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**one, "function": {**function, "arguments": text}}


class Pair:
    """The two tokenizers of one folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        source = bundled_folder()
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.theirs: Any = AutoTokenizer.from_pretrained(folder)
        self.ours = Tokenizer(folder)
        self.reason = ""  # of minfer's last refusal

    def expected(self, template: str, case: Case, messages: Messages) -> str | None:
        """transformers' text; None if it refuses the messages."""
        try:
            text: str = self.theirs.apply_chat_template(
                messages,
                tools=case.tools,
                chat_template=template,
                add_generation_prompt=case.prompt,
                continue_final_message=case.continues,
                tokenize=False,
                **case.kwargs,
            )
        except Exception:  # of the template, which is a program
            return None
        return text

    def rendered(self, template: str, case: Case, messages: Messages) -> str | None:
        """minfer's text; None if it refuses the messages: `reason` is its error."""
        how: ChatOptions = {
            "tools": case.tools,
            "add_generation_prompt": case.prompt,
            "continue_final_message": case.continues,
            "chat_template_kwargs": case.kwargs,
        }
        try:
            return render_chat(self.ours.with_template(template), messages, how)
        except ChatTemplateError as error:
            self.reason = str(error)
            return None

    def compare(self, template: str, case: Case) -> dict[str, Any]:
        """The outcome of a case. Where transformers refuses arguments as objects, the
        messages have them as text.
        """
        messages = case.messages
        expected = self.expected(template, case, messages)
        if expected is None:
            texts = with_text_arguments(messages)
            expected = self.expected(template, case, texts)
        found = self.rendered(template, case, messages)
        as_sent = self.rendered(template, case, with_text_arguments(messages))
        if as_sent != found:
            return {"outcome": "differs", "with": "arguments as text"} | _difference(
                found, as_sent
            )
        if found is None and expected is None:
            return {"outcome": "both refuse", "reason": self.reason}
        if found == expected:
            return {"outcome": _EQUAL}
        if expected is None:
            return {"outcome": "transformers refuses", "reason": _EXTENDED}
        outcome = {"outcome": "differs"} | _difference(expected, found)
        reason = PLACED if self.places(template, case) else case.reason
        return outcome | ({"reason": reason} if reason else {})

    def places(self, template: str, case: Case) -> bool:
        """Whether minfer changes the system messages for this template."""
        tokens = tuple(self.ours.special_tokens.items())
        probe = TemplateProbe(template, tokens, case.tools is not None)
        return place_system_messages(case.messages, probe) != case.messages


_EXTENDED: Final = (
    "minfer tries other forms of the messages: without null, one call in each message, "
    "and system messages or user turns where the template takes them"
)
_EQUAL: Final = "equal"
_MAX_DIFFERENCE: Final = 4  # lines


def _difference(expected: str | None, found: str | None) -> dict[str, Any]:
    if found is None or expected is None:
        return {"difference": ["minfer refuses" if found is None else "only minfer"]}
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "transformers", "minfer", "", "", 0, ""
    )
    return {"difference": [line[:120] for line in lines][2 : 2 + _MAX_DIFFERENCE]}


def measure(options: argparse.Namespace) -> Mapping[str, Any]:
    """Render all templates; returns the outcomes."""
    templates = []
    seen = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        for path in sorted(options.templates.rglob("*.jinja")):
            text = path.read_text("utf-8")
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
            parsers = Parsers().settled(text)
            cases = {name: pair.compare(text, case) for name, case in CASES.items()}
            templates.append(
                {
                    "name": path.name,
                    "source": path.relative_to(options.templates).parts[0],
                    "sha256": digest,
                    "tool_call_parser": parsers.tools,
                    "reasoning_parser": parsers.reasoning,
                    "equal": [o["outcome"] for o in cases.values()].count(_EQUAL),
                    "others": {
                        name: outcome
                        for name, outcome in cases.items()
                        if outcome["outcome"] != _EQUAL
                    },
                }
            )
    outcomes = Counter(
        _kind(outcome)
        for template in templates
        for outcome in template["others"].values()
    )
    outcomes[_EQUAL] = sum(template["equal"] for template in templates)
    show({"templates": len(templates), **outcomes})
    return {
        "templates": len(templates),
        "cases": list(CASES),
        "outcomes": dict(outcomes),
        "by_template": templates,
    }


def _kind(outcome: Mapping[str, Any]) -> str:
    reason = ", with a reason" if "reason" in outcome else ", without a reason"
    return f"{outcome['outcome']}{reason}"


if __name__ == "__main__":
    run(
        "template_renderings",
        measure,
        {"templates": {"type": Path, "metavar": "FOLDER"}},
    )
