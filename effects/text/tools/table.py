"""All formats of tool calls: one row each, with the names that vLLM gives them.

Rows are in the order in which a chat template is compared with their signs: the texts of
an earlier one may be beside those of a later one.
"""

from collections.abc import Mapping
from typing import Final

from attrs import evolve

from minfer.effects.text.tools import harmony
from minfer.effects.text.tools.format import Format, Written
from minfer.effects.text.tools.gemma import GemmaCalls
from minfer.effects.text.tools.headers import Headers
from minfer.effects.text.tools.objects import Objects
from minfer.effects.text.tools.python_calls import PythonCalls
from minfer.effects.text.tools.tags import Tags
from minfer.effects.text.tools.thinking import (
    COHERE_AROUND,
    KIMI_K3_AROUND,
    SOLAR_AROUND,
)

HARMONY: Final = "openai"
_OBJECT: Final = '{"name": "{name}", "arguments": {arguments}}'
_PARAMETERS: Final = '{"name": "{name}", "parameters": {arguments}}'


def _list(begins: str, ends: str) -> Written:
    """Calls as a list of objects."""
    return Written(begins=f"{begins}[", call=_OBJECT, between=", ", ends=f"]{ends}")


def _listed(opens: str, closes: str, *signs: tuple[str, ...]) -> Format:
    """A format that has all calls as a list between two markers."""
    return Format(
        dialect=Objects(opens=(opens,), closes=closes),
        written=_list(opens, closes),
        markers=(opens, closes),
        signs=signs or ((opens,),),
    )


def _each(
    opens: str, closes: str, gap: str = "\n", *signs: tuple[str, ...], pad: str = "\n"
) -> Format:
    """A format that has each call between two markers."""
    return Format(
        dialect=Objects(opens=(opens,), closes=closes),
        written=Written(call=f"{opens}{pad}{_OBJECT}{pad}{closes}", between=gap),
        markers=(opens, closes),
        signs=signs or ((opens,),),
    )


def _tagged(tags: Tags, written: Written | None, *signs: tuple[str, ...]) -> Format:
    """A format whose calls are in tags."""
    markers = (*tags.group, *tags.group_ends, *tags.literals, *tags.drops)
    return Format(dialect=tags, written=written, markers=markers, signs=signs)


_DSML: Final = "<｜DSML｜"
_DSML_ENDS: Final = "</｜DSML｜"


def _dsml(group: str, space: str = "") -> Format:
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
    written = Written(
        begins=f"{opens}{group}>\n",
        call=f'{opens}invoke name="{{name}}">\n{{arguments}}{closes}invoke>\n',
        parameter=(
            f'{opens}parameter name="{{key}}" string="{{kind}}">{{value}}'
            f"{closes}parameter>\n"
        ),
        ends=f"{closes}{group}>",
    )
    form = _tagged(tags, written, ("｜DSML｜", group))
    return evolve(form, markers=(*form.markers, "｜DSML｜"))


def _glm(gap: str) -> Format:
    """GLM's format, with line breaks or without."""
    tags = Tags(
        group=("<tool_call>",),
        group_ends=("</tool_call>",),
        function="{name}",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>",
        parameter_ends="</arg_value>",
    )
    written = Written(
        call=f"<tool_call>{{name}}{gap}{{arguments}}</tool_call>",
        between=gap,
        parameter=(
            f"<arg_key>{{key}}</arg_key>{gap}<arg_value>{{value}}</arg_value>{gap}"
        ),
    )
    return _tagged(tags, written, ("<arg_key>",))


def _qwen_coder() -> Format:
    tags = Tags(
        group=("<tool_call>",),
        group_ends=("</tool_call>",),
        function="<function={name}>",
        function_ends="</function>",
        parameter="<parameter={key}>",
        parameter_ends="</parameter>",
        breaks=True,
    )
    written = Written(
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    )
    return _tagged(tags, written, ("<function=", "<parameter="))


