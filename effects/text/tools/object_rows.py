"""Formats of tool calls as JSON objects, in Python's notation, and Gemma's."""

from typing import Final

from attrs import evolve

from minfer.effects.text.tools.format import CallForm, ToolFormat
from minfer.effects.text.tools.gemma import GemmaCalls
from minfer.effects.text.tools.objects import Objects
from minfer.effects.text.tools.python_calls import PythonCalls
from minfer.effects.text.tools.thinking import COHERE_AROUND

OBJECT: Final = '{"name": "{name}", "arguments": {arguments}}'
PARAMETERS: Final = '{"name": "{name}", "parameters": {arguments}}'


def list_form(begins: str, ends: str) -> CallForm:
    """Calls as a list of objects."""
    return CallForm(begins=f"{begins}[", call=OBJECT, between=", ", ends=f"]{ends}")


def list_format(opens: str, closes: str, *signs: tuple[str, ...]) -> ToolFormat:
    """A format that has all calls as a list between two markers."""
    return ToolFormat(
        dialect=Objects(opens=(opens,), closes=closes),
        written=list_form(opens, closes),
        markers=(opens, closes),
        signs=signs or ((opens,),),
    )


def wrapped_format(
    opens: str,
    closes: str,
    *signs: tuple[str, ...],
    call: str = OBJECT,
    pad: str = "\n",
) -> ToolFormat:
    """A format that has each call between two markers."""
    return ToolFormat(
        dialect=Objects(opens=(opens,), closes=closes),
        written=CallForm(call=f"{opens}{pad}{call}{pad}{closes}", between="\n"),
        markers=(opens, closes),
        signs=signs or ((opens,),),
    )


def cohere_command() -> ToolFormat:
    """Cohere's format of models with tokens for it."""
    begins, ends = "<|START_ACTION|>", "<|END_ACTION|>"
    call = '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}'
    return ToolFormat(
        dialect=Objects(opens=(begins,), closes=ends, drops=COHERE_AROUND),
        written=CallForm(
            begins=f"{begins}[\n    ", call=call, between=",\n    ", ends=f"\n]{ends}"
        ),
        markers=(begins, ends, *COHERE_AROUND),
        signs=((begins,),),
    )


def command_r() -> ToolFormat:
    """Cohere's format before its models had tokens for it."""
    begins = "Action:\n```json\n"
    call = '{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }'
    return ToolFormat(
        dialect=Objects(opens=(begins, "Action: ```json\n"), closes="```"),
        written=CallForm(
            begins=f"{begins}[\n    ", call=call, between=",\n    ", ends="\n]```"
        ),
        signs=(("Action:", "tool_name"),),
    )


def gemma_format(call: str, ends: str, quote: str) -> ToolFormat:
    """Gemma's format, with markers of a call and the one around strings."""
    return ToolFormat(
        dialect=GemmaCalls(call=call, ends=ends, quote=quote),
        written=CallForm(call=f"{call}call:{{name}}{{arguments}}{ends}"),
        markers=(call, ends, quote),
        signs=((call,),),
    )


def python_format(
    opens: str, closes: str, *signs: tuple[str, ...], bare: bool
) -> ToolFormat:
    """A format in Python's notation; `bare`, its markers may be missing."""
    begins, ends = ("[", "]") if bare else (f"{opens}[", f"]{closes}")
    markers = [marker for marker in (opens, closes) if marker]
    return ToolFormat(
        dialect=PythonCalls(
            opens=tuple(markers[:1]), closes=tuple(markers[1:]), bare=bare
        ),
        written=CallForm(
            begins=begins, call="{name}({arguments})", between=", ", ends=ends
        ),
        markers=tuple(markers),
        signs=signs,
    )


def prefixed_list_format(marker: str, *signs: tuple[str, ...]) -> ToolFormat:
    """A format that has all calls as a list after a marker."""
    return ToolFormat(
        dialect=Objects(opens=(marker,)),
        written=list_form(marker, ""),
        markers=(marker,),
        signs=signs or ((marker,),),
    )


def gigachat() -> ToolFormat:
    """GigaChat's format, newer and older."""
    tool_format = prefixed_list_format(
        "<|function_call|>", ("<|function_call|>",), ("function call", "<|role_sep|>")
    )
    opens = ("<|function_call|>", "function call<|role_sep|>\n")
    written = CallForm(call=f"<|function_call|>{OBJECT}", between=None)
    return evolve(tool_format, dialect=Objects(opens=opens), written=written)


def internlm() -> ToolFormat:
    """InternLM's format."""
    begins, ends = "<|action_start|><|plugin|>", "<|action_end|>"
    tool_format = wrapped_format(begins, ends, call=PARAMETERS, pad="")
    return evolve(tool_format, markers=("<|action_start|>", "<|plugin|>", ends))


def minimax_m1() -> ToolFormat:
    """MiniMax M1's format: an object on each line."""
    tool_format = list_format(
        "<tool_calls>", "</tool_calls>", ("<beginning_of_sentence>", "<tool_calls>")
    )
    written = CallForm(begins="<tool_calls>\n", call=f"{OBJECT}\n", ends="</tool_calls>")
    return evolve(tool_format, written=written)


def bare_format(call: str, *signs: tuple[str, ...], tag: str = "") -> ToolFormat:
    """A format whose answers may begin with calls, without a marker."""
    return ToolFormat(
        dialect=Objects(opens=(tag,) if tag else (), bare=True),
        written=CallForm(call=call, between="; ", optional=tag)
        if tag
        else CallForm(call=call, begins="[", between=", ", ends="]", lone=True),
        markers=(tag,) if tag else (),
        signs=signs,
        specific=bool(tag),
    )
