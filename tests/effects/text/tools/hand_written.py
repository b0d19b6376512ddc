"""A whole call in each format, written by hand from the documentation of its models.

`NAME` is the name of the tool, and `VALUE` the text of its argument `city`; `around` is
what else an answer has.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

BAR: Final = "｜"  # of DeepSeek's and Step's markers
_M3: Final = "]<]minimax[>["
_OBJECT: Final = '{"name": "NAME", "arguments": {"city": "VALUE"}}'
_PARAMETERS: Final = '{"name": "NAME", "parameters": {"city": "VALUE"}}'


@frozen
class HandWritten:
    """A call, and how its text is written."""

    call: str
    notation: Literal["json", "tags", "quoted"] = "json"  # of texts
    around: tuple[str, str] = ("", "")

    def answer(self, name: str, value: str, *, times: int = 1) -> str:
        """An answer with this call, as often."""
        text = json.dumps(value)[1:-1] if self.notation == "json" else value
        call = self.call.replace("NAME", name).replace("VALUE", text)
        return f"{self.around[0]}{call * times}{self.around[1]}"


def _dsml(group: str, gap: str = "") -> HandWritten:
    return HandWritten(
        f'<{BAR}DSML{BAR}{gap}invoke name="NAME">\n<{BAR}DSML{BAR}{gap}parameter '
        f'name="city" string="true">VALUE</{BAR}DSML{BAR}{gap}parameter>\n'
        f"</{BAR}DSML{BAR}{gap}invoke>\n",
        "tags",
        (f"<{BAR}DSML{BAR}{gap}{group}>\n", f"</{BAR}DSML{BAR}{gap}{group}>"),
    )


def _function(group: str, gap: str) -> HandWritten:
    value = f"<parameter=city>{gap}VALUE{gap}</parameter>"
    return HandWritten(
        f"<{group}>\n<function=NAME>\n{value}\n</function>\n</{group}>\n", "tags"
    )


def _glm(gap: str) -> HandWritten:
    value = f"<arg_key>city</arg_key>{gap}<arg_value>VALUE</arg_value>{gap}"
    return HandWritten(f"<tool_call>NAME{gap}{value}</tool_call>", "tags")


def _deepseek(head: str, ends: str) -> HandWritten:
    return HandWritten(
        f'<｜tool▁call▁begin｜>{head}{{"city": "VALUE"}}{ends}<｜tool▁call▁end｜>',
        "json",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    )


HAND_WRITTEN: Final[Mapping[str, HandWritten]] = {
    "openai": HandWritten(
        "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json"
        '<|message|>{"city": "VALUE"}<|call|>'
    ),
    "kimi_k3": HandWritten(
        '<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>VALUE<|close|>argument<|sep|><|close|>call<|sep|>',
        "tags",
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ),
    "mistral": HandWritten('[TOOL_CALLS]NAME[ARGS]{"city": "VALUE"}'),
    "gemma4": HandWritten(
        '<|tool_call>call:NAME{city:<|"|>VALUE<|"|>}<tool_call|>', "quoted"
    ),
    "functiongemma": HandWritten(
        "<start_function_call>call:NAME{city:<escape>VALUE<escape>}<end_function_call>",
        "quoted",
    ),
    "kimi_k2": HandWritten(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
        '{"city": "VALUE"}<|tool_call_end|>',
        "json",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "solar_open": HandWritten(
        "<|tool_call:begin|>x1<|tool_call:name|>NAME<|tool_call:args|>"
        '{"city": "VALUE"}<|tool_call:end|>',
        "json",
        ("<|tool_calls|>", "<|calls|>"),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "step3": HandWritten(
        f'<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}><steptml:invoke name="'
        'NAME"><steptml:parameter name="city">VALUE</steptml:parameter></steptml:invoke>'
        f"<{BAR}tool_call_end{BAR}>",
        "tags",
        (f"<{BAR}tool_calls_begin{BAR}>", f"<{BAR}tool_calls_end{BAR}>"),
    ),
    "hy_v3": HandWritten(
        "<tool_call:opensource>NAME<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n"
        "</tool_call:opensource>\n",
        "tags",
        ("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
    ),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "seed_oss": _function("seed:tool_call", ""),
    "minimax_m2": HandWritten(
        '<invoke name="NAME">\n<parameter name="city">VALUE</parameter>\n</invoke>\n',
        "tags",
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    "minimax_m3": HandWritten(
        f'{_M3}<invoke name="NAME">{_M3}<city>VALUE{_M3}</city>{_M3}</invoke>\n',
        "quoted",
        (f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
    ),
    "qwen3_coder": _function("tool_call", "\n"),
    "functionary_v32": HandWritten('>>>NAME\n{"city": "VALUE"}'),
    "functionary_v31": HandWritten('<function=NAME>{"city": "VALUE"}</function>'),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>NAME\n```json\n", "\n```"),
    "deepseek_v31": _deepseek("NAME<｜tool▁sep｜>", ""),
    "cohere_command": HandWritten(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
        '{"city": "VALUE"}}]<|END_ACTION|>'
    ),
    "command_r": HandWritten(
        'Action:\n```json\n[{"tool_name": "NAME", "parameters": {"city": "VALUE"}}]\n```'
    ),
    "lfm2": HandWritten('<|tool_call_start|>[NAME(city="VALUE")]<|tool_call_end|>'),
    "llama4_pythonic": HandWritten('<|python_start|>[NAME(city="VALUE")]<|python_end|>'),
    "phi4": HandWritten(f"<|tool_call|>[{_OBJECT}]<|/tool_call|>"),
    "granite": HandWritten(f"<|tool_call|>[{_OBJECT}]"),
    "granite-20b-fc": HandWritten(f"<function_call>{_OBJECT}"),
    "phi4_mini_json": HandWritten(f"functools[{_OBJECT}]"),
    "nemotron_v2": HandWritten(f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>"),
    "longcat": HandWritten(f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>\n"),
    "internlm": HandWritten(f"<|action_start|><|plugin|>{_PARAMETERS}<|action_end|>"),
    "gigachat3": HandWritten(f"<|function_call|>{_OBJECT}"),
    "minimax_m1": HandWritten(
        f"{_OBJECT}\n", "json", ("<tool_calls>\n", "</tool_calls>")
    ),
    "hunyuan_a13b": HandWritten(f"<tool_calls>[{_OBJECT}]</tool_calls>"),
    "hermes": HandWritten(f"<tool_call>\n{_OBJECT}\n</tool_call>\n"),
    "llama3_json": HandWritten(f"<|python_tag|>{_PARAMETERS}"),
    "pythonic": HandWritten('NAME(city="VALUE"), ', "json", ("[", "now()]")),
    "json": HandWritten(
        f"{_OBJECT}, ", "json", ("[", _OBJECT.replace("NAME", "now") + "]")
    ),
}


def names(form: str, calls: list[tuple[str, Any]]) -> list[str]:
    """The names of calls, without that of the frame around them."""
    names = [name for name, _ in calls]
    return names[:-1] if form in ("pythonic", "json") and names else names