def _seed_oss() -> Format:
    tags = Tags(
        group=("<seed:tool_call>",),
        group_ends=("</seed:tool_call>",),
        function="<function={name}>",
        function_ends="</function>",
        parameter="<parameter={key}>",
        parameter_ends="</parameter>",
    )
    written = Written(
        call=(
            "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n"
            "</seed:tool_call>"
        ),
        between="\n",
        parameter="<parameter={key}>{value}</parameter>\n",
    )
    return _tagged(tags, written, ("<seed:tool_call>",))


def _hy_v3() -> Format:
    end = ":opensource>"
    tags = Tags(
        group=(f"<tool_calls{end}",),
        group_ends=(f"</tool_calls{end}",),
        function=f"<tool_call{end}{{name}}<tool_sep{end}",
        function_ends=f"</tool_call{end}",
        parameter=f"<arg_key{end}{{key}}</arg_key{end}\n<arg_value{end}",
        parameter_ends=f"</arg_value{end}",
    )
    written = Written(
        begins=f"<tool_calls{end}\n",
        call=f"<tool_call{end}{{name}}<tool_sep{end}\n{{arguments}}</tool_call{end}\n",
        parameter=(
            f"<arg_key{end}{{key}}</arg_key{end}\n"
            f"<arg_value{end}{{value}}</arg_value{end}\n"
        ),
        ends=f"</tool_calls{end}",
    )
    return _tagged(tags, written, ("<arg_key{}>", ":opensource"))


def _minimax_m2() -> Format:
    tags = Tags(
        group=("<minimax:tool_call>",),
        group_ends=("</minimax:tool_call>",),
        function='<invoke name="{name}">',
        function_ends="</invoke>",
        parameter='<parameter name="{key}">',
        parameter_ends="</parameter>",
    )
    written = Written(
        begins="<minimax:tool_call>\n",
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        ends="</minimax:tool_call>",
    )
    return _tagged(tags, written, ("<minimax:tool_call>",))


def _step3() -> Format:
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
    written = Written(
        begins="<｜tool_calls_begin｜>",
        call=(
            f'{begins}<steptml:invoke name="{{name}}">{{arguments}}'
            f"</steptml:invoke>{ends}"
        ),
        parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
        ends="<｜tool_calls_end｜>",
    )
    form = _tagged(tags, written, ("steptml:invoke",), ("<｜tool_calls_begin｜>",))
    parts = ("<｜tool_call_begin｜>", "<｜tool_sep｜>")
    return evolve(form, markers=(*form.markers, *parts))


def _kimi_k3() -> Format:
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
    form = _tagged(tags, None, ("<|open|>", "'argument'"))
    return evolve(form, markers=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))


def _deepseek(call: str, *signs: tuple[str, ...], between: str) -> Format:
    begin, sep, end = (f"<｜tool▁{name}｜>" for name in _DEEPSEEK_CALL)
    group, group_ends = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return Format(
        dialect=Headers(
            call=begin,
            ends=end,
            group=group,
            group_ends=group_ends,
            heads=tuple(head.replace("|", sep) for head in _DEEPSEEK_HEADS),
            others=(sep,),
        ),
        written=Written(
            begins=group, call=f"{begin}{call}{end}", between=between, ends=group_ends
        ),
        markers=(group, begin, sep, end, group_ends),
        signs=signs,
    )


_DEEPSEEK_HEADS: Final = (
    *("{id}|{name}\n```json\n", "{id}|{name}\n```\n", "{id}|{name}", "{name}|"),
)
_DEEPSEEK_CALL: Final = ("call▁begin", "sep", "call▁end")
_SEP: Final = "<｜tool▁sep｜>"


def _mistral() -> Format:
    listed = _list("[TOOL_CALLS]{gap}", "")
    return Format(
        dialect=Headers(
            call="[TOOL_CALLS]",
            heads=("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}"),
            lists=True,
        ),
        written=Written(call="[TOOL_CALLS]{name}[ARGS]{arguments}"),
        older=("[ARGS]", listed),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        # Mistral's templates take no other ids.
        prefix="",
        letters=9,
        signs=(("[TOOL_CALLS]",),),
    )


