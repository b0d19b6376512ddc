"""Formats of tool calls with the name in a header."""

from typing import Final

from minfer.effects.text.tools.format import CallForm, ToolFormat
from minfer.effects.text.tools.headers import Headers
from minfer.effects.text.tools.object_rows import list_form
from minfer.effects.text.tools.thinking import SOLAR_AROUND


def deepseek(call: str, *signs: tuple[str, ...], between: str) -> ToolFormat:
    """DeepSeek's format up to V3.1: what is between the tokens of a call differs."""
    begin, sep, end = (f"<｜tool▁{name}｜>" for name in _DEEPSEEK_CALL)
    group, group_ends = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return ToolFormat(
        dialect=Headers(
            call=begin,
            ends=end,
            group=group,
            group_ends=group_ends,
            heads=tuple(head.replace("|", sep) for head in _DEEPSEEK_HEADS),
            others=(sep,),
        ),
        written=CallForm(
            begins=group, call=f"{begin}{call}{end}", between=between, ends=group_ends
        ),
        markers=(group, begin, sep, end, group_ends),
        signs=signs,
    )


_DEEPSEEK_HEADS: Final = (
    *("function|{name}\n```json\n", "function|{name}\n```\n"),
    *("function|{name}", "{name}|"),
)
_DEEPSEEK_CALL: Final = ("call▁begin", "sep", "call▁end")
SEP: Final = "<｜tool▁sep｜>"


def mistral() -> ToolFormat:
    """Mistral's formats: by name where the model has a token before arguments."""
    list_format = list_form("[TOOL_CALLS]{gap}", "")
    return ToolFormat(
        dialect=Headers(
            call="[TOOL_CALLS]",
            heads=("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}"),
            lists=True,
        ),
        written=CallForm(call="[TOOL_CALLS]{name}[ARGS]{arguments}"),
        older=("[ARGS]", list_format),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        # Mistral's templates take no other ids.
        prefix="",
        letters=9,
        signs=(("[TOOL_CALLS]",),),
    )


def kimi_k2() -> ToolFormat:
    """Kimi K2's format, in which the id of a call has its name."""
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    arguments = "<|tool_call_argument_begin|>"
    group, group_ends = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    heads = ("functions.{name}:{index}", "{name}:{index}", "functions.{name}", "{name}")
    return ToolFormat(
        dialect=Headers(
            call=begin,
            ends=end,
            group=group,
            group_ends=group_ends,
            heads=tuple(head + arguments for head in heads),
            others=(arguments,),
        ),
        written=CallForm(
            begins=group,
            call=f"{begin}functions.{{name}}:{{index}}{arguments}{{arguments}}{end}",
            ends=group_ends,
        ),
        markers=(group, begin, arguments, end, group_ends),
        signs=((group,), (begin,)),
    )


def solar() -> ToolFormat:
    """Solar Open's format."""
    begin, end = "<|tool_call:begin|>", "<|tool_call:end|>"
    name, arguments = "<|tool_call:name|>", "<|tool_call:args|>"
    head = f"{{id}}{name}{{name}}{arguments}"
    return ToolFormat(
        dialect=Headers(
            call=begin,
            ends=end,
            group="<|tool_calls|>",
            group_ends="<|calls|>",
            heads=(head,),
            others=(name, arguments),
            drops=SOLAR_AROUND,
        ),
        written=CallForm(
            begins="<|tool_calls|>",
            call=f"{begin}{head}{{arguments}}{end}",
            ends="<|calls|>",
            optional="<|begin|>assistant",
        ),
        markers=(
            "<|tool_calls|>",
            begin,
            name,
            arguments,
            end,
            "<|calls|>",
            *SOLAR_AROUND,
        ),
        signs=((begin,),),
    )


def functionary_31() -> ToolFormat:
    """Functionary's format of v3.1, which is Llama 3.1's for own tools."""
    return ToolFormat(
        dialect=Headers(call="<function=", heads=("{name}>",), ends="</function>"),
        written=CallForm(call="<function={name}>{arguments}</function>"),
        markers=("<function=", "</function>"),
        signs=(("<function=",),),
    )


def functionary_32() -> ToolFormat:
    """Functionary's format of v3.2, in which all that is written has a recipient."""
    return ToolFormat(
        dialect=Headers(
            call=">>>", heads=("{name}\n",), offered=True, begun=True, drops=(">>>all\n",)
        ),
        written=CallForm(call="{name}\n{arguments}", between=">>>", content="all\n"),
        signs=((">>>all",), (">>>${recipient}",)),
    )
