"""Formats of tool calls with arguments in tags."""

from typing import Final

from attrs import evolve

from minfer.effects.text.tools.format import CallForm, ToolFormat
from minfer.effects.text.tools.nested_tags import NestedTags
from minfer.effects.text.tools.tags import Tags
from minfer.effects.text.tools.thinking import KIMI_K3_AROUND


def _tagged(tags: Tags, written: CallForm | None, *signs: tuple[str, ...]) -> ToolFormat:
    """A format whose calls are in tags."""
    markers = (*tags.group, *tags.group_ends, *tags.literals, *tags.drops)
    return ToolFormat(dialect=tags, written=written, markers=markers, signs=signs)


_DSML: Final = "<｜DSML｜"
_DSML_ENDS: Final = "</｜DSML｜"


def dsml(group: str, space: str = "") -> ToolFormat:
    """DeepSeek's format from V3.2 on, with a name for its group of calls."""
    opens, closes = f"{_DSML}{space}", f"{_DSML_ENDS}{space}"
    tags = Tags(
        function=f'{opens}invoke name="{{name}}">',
        parameter=f'{opens}parameter name="{{key}}" string="{{string}}">',
        parameter_ends=f"{closes}parameter>",
        function_ends=f"{closes}invoke>",
        group=(f"{opens}{group}>",),
        group_ends=(f"{closes}{group}>",),
    )
    written = CallForm(
        begins=f"{opens}{group}>\n",
        call=f'{opens}invoke name="{{name}}">\n{{arguments}}{closes}invoke>\n',
        parameter=(
            f'{opens}parameter name="{{key}}" string="{{kind}}">{{value}}'
            f"{closes}parameter>\n"
        ),
        ends=f"{closes}{group}>",
    )
    tool_format = _tagged(tags, written, ("｜DSML｜", group))
    return evolve(tool_format, markers=(*tool_format.markers, "｜DSML｜"))


def glm(gap: str) -> ToolFormat:
    """GLM's format, with line breaks or without."""
    tags = Tags(
        group=("<tool_call>",),
        group_ends=("</tool_call>",),
        function="{name}",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>",
        parameter_ends="</arg_value>",
    )
    written = CallForm(
        call=f"<tool_call>{{name}}{gap}{{arguments}}</tool_call>",
        between=gap,
        parameter=(
            f"<arg_key>{{key}}</arg_key>{gap}<arg_value>{{value}}</arg_value>{gap}"
        ),
    )
    return _tagged(tags, written, ("<arg_key>",))


def qwen_coder() -> ToolFormat:
    """The format of Qwen's coders, and of Qwen from 3.5 on."""
    tags = Tags(
        group=("<tool_call>",),
        group_ends=("</tool_call>",),
        function="<function={name}>",
        function_ends="</function>",
        parameter="<parameter={key}>",
        parameter_ends="</parameter>",
        breaks=True,
    )
    written = CallForm(
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    )
    return _tagged(tags, written, ("<function=", "<parameter="))


def seed_oss() -> ToolFormat:
    """Seed-OSS' format."""
    tags = Tags(
        group=("<seed:tool_call>",),
        group_ends=("</seed:tool_call>",),
        function="<function={name}>",
        function_ends="</function>",
        parameter="<parameter={key}>",
        parameter_ends="</parameter>",
    )
    written = CallForm(
        call=(
            "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n"
            "</seed:tool_call>"
        ),
        between="\n",
        parameter="<parameter={key}>{value}</parameter>\n",
    )
    return _tagged(tags, written, ("<seed:tool_call>",))


def hy_v3() -> ToolFormat:
    """Hunyuan's format from version 3 on."""
    end = ":opensource>"
    tags = Tags(
        group=(f"<tool_calls{end}",),
        group_ends=(f"</tool_calls{end}",),
        function=f"<tool_call{end}{{name}}<tool_sep{end}",
        function_ends=f"</tool_call{end}",
        parameter=f"<arg_key{end}{{key}}</arg_key{end}\n<arg_value{end}",
        parameter_ends=f"</arg_value{end}",
    )
    written = CallForm(
        begins=f"<tool_calls{end}\n",
        call=f"<tool_call{end}{{name}}<tool_sep{end}\n{{arguments}}</tool_call{end}\n",
        parameter=(
            f"<arg_key{end}{{key}}</arg_key{end}\n"
            f"<arg_value{end}{{value}}</arg_value{end}\n"
        ),
        ends=f"</tool_calls{end}",
    )
    return _tagged(tags, written, ("<arg_key{}>", ":opensource"))


def minimax_m2() -> ToolFormat:
    """MiniMax M2's format."""
    tags = Tags(
        group=("<minimax:tool_call>",),
        group_ends=("</minimax:tool_call>",),
        function='<invoke name="{name}">',
        function_ends="</invoke>",
        parameter='<parameter name="{key}">',
        parameter_ends="</parameter>",
    )
    written = CallForm(
        begins="<minimax:tool_call>\n",
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        ends="</minimax:tool_call>",
    )
    return _tagged(tags, written, ("<minimax:tool_call>",))


def step3() -> ToolFormat:
    """Step 3's format."""
    begins, ends = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
    tags = Tags(
        group=(begins,),
        group_ends=(ends,),
        function='<steptml:invoke name="{name}">',
        function_ends="</steptml:invoke>",
        parameter='<steptml:parameter name="{key}">',
        parameter_ends="</steptml:parameter>",
        drops=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    )
    written = CallForm(
        begins="<｜tool_calls_begin｜>",
        call=(
            f'{begins}<steptml:invoke name="{{name}}">{{arguments}}'
            f"</steptml:invoke>{ends}"
        ),
        parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
        ends="<｜tool_calls_end｜>",
    )
    tool_format = _tagged(tags, written, ("steptml:invoke",), ("<｜tool_calls_begin｜>",))
    extra_markers = ("<｜tool_call_begin｜>", "<｜tool_sep｜>")
    return evolve(tool_format, markers=(*tool_format.markers, *extra_markers))


def minimax_m3() -> ToolFormat:
    """MiniMax M3's format. No grammar of it is made here."""
    mark = "]<]minimax[>["
    return ToolFormat(
        dialect=NestedTags(mark=mark),
        markers=(mark, "<tool_call>", "</tool_call>"),
        signs=((mark, "<tool_call>"),),
    )


def kimi_k3() -> ToolFormat:
    """Kimi K3's format."""

    def element(name: str, attributes: str = "") -> str:
        return f"<|open|>{name}{attributes}<|sep|>"

    def end(name: str) -> str:
        return f"<|close|>{name}<|sep|>"

    call = element("call", ' tool="{name}" index="{index}"')
    tags = Tags(
        group=(element("tools"),),
        group_ends=(end("tools"),),
        function=call,
        function_ends=end("call"),
        parameter=element("argument", ' key="{key}" type="{type}"'),
        parameter_ends=end("argument"),
        escaped=True,
        drops=KIMI_K3_AROUND,
    )
    # An answer has channels, which no form of ours writes.
    tool_format = _tagged(tags, None, ("<|open|>", "'argument'"))
    return evolve(
        tool_format, markers=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    )
