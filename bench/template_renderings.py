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

from bench.results import run, show
from bench.template_cases import CASES, PLACED, Case, Messages, with_text_arguments
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.chat_templates import ChatOptions, ChatTemplateError, render_chat
from minfer.effects.text.system_messages import place_system_messages
from minfer.effects.text.template_probe import TemplateProbe
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.formats import Parsers

TOKENS: Final = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


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
        options: ChatOptions = {
            "tools": case.tools,
            "add_generation_prompt": case.prompt,
            "continue_final_message": case.continues,
            "chat_template_kwargs": case.kwargs,
        }
        try:
            return render_chat(self.ours.with_template(template), messages, options)
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
        rendered = self.rendered(template, case, messages)
        as_sent = self.rendered(template, case, with_text_arguments(messages))
        if as_sent != rendered:
            return {"outcome": "differs", "with": "arguments as text"} | _difference(
                rendered, as_sent
            )
        if rendered is None and expected is None:
            return {"outcome": "both refuse", "reason": self.reason}
        if rendered == expected:
            return {"outcome": _EQUAL}
        if expected is None:
            return {"outcome": "transformers refuses", "reason": _EXTENDED}
        outcome = {"outcome": "differs"} | _difference(expected, rendered)
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


def _difference(expected: str | None, rendered: str | None) -> dict[str, Any]:
    if rendered is None or expected is None:
        return {"difference": ["minfer refuses" if rendered is None else "only minfer"]}
    lines = difflib.unified_diff(
        expected.splitlines(),
        rendered.splitlines(),
        "transformers",
        "minfer",
        "",
        "",
        0,
        "",
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
            parsers = Parsers().resolve(text)
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
