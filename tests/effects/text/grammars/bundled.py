"""The bundled model's vocabulary, and what a constraint lets through of a text."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import minfer.effects
from minfer.effects.text.grammars.grammar_library import GrammarError, Matcher
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.effects.text.tokenizer import Tokenizer
from minfer.sampling.structured import StructuredOutputs

FOLDER = Path(minfer.effects.__path__[0]) / "bundled" / "target"
ENDS = frozenset({0, 2})


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@cache
def vocab() -> int:
    """How many tokens the bundled model has."""
    size: int = json.loads((FOLDER / "config.json").read_text("utf-8"))["vocab_size"]
    return size


@cache
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(tokenizer().as_json(), vocab(), ENDS)


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}


def matcher(**requested: Any) -> Matcher:
    return compiler().compile(StructuredOutputs(**requested)).matcher()


def takes(text: str, **requested: Any) -> bool:
    """Whether a whole text is as asked, token by token within its masks."""
    walk = matcher(**requested)
    for token in ids(text):
        if token not in allowed(walk.mask()):
            return False
        walk.advance([token])
    return walk.may_end


def takes_value(schema: Any, value: Any) -> bool:
    return takes(
        json.dumps(value, separators=(",", ":"), ensure_ascii=False), json=schema
    )


def refusal(**requested: Any) -> GrammarError:
    """Why a constraint is not compiled."""
    try:
        matcher(**requested)
    except GrammarError as error:
        return error
    raise AssertionError(f"{requested} was compiled")
