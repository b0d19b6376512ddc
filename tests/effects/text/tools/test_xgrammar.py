"""Required calls beside xgrammar's: what a format writes, its structural tags allow.

xgrammar is not a dependency: `pip install xgrammar` runs these.
"""

import json
from typing import Any, Final

import pytest

from tests.effects.text.tools.samples import answer

# Formats here, and the models that xgrammar has tags of: of Cohere it has another, newer
# one, and in Harmony's headers it allows fewer spaces.
MODELS: Final = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4_1",
    "gemma4": "gemma_4",
    "glm47": "glm_4_7",
    "kimi_k2": "kimi",
    "llama3_json": "llama",
    "minimax_m2": "minimax",
    "hermes": "qwen_3",
    "qwen3_coder": "qwen_3_coder",
}
# White space, and the end of reasoning, that xgrammar has before calls.
BEFORE: Final = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41"), "\n\n"),
    "minimax_m2": "\n</think>\n\n\n\n\n",
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]
CALL: Final = {"city": "Zürich", "days": 3}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_xgrammar_allows(name: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tag = xgrammar.get_builtin_structural_tag(
        MODELS[name], tools=TOOLS, tool_choice="required", reasoning=False
    )
    grammar = xgrammar.Grammar.from_structural_tag(tag)

    def allows(text: str) -> bool:
        accepts: bool = xgrammar.testing._is_grammar_accept_string(grammar, text)
        return accepts

    before = BEFORE.get(name, "")
    text = before + answer(name, [("weather", CALL)])
    two = before + answer(name, [("weather", CALL), ("forecast", CALL)])
    assert allows(text), json.dumps(tag.model_dump())[:3000]
    assert allows(two)
    assert not allows(text.replace("weather", "other"))
