"""The variables by which a chat template turns thinking on and off, and sets its effort.

Templates have various names for them. A probe is rendered with each value: a variable
that the template does not read does not change the text.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.chat_templates import chosen_template
from minfer.effects.text.template_cache import cached_by_template
from minfer.effects.text.template_messages import Message
from minfer.effects.text.template_probe import TemplateProbe
from minfer.effects.text.tokenizer import Tokenizer

Variables = Mapping[str, Any]
# Qwen, GLM and others; Granite, DeepSeek and Kimi; MiniMax; Seed-OSS.
_ON: Final[Variables] = {
    "enable_thinking": True,
    "thinking": True,
    "thinking_mode": "enabled",
}
_OFF: Final[Variables] = {
    "enable_thinking": False,
    "thinking": False,
    "thinking_mode": "disabled",
    "thinking_budget": 0,
}
_EFFORT_NAMES: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_EFFORT: Final = ("none", "no_think")  # efforts that turn thinking off
# By requested effort: the efforts to try, until the template does not refuse one.
_EFFORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "low": ("low", "minimal", "high"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "medium", "max"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
_CHAT: Final[list[Message]] = [{"role": "user", "content": "probe of a question"}]
_UNKNOWN_EFFORT: Final = "probe-of-an-effort"


@frozen(kw_only=True)
class TemplateSwitches:
    """The variables of one template."""

    on: Variables | None  # that make the model think; None: there are none
    off: Variables | None  # that make it answer at once; None: there are none
    efforts: Mapping[str, Variables]  # by effort; empty: it reads none


def template_switches(tokenizer: Tokenizer, *, tools: bool) -> TemplateSwitches:
    """The switches of a tokenizer's template. Raises ChatTemplateError without one."""
    template = chosen_template(tokenizer, with_tools=tools)
    tokens = tuple(tokenizer.special_tokens.items())
    return _find_switches(TemplateProbe(template, tokens, tools))


@cached_by_template
def _find_switches(probe: TemplateProbe) -> TemplateSwitches:
    efforts = _find_efforts(probe)
    if probe.text(_CHAT, _ON) != probe.text(_CHAT, _OFF):
        return TemplateSwitches(on=_ON, off=_OFF, efforts=efforts)
    off = next(
        (
            variables
            for variables in map(_effort_variables, _NO_EFFORT)
            if _turns_off(probe, variables)
        ),
        None,
    )
    on = None if off is None else _effort_variables("high")
    return TemplateSwitches(on=on, off=off, efforts=efforts)


def _find_efforts(probe: TemplateProbe) -> Mapping[str, Variables]:
    texts = {
        effort: probe.text(_CHAT, {**_ON, **_effort_variables(effort)})
        for effort in dict.fromkeys(name for names in _EFFORTS.values() for name in names)
    }
    if len({text for text in texts.values() if text is not None}) < 2:
        return {}
    accepted = {
        effort: next((name for name in names if texts[name] is not None), None)
        for effort, names in _EFFORTS.items()
    }
    return {
        effort: _effort_variables(name)
        for effort, name in accepted.items()
        if name is not None
    }


def _turns_off(probe: TemplateProbe, variables: Variables) -> bool:
    """Whether an effort does more than appear as a word in the prompt, and renders
    otherwise than a high effort.
    """
    text = probe.text(_CHAT, variables)
    if text is None or text == probe.text(_CHAT, _effort_variables("high")):
        return False
    word = next(iter(variables.values()))
    unknown_text = probe.text(_CHAT, _effort_variables(_UNKNOWN_EFFORT))
    return unknown_text is None or unknown_text.replace(_UNKNOWN_EFFORT, word) != text


def _effort_variables(effort: str) -> Variables:
    return dict.fromkeys(_EFFORT_NAMES, effort)