def _kimi_k2() -> Format:
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    arguments = "<|tool_call_argument_begin|>"
    group, group_ends = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    heads = ("functions.{name}:{index}", "{name}:{index}", "functions.{name}", "{name}")
    return Format(
        dialect=Headers(
            call=begin,
            ends=end,
            group=group,
            group_ends=group_ends,
            heads=tuple(head + arguments for head in heads),
            others=(arguments,),
        ),
        written=Written(
            begins=group,
            call=f"{begin}functions.{{name}}:{{index}}{arguments}{{arguments}}{end}",
            ends=group_ends,
        ),
        markers=(group, begin, arguments, end, group_ends),
        signs=((group,), (begin,)),
    )


def _solar() -> Format:
    begin, end = "<|tool_call:begin|>", "<|tool_call:end|>"
    name, arguments = "<|tool_call:name|>", "<|tool_call:args|>"
    head = f"{{id}}{name}{{name}}{arguments}"
    return Format(
        dialect=Headers(
            call=begin,
            ends=end,
            group="<|tool_calls|>",
            group_ends="<|calls|>",
            heads=(head,),
            others=(name, arguments),
            drops=SOLAR_AROUND,
        ),
        written=Written(
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


def _functionary_31() -> Format:
    return Format(
        dialect=Headers(call="<function=", heads=("{name}>",), ends="</function>"),
        written=Written(call="<function={name}>{arguments}</function>"),
        markers=("<function=", "</function>"),
        signs=(("<function=",),),
    )


def _functionary_32() -> Format:
    return Format(
        dialect=Headers(
            call=">>>", heads=("{name}\n",), offered=True, begun=True, drops=(">>>all\n",)
        ),
        written=Written(call="{name}\n{arguments}", between=">>>", content="all\n"),
        signs=((">>>all",), (">>>${recipient}",)),
    )


def _command(begins: str, ends: str, markers: tuple[str, ...], call: str) -> Format:
    return Format(
        dialect=Objects(opens=(begins,), closes=ends, drops=COHERE_AROUND),
        written=Written(
            begins=f"{begins}[\n    ", call=call, between=",\n    ", ends=f"\n]{ends}"
        ),
        markers=(*markers, *COHERE_AROUND),
        signs=((begins,), ("Action:", "tool_name")) if not markers else ((begins,),),
    )


_COMMAND_CALL: Final = (
    '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}'
)
_COMMAND_R_CALL: Final = '{"tool_name": "{name}", "parameters": {arguments}}'
_ACTION: Final = ("<|START_ACTION|>", "<|END_ACTION|>")
_PYTHON: Final = ("<|python_start|>", "<|python_end|>")
_LFM: Final = ("<|tool_call_start|>", "<|tool_call_end|>")
_GEMMA: Final = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA: Final = ("<start_function_call>", "<end_function_call>", "<escape>")


def _gemma(call: str, ends: str, quote: str) -> Format:
    return Format(
        dialect=GemmaCalls(call=call, ends=ends, quote=quote),
        written=Written(call=f"{call}call:{{name}}{{arguments}}{ends}"),
        markers=(call, ends, quote),
        signs=((call,),),
    )


def _python(opens: str, closes: str, *signs: tuple[str, ...], bare: bool) -> Format:
    begins, ends = ("[", "]") if bare else (f"{opens}[", f"]{closes}")
    markers = [one for one in (opens, closes) if one]
    return Format(
        dialect=PythonCalls(
            opens=tuple(markers[:1]), closes=tuple(markers[1:]), bare=bare
        ),
        written=Written(
            begins=begins, call="{name}({arguments})", between=", ", ends=ends
        ),
        markers=tuple(markers),
        signs=signs,
    )


def _followed(marker: str, *signs: tuple[str, ...]) -> Format:
    """A format that has all calls as a list after a marker."""
    return Format(
        dialect=Objects(opens=(marker,)),
        written=_list(marker, ""),
        markers=(marker,),
        signs=signs or ((marker,),),
    )


def _gigachat() -> Format:
    form = _followed(
        "<|function_call|>", ("<|function_call|>",), ("function call", "<|role_sep|>")
    )
    opens = ("<|function_call|>", "function call<|role_sep|>\n")
    written = Written(call=f"<|function_call|>{_OBJECT}", between=None)
    return evolve(form, dialect=Objects(opens=opens), written=written)


def _minimax_m1() -> Format:
    form = _listed(
        "<tool_calls>", "</tool_calls>", ("<beginning_of_sentence>", "<tool_calls>")
    )
    written = Written(begins="<tool_calls>\n", call=f"{_OBJECT}\n", ends="</tool_calls>")
    return evolve(form, written=written)


def _bare(call: str, *signs: tuple[str, ...], tag: str = "") -> Format:
    """A format whose answers may begin with calls, without a marker."""
    return Format(
        dialect=Objects(opens=(tag,) if tag else (), bare=True),
        written=Written(call=call, between="; ", optional=tag)
        if tag
        else Written(call=call, begins="[", between=", ", ends="]", lone=True),
        markers=(tag,) if tag else (),
        signs=signs,
        specific=bool(tag),
    )


ROWS: Final[Mapping[str, Format]] = {
    HARMONY: Format(
        dialect=harmony.Harmony(), markers=harmony.MARKERS, signs=(("<|channel|>",),)
    ),
    "kimi_k3": _kimi_k3(),
    "mistral": _mistral(),
    "gemma4": _gemma(*_GEMMA),
    "functiongemma": _gemma(*_FUNCTION_GEMMA),
    "kimi_k2": _kimi_k2(),
    "solar_open": _solar(),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "step3": _step3(),
    "hy_v3": _hy_v3(),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "seed_oss": _seed_oss(),
    "minimax_m2": _minimax_m2(),
    "qwen3_coder": _qwen_coder(),
    "functionary_v32": _functionary_32(),
    "functionary_v31": _functionary_31(),
    "deepseek_v3": _deepseek(
        f"function{_SEP}{{name}}\n```json\n{{arguments}}\n```",
        ("tool▁call", "```json"),
        between="\n",
    ),
    "deepseek_v31": _deepseek(f"{{name}}{_SEP}{{arguments}}", ("tool▁call",), between=""),
    "cohere_command": _command(*_ACTION, _ACTION, _COMMAND_CALL),
    "command_r": _command("Action: ```json\n", "```", (), _COMMAND_R_CALL),
    "lfm2": _python(*_LFM, (_LFM[0],), ("<|tool_list_start|>",), bare=False),
    "llama4_pythonic": _python(*_PYTHON, (_PYTHON[0],), bare=True),
    "phi4": _listed("<|tool_call|>", "<|/tool_call|>", ("<|/tool_call|>",)),
    "granite": _followed("<|tool_call|>"),
    "granite-20b-fc": _followed("<function_call>"),
    "phi4_mini_json": _followed("functools"),
    "nemotron_v2": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "longcat": _each("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm": _each("<|action_start|><|plugin|>", "<|action_end|>", pad=""),
    "gigachat3": _gigachat(),
    "minimax_m1": _minimax_m1(),
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "hermes": _each("<tool_call>", "</tool_call>"),
    "llama3_json": _bare(
        _PARAMETERS,
        ("<|python_tag|>",),
        ('"parameters": dictionary',),
        tag="<|python_tag|>",
    ),
    "pythonic": _python(
        "", "", ("[func_name1(",), ("func_name1(params_name1",), bare=True
    ),
    "json": _bare(_OBJECT, ("tools",)),
}
ALIASES: Final[Mapping[str, str]] = {
    "glm5": "glm47",
    "ling3": "glm45",
    "poolside_v1": "glm47",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "firefunction": "phi4_mini_json",
    "granite4": "hermes",
    "ernie45": "hermes",
    "smollm3": "hermes",
    "apriel": "hunyuan_a13b",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "xlam": "json",
}
TOOLS: Final[Mapping[str, Format]] = {
    **ROWS,
    **{alias: ROWS[name] for alias, name in ALIASES.items()},
}
