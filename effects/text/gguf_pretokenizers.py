"""Normalizers and pre-tokenizers of byte-level BPE, by their names in GGUF files
(`tokenizer.ggml.pre`). Each is taken from the tokenizer.json of the model that its name
means.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.tokenizer_classes import CLASSES, State


@frozen
class Pretokenizer:
    """How texts are divided into words before merges."""

    components: Mapping[str, Any]  # of tokenizer.json: normalizer, pre_tokenizer, decoder
    ignore_merges: bool = False  # a word in the vocabulary is one token
    add_bos: bool = False  # the default of `tokenizer.ggml.add_bos_token`


def _split(pattern: str) -> State:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def _byte_level_components(*splits: State, gpt2: bool = False) -> State:
    """Returns components that divide by each of `splits`; then, if `gpt2`, by GPT-2's
    pattern.
    """
    flags = {"add_prefix_space": False, "trim_offsets": True}
    level = {"type": "ByteLevel", **flags, "use_regex": gpt2}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
    }


_LAST_WORDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LAST_WORDS
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LAST_WORDS
)
_ENDS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O_PATTERN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LAST_WORDS
)
_DIGITS: Final = {"type": "Digits", "individual_digits": True}
_DEEPSEEK_CODER_SPLITS: Final = (
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    _DIGITS,
)
_LLAMA: Final = Pretokenizer(
    _byte_level_components(_split(_LLAMA3_PATTERN)), ignore_merges=True, add_bos=True
)
# llama.cpp divides words by the same pattern for all of these names.
_LIKE_LLAMA: Final = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
_LIKE_GPT_4O: Final = ("gpt-4o", "minimax-m2", "llama4")
_LIKE_SMOLLM: Final = ("smollm", "refact", "starcoder")
_QWEN: Final = Pretokenizer(CLASSES["Qwen2Tokenizer"].components({}))
PRETOKENIZERS: Final[Mapping[str, Pretokenizer]] = {
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "gpt-2": Pretokenizer(_byte_level_components(gpt2=True)),
    **dict.fromkeys(
        _LIKE_LLAMA, Pretokenizer(_byte_level_components(_split(_LLAMA3_PATTERN)))
    ),
    **dict.fromkeys(
        _LIKE_GPT_4O, Pretokenizer(_byte_level_components(_split(_GPT_4O_PATTERN)))
    ),
    **dict.fromkeys(
        _LIKE_SMOLLM, Pretokenizer(_byte_level_components(_DIGITS, gpt2=True))
    ),
    "tekken": Pretokenizer(
        _byte_level_components(_split(_TEKKEN_PATTERN)), ignore_merges=True, add_bos=True
    ),
    "command-r": Pretokenizer(CLASSES["CohereTokenizer"].components({})),
    "deepseek-coder": Pretokenizer(_byte_level_components(*_DEEPSEEK_CODER_SPLITS)),
}
