"""All formats of tool calls: one row each, with the names that vLLM gives them.

Rows are in the order in which a chat template is compared with their signs: the texts of
an earlier one may be beside those of a later one.
"""

from collections.abc import Mapping
from typing import Final

from minfer.effects.text.tools import harmony
from minfer.effects.text.tools.format import ToolFormat
from minfer.effects.text.tools.header_rows import (
    SEP,
    deepseek,
    functionary_31,
    functionary_32,
    kimi_k2,
    mistral,
    solar,
)
from minfer.effects.text.tools.object_rows import (
    OBJECT,
    PARAMETERS,
    bare_format,
    cohere_command,
    command_r,
    gemma_format,
    gigachat,
    internlm,
    list_format,
    minimax_m1,
    prefixed_list_format,
    python_format,
    wrapped_format,
)
from minfer.effects.text.tools.tag_rows import (
    dsml,
    glm,
    hy_v3,
    kimi_k3,
    minimax_m2,
    minimax_m3,
    qwen_coder,
    seed_oss,
    step3,
)

HARMONY: Final = "openai"
_PYTHON: Final = ("<|python_start|>", "<|python_end|>")
_LFM: Final = ("<|tool_call_start|>", "<|tool_call_end|>")
_GEMMA: Final = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA: Final = ("<start_function_call>", "<end_function_call>", "<escape>")
ROWS: Final[Mapping[str, ToolFormat]] = {
    HARMONY: ToolFormat(
        dialect=harmony.Harmony(), markers=harmony.MARKERS, signs=(("<|channel|>",),)
    ),
    "kimi_k3": kimi_k3(),
    "mistral": mistral(),
    "gemma4": gemma_format(*_GEMMA),
    "functiongemma": gemma_format(*_FUNCTION_GEMMA),
    "kimi_k2": kimi_k2(),
    "solar_open": solar(),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "step3": step3(),
    "hy_v3": hy_v3(),
    "glm45": glm("\n"),
    "glm47": glm(""),
    "seed_oss": seed_oss(),
    "minimax_m2": minimax_m2(),
    "minimax_m3": minimax_m3(),
    "qwen3_coder": qwen_coder(),
    "functionary_v32": functionary_32(),
    "functionary_v31": functionary_31(),
    "deepseek_v3": deepseek(
        f"function{SEP}{{name}}\n```json\n{{arguments}}\n```",
        ("tool▁call", "```json"),
        between="\n",
    ),
    "deepseek_v31": deepseek(f"{{name}}{SEP}{{arguments}}", ("tool▁call",), between=""),
    "cohere_command": cohere_command(),
    "command_r": command_r(),
    "lfm2": python_format(*_LFM, (_LFM[0],), ("<|tool_list_start|>",), bare=False),
    "llama4_pythonic": python_format(*_PYTHON, (_PYTHON[0],), bare=True),
    "phi4": list_format("<|tool_call|>", "<|/tool_call|>", ("<|/tool_call|>",)),
    "granite": prefixed_list_format("<|tool_call|>"),
    "granite-20b-fc": prefixed_list_format("<function_call>"),
    "phi4_mini_json": prefixed_list_format("functools"),
    "nemotron_v2": list_format("<TOOLCALL>", "</TOOLCALL>"),
    "longcat": wrapped_format("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm": internlm(),
    "gigachat3": gigachat(),
    "minimax_m1": minimax_m1(),
    "hunyuan_a13b": list_format("<tool_calls>", "</tool_calls>"),
    "hermes": wrapped_format("<tool_call>", "</tool_call>"),
    "llama3_json": bare_format(
        PARAMETERS,
        ("<|python_tag|>",),
        ('"parameters": dictionary',),
        tag="<|python_tag|>",
    ),
    "pythonic": python_format(
        "", "", ("[func_name1(",), ("func_name1(params_name1",), bare=True
    ),
    "json": bare_format(OBJECT, ("tools",)),
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
TOOLS: Final[Mapping[str, ToolFormat]] = {
    **ROWS,
    **{alias: ROWS[name] for alias, name in ALIASES.items()},
}
