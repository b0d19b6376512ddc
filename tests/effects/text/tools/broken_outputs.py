"""Broken outputs, by kind: each with its format and the calls that are whole in it.

Words like `w1w` are followed through the parser. Texts were written by hand, by a reader
of the formats' documentation, not made from the declarations in `table.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

Calls = tuple[tuple[str, Mapping[str, Any]], ...]
ADD: Final = ("add", {"a": 1})
NOW: Final[tuple[str, Mapping[str, Any]]] = ("now", {})
_OBJECT: Final = '{"name": "add", "arguments": {"a": 1}}'
_HERMES: Final = f"<tool_call>\n{_OBJECT}\n</tool_call>"
_QWEN: Final = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>"
)
_GLM: Final = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
)
_KIMI: Final = (
    "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|>'
)
_DEEP: Final = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
_DEEP_BEGINS: Final = "<｜tool▁calls▁begin｜>"
_DEEP_ENDS: Final = "<｜tool▁calls▁end｜>"
_DSML: Final = (
    '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
)
_DSML_TEXT: Final = _DSML.replace(">1<", ">{w0w<")
_M3: Final = "]<]minimax[>["
_CALL3: Final = (
    f'{_M3}<invoke name="add">{_M3}<a>1{_M3}</a>{_M3}</invoke>'  # without its group
)


@frozen
class Broken:
    """An output, and what is right of it."""

    kind: str
    format: str
    text: str
    calls: Calls = ()
    reasoning: str = "think"  # the parser of reasoning


def _rows(kind: str, *rows: tuple[Any, ...]) -> tuple[Broken, ...]:
    return tuple(Broken(kind, *row) for row in rows)


CUT: Final = _rows(
    "cut",
    ("hermes", 'w0w <tool_call>\n{"name": "add", "argum'),
    ("hermes", f"{_HERMES}w0w<tool_call>{{", (ADD,)),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "w0w'),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}', (ADD,)),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\nw0w\n</para"),
    ("qwen3_coder", "w0w<tool_call>\n<function=ad"),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>w0w</arg_val"),
    ("kimi_k2", f"<|tool_calls_section_begin|>{_KIMI[:-3]}", (ADD,)),
    ("deepseek_v31", f"{_DEEP_BEGINS}{_DEEP[:-14]}", (ADD,)),
    ("deepseek_v4", f"<｜DSML｜tool_calls>\n{_DSML[:-25]}"),
    ("minimax_m3", f"{_M3}<tool_call>{_CALL3[:-20]}w0w"),
    ("gemma4", '<|tool_call>call:add{a:<|"|>w0w<|"|'),
    ("llama3_json", '{"name": "add", "parameters": {"a": "w0w"'),
    ("pythonic", "[add(a='w0w"),
    ("lfm2", "<|tool_call_start|>[now(), add(a=[1, 'w0w'", (NOW,)),
    ("openai", '<|channel|>commentary to=functions.add<|message|>{"a": "w0w'),
    ("cohere_command", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "add"'),
    (
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>w0w<stept",
    ),
    ("hy_v3", "<tool_calls:opensource>\n<tool_call:opensource>add<tool_sep:open"),
)
NESTED: Final = _rows(
    "nested",
    ("hermes", f"<tool_call>w0w{_HERMES}</tool_call>", (ADD,)),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {_OBJECT}}}}}</tool_call>',
        (("add", {"a": {"name": "add", "arguments": {"a": 1}}}),),
    ),
    (
        "qwen3_coder",
        (
            f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{_QWEN}\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        (("get_weather", {"city": _QWEN}),),
    ),
    ("glm45", f"<tool_call>w0w {_GLM}", (ADD,)),
    ("kimi_k2", f"<|tool_call_begin|>w0w{_KIMI}<|tool_call_end|>", (ADD,)),
    ("deepseek_v31", f"{_DEEP_BEGINS}{_DEEP_BEGINS}{_DEEP}{_DEEP_ENDS}", (ADD,)),
    ("mistral", '[TOOL_CALLS]w0w[TOOL_CALLS]add[ARGS]{"a": 1}', (ADD,)),
    ("llama3_json", '[[{"name": "add", "parameters": {"a": 1}}]]'),
    ("gemma4", "<|tool_call>call:add{a:call:now{}}<tool_call|>w0w"),
    ("pythonic", "[add(a=now())] w0w"),
    ("granite", f"<|tool_call|>[[{_OBJECT}]] w0w"),
    ("phi4", f"<|tool_call|>[{_OBJECT}, [w0w<|/tool_call|>", (ADD,)),
    ("minimax_m3", f"{_M3}<tool_call>{_M3}<tool_call>{_CALL3}w0w", (ADD,)),
)
DOUBLED: Final = _rows(
    "doubled",
    ("hermes", f"<tool_call><tool_call>{_OBJECT}</tool_call></tool_call>w0w", (ADD,)),
    ("hermes", f"<tool_call>{_OBJECT}{_OBJECT}</tool_call>", (ADD, ADD)),
    ("qwen3_coder", _QWEN.replace("</function>", "</function></function>"), (ADD,)),
    ("glm45", f"<tool_call>{_GLM}</tool_call> w0w", (ADD,)),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS]add[ARGS]{"a": 1}}}', (ADD,)),
    ("mistral", '[TOOL_CALLS]add[ARGS][ARGS]{"a": "w0w"}'),
    ("deepseek_v31", _DEEP_BEGINS + _DEEP * 2 + _DEEP_ENDS * 2, (ADD, ADD)),
    ("kimi_k2", f"{_KIMI}{_KIMI}<|tool_calls_section_end|>w0w", (ADD, ADD)),
    ("openai", "<|channel|><|channel|>final<|message|>w0w<|end|><|end|>"),
    ("gemma4", "<|tool_call><|tool_call>call:add{a:1}}<tool_call|>", (ADD,)),
    (
        "llama3_json",
        '<|python_tag|><|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        (ADD,),
    ),
    ("functionary_v31", '<function=add>{"a": 1}</function></function>w0w', (ADD,)),
    (
        "deepseek_v4",
        f"<｜DSML｜tool_calls>\n{_DSML * 2}</｜DSML｜tool_calls>" * 2,
        (ADD,) * 4,
    ),
)
MARKERS_IN_STRINGS: Final = _rows(
    "markers in strings",
    (
        "hermes",
        (
            '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>w0w"}}'
            "</tool_call>"
        ),
        (("get_weather", {"city": "</tool_call>w0w"}),),
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "<tool_call>w0w',
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|><tool_call|>}w0w<|"|>}<tool_call|>',
        (("get_weather", {"city": "<tool_call|>}w0w"}),),
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]now[ARGS]{}"}',
        (("get_weather", {"city": "[TOOL_CALLS]now[ARGS]{}"}),),
    ),
    (
        "glm45",
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
            "a </arg_value> b</arg_value>\n</tool_call>"
        ),
        (("get_weather", {"city": "a </arg_value> b"}),),
    ),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n</function>w0w\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        (("get_weather", {"city": "</function>w0w"}),),
    ),
    (
        "pythonic",
        '[get_weather(city=")] w0w [now()")]',
        (("get_weather", {"city": ")] w0w [now()"}),),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='<|tool_call_end|>')]<|tool_call_end|>",
        (("get_weather", {"city": "<|tool_call_end|>"}),),
    ),
    (
        "openai",
        (
            '<|channel|>commentary to=functions.get_weather<|message|>{"city": "<|call|>'
            'w0w"}<|call|>'
        ),
        (("get_weather", {"city": "<|call|>w0w"}),),
    ),
    (
        "kimi_k2",
        (
            '<|tool_call_begin|>get_weather<|tool_call_argument_begin|>{"city": '
            '"<|tool_call_end|>"}<|tool_call_end|>'
        ),
        (("get_weather", {"city": "<|tool_call_end|>"}),),
    ),
    (
        "deepseek_v31",
        (
            f"{_DEEP_BEGINS}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            f'{{"city": "{_DEEP_ENDS}"}}<｜tool▁call▁end｜>{_DEEP_ENDS}'
        ),
        (("get_weather", {"city": _DEEP_ENDS}),),
    ),
)
IN_REASONING: Final = _rows(
    "calls inside reasoning",
    ("hermes", f"<think>w0w{_HERMES}w1w</think>w2w"),
    ("hermes", f"<think>w0w{_HERMES}", (ADD,)),
    ("hermes", f"<think>w0w</think>{_HERMES}</think>w1w", (ADD,)),
    ("qwen3_coder", f"<think>{_QWEN}</think>{_QWEN}", (ADD,)),
    ("glm45", f"<think>w0w {_GLM} w1w", (ADD,)),
    (
        "mistral",
        '[THINK]w0w[TOOL_CALLS]x[ARGS]{"[TOOL_CALLS]now[ARGS]{}',
        (NOW,),
        "mistral",
    ),
    ("functionary_v31", '<think><function=add>{": 1}</function><function=now>{}', (NOW,)),
    ("deepseek_v31", f"<think>{_DEEP_BEGINS}{_DEEP}</think>w0w"),
    ("kimi_k2", f"<think>w0w<think>w1w</think>{_KIMI}", (ADD,)),
    ("mistral", '[THINK]w0w[TOOL_CALLS]add[ARGS]{"a": 1}[/THINK]w1w', (), "mistral"),
    (
        "gemma4",
        "<|channel>thought\nw0w<|tool_call>call:add{a:1}<tool_call|>",
        (ADD,),
        "gemma4",
    ),
    ("openai", '<|channel|>analysis<|message|>to=functions.add {"a": 1} w0w<|end|>'),
    ("llama3_json", '<think>{"name": "add", "parameters": {"a": 1}}</think>w0w'),
)
WRONG_NAMES: Final = _rows(
    "wrong names",
    ("hermes", '<tool_call>{"name": "", "arguments": {"a": "w0w"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {"a": "w0w"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": null, "arguments": {"a": "w0w"}}</tool_call>'),
    ("llama3_json", '{"name": "w0w", "parameters": {"a": 1}}'),
    ("pythonic", "[print(a=1), add(a=1)] w0w"),
    ("json", '[{"name": "stranger", "arguments": {}}] w0w'),
    ("qwen3_coder", "<function=w0w>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=a b>\n</function>\n</tool_call>w0w"),
    ("glm45", "<tool_call><arg_key>a</arg_key><arg_value>w0w</arg_value></tool_call>"),
    ("kimi_k2", '<|tool_call_begin|>a b<|tool_call_argument_begin|>{"a": "w0w"}'),
    ("gemma4", "<|tool_call>call:{a:1}<tool_call|>w0w"),
    ("functionary_v32", '>>>stranger\n{"a": "w0w"}'),
    ("openai", "<|channel|>commentary to=functions. <|message|>w0w<|call|>"),
)
WRONG_ARGUMENTS: Final = _rows(
    "arguments of a wrong type",
    ("lfm2", "<|tool_call_start|>[now(w0w), add(a=1)]<|tool_call_end|>"),
    (
        "gemma4",
        '<|tool_call>call:add{<|"|>w0w}<tool_call|><|tool_call>call:now{}',
        (NOW,),
    ),
    ("minimax_m3", f'{_M3}<tool_call>{_M3}<invoke name="add">w0w{_CALL3}', (ADD,)),
    (
        "minimax_m3",
        (
            f'{_M3}<tool_call>{_M3}<invoke name="x">{_M3}<a>{_M3}<item>1{_M3}</item>'
            f"{_M3}<w0w>"
        ),
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}w0w"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, "w0w"]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>w0w'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "w0w {"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>w0w'),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]w0w"),
    (
        "kimi_k2",
        "<|tool_call_begin|>add<|tool_call_argument_begin|>null<|tool_call_end|>w0w",
    ),
    ("pythonic", "[add(1, 2)] w0w"),
    ("pythonic", "[add(**{'a': 1})] w0w"),
    ("lfm2", "<|tool_call_start|>[add(a=open('w0w'))]<|tool_call_end|>"),
    ("qwen3_coder", _QWEN.replace("\n1\n", "\nw0w [\n"), (("add", {"a": "w0w ["}),)),
    ("gemma4", "<|tool_call>call:add{a:w0w x}<tool_call|>", (("add", {"a": "w0w x"}),)),
    ("openai", "<|channel|>commentary to=functions.add<|message|>[1]w0w<|call|>"),
    (
        "deepseek_v4",
        f"<｜DSML｜tool_calls>\n{_DSML_TEXT}</｜DSML｜tool_calls>",
        (("add", {"a": "{w0w"}),),
    ),
)
BETWEEN_CALLS: Final = _rows(
    "text between calls",
    ("hermes", f"w0w{_HERMES}w1w{_HERMES}w2w", (ADD, ADD)),
    ("qwen3_coder", f"w0w{_QWEN}w1w<tool_call>w2w{_QWEN}", (ADD, ADD)),
    ("glm45", f"{_GLM}w0w{_GLM}", (ADD, ADD)),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{_KIMI}w0w{_KIMI}<|tool_calls_section_end|>",
        (ADD, ADD),
    ),
    ("deepseek_v31", f"{_DEEP_BEGINS}{_DEEP}w0w{_DEEP}{_DEEP_ENDS}w1w", (ADD, ADD)),
    ("gemma4", "<|tool_call>call:add{a:1}w0w<tool_call|>w1w", (ADD,)),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}} w0w {"name": "now"', (ADD,)),
    ("pythonic", "[add(a=1)] w0w [now()]", (ADD,)),
    ("functionary_v32", 'all\nw0w>>>add\n{"a": 1}>>>all\nw1w', (ADD,)),
    (
        "openai",
        (
            "<|channel|>final<|message|>w0w<|end|>w1w<|start|>assistant<|channel|>"
            'commentary to=functions.add<|message|>{"a": 1}<|call|>w2w'
        ),
        (ADD,),
    ),
    ("qwen3_coder", _QWEN.replace("\n<parameter", "\nw0w<parameter"), (ADD,)),
)
TEXTS: Final = _rows(
    "unicode and quotes",
    (
        "hermes",
        (
            '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}'
            "</tool_call>w0w"
        ),
        (("get_weather", {"city": "\ud83d"}),),
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\x"}}</tool_call>w0w',
    ),
    ("hermes", f"\u202e\u0000w0w\ufeff{_HERMES}\u2028🙂", (ADD,)),
    ("hermes", "<tool_call>{'name': 'add', 'arguments': {'a': 'w0w'}}</tool_call>"),
    ("hermes", "<tool_call>{“name”: “add”, “arguments”: {}}</tool_call>w0w"),
    ("pythonic", "[get_weather(city='it's w0w')]"),
    ("gemma4", '<|tool_call>call:get_weather{city:"w0w}<tool_call|>'),
    (
        "glm45",
        (
            "<tool_call>get_weather<arg_key>Zürich\u2028🙂</arg_key><arg_value>w0w"
            "</arg_value></tool_call>"
        ),
        (("get_weather", {"Zürich\u2028🙂": "w0w"}),),
    ),
    (
        "deepseek_v31",
        f"<|tool_calls_begin|>{_DEEP.replace('▁', '_')}w0w",
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "a"b w0w"}'),
)
LONG: Final = _rows(
    "deep or long",
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 300 + "w0w"),
    ("gemma4", "<|tool_call>call:add{a:" + "[" * 300 + "w0w"),
    ("gemma4", "<|tool_call>call:add{a:" + "[" * 80 + "]" * 80 + "}<tool_call|>w0w"),
    ("lfm2", "<|tool_call_start|>[add(a=" + "[" * 250 + "w0w" + "]" * 250 + ")]"),
    ("lfm2", "<|tool_call_start|>[add(a=" + "-" * 300 + "1)]w0w"),
    (
        "minimax_m3",
        f'{_M3}<tool_call>{_M3}<invoke name="add">' + f"{_M3}<a>" * 70 + "w0w",
    ),
    ("kimi_k2", "<|tool_call_begin|>" + "w0w" * 100 + "<|tool_call_argument_begin|>{}"),
    ("hermes", f"{'<' * 200}w0w{'<tool_call' * 40}>{'</tool_call>' * 20}"),
    ("openai", "<|channel|>" + "w0w" * 100 + "<|message|>w1w"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 600 + "}}w0w"),
)
BROKEN: Final = (
    *CUT,
    *NESTED,
    *DOUBLED,
    *MARKERS_IN_STRINGS,
    *IN_REASONING,
    *WRONG_NAMES,
    *WRONG_ARGUMENTS,
    *BETWEEN_CALLS,
    *TEXTS,
    *LONG,
)
