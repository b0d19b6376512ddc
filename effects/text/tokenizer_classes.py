"""The tokenizer classes of transformers 5 that rebuild what tokenizer.json holds.

`AutoTokenizer` chooses a class by config.json's `model_type` and by the `tokenizer_class`
of tokenizer_config.json. Most checkpoints get the plain class, which takes tokenizer.json
as it is. The classes below keep its vocabulary, merges and post-processor, and bring a
normalizer, a pre-tokenizer, a decoder and special tokens of their own: the same files
give other token ids. Classes that are not listed are for models that minfer does not
run; their tokenizer.json is taken as it is, and `minfer verify` says so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from attrs import frozen

PLAIN: Final = "TokenizersBackend"  # takes tokenizer.json as it is
State = dict[str, Any]  # a component of a tokenizer, as tokenizer.json spells it


@frozen(kw_only=True)
class TokenizerClass:
    """The components of a class. `components` and `model` are made from
    tokenizer_config.json.
    """

    special_tokens: Mapping[str, str]  # by name, where the config names none
    model: Mapping[str, Any]  # settings of its byte-pair encoding
    components: Callable[[Mapping[str, Any]], State]  # normalizer, pre_tokenizer, decoder
    more_tokens: tuple[str, ...] = ()  # special, where the config lists none
    # The beginning of each text, whatever the post-processor of tokenizer.json is.
    begins: Literal["as the file says", "plain", "with bos_token"] = "as the file says"
    # All special tokens are added once more: by their texts, without the flags that files
    # give them (single_word, lstrip, ...), or as they are, as special ones.
    adds_again: Literal["nothing", "texts", "tokens"] = "nothing"
    unknown_token: bool = False  # byte-pair encoding gets the `unk_token`
    # The `pad_token` is that of the padding in tokenizer.json, where the config has none.
    pad_token_from_file: bool = False


def _byte_level(prefix: bool, regex: bool = True, trim: bool = True) -> State:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": trim,
        "use_regex": regex,
    }


def _metaspace_components(config: Mapping[str, Any]) -> State:
    """Llama's: blanks as ▁, one before the text, or after each special token too."""
    prefix = _prefix_space(config, default=True)
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": _fallback_decoder(*[strip] * prefix),
    }


def _fallback_decoder(*extra_steps: State) -> State:
    blanks = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *extra_steps]
    return {"type": "Sequence", "decoders": steps}


def _gemma_components(_config: Mapping[str, Any]) -> State:
    blank = {"String": " "}
    split = {"behavior": "MergedWithPrevious", "invert": False}
    return {
        "normalizer": {"type": "Replace", "pattern": blank, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": blank, **split},
        "decoder": _fallback_decoder(),
    }


def _qwen_components(letters: str, marks: str) -> Callable[[Mapping[str, Any]], State]:
    """Qwen's: words by a regular expression over classes of characters."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + letters + r"+|\p{N}"
        r"| ?[^\s\p{L}" + marks + r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split_options = {"behavior": "Isolated", "invert": False}
    split = {"type": "Split", "pattern": {"Regex": regex}, **split_options}

    def components(config: Mapping[str, Any]) -> State:
        level = _byte_level(_prefix_space(config), regex=False)
        return {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "decoder": _byte_level(prefix=True),
        }

    return components


def _gpt2_components(config: Mapping[str, Any]) -> State:
    return {
        "normalizer": None,
        "pre_tokenizer": _byte_level(_prefix_space(config)),
        "decoder": _byte_level(prefix=True),
    }


def _neox_components(config: Mapping[str, Any]) -> State:
    trim = bool(config.get("trim_offsets", True))
    level = _byte_level(_prefix_space(config), trim=trim)
    return {
        **_gpt2_components(config),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": level,
    }


def _cohere_components(config: Mapping[str, Any]) -> State:
    level = _byte_level(_prefix_space(config))
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
        "decoder": level,
    }


def _prefix_space(config: Mapping[str, Any], *, default: bool = False) -> bool:
    value = config.get("add_prefix_space")
    return default if value is None else bool(value)


def _named(text: str, *names: str) -> dict[str, str]:
    return {f"{name}_token": text for name in names}


def _code_llama_components(config: Mapping[str, Any]) -> State:
    """Llama's, but for a first blank that is taken off whether one was put there or not,
    and never a blank after a special token.
    """
    components = _metaspace_components({**config, "legacy": False})
    return {**components, "decoder": _metaspace_components({})["decoder"]}


_SPM: Final = {"fuse_unk": True, "byte_fallback": True}
_LLAMA: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_FILL: Final = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_AFFIXES: Final = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_ENDS: Final = _named("<|endoftext|>", "unk", "eos")
_QWEN: Final = _ENDS | _named("<|endoftext|>", "pad")
_GPT2: Final = _ENDS | _named("<|endoftext|>", "bos")
CLASSES: Final[Mapping[str, TokenizerClass]] = {
    "LlamaTokenizer": TokenizerClass(
        special_tokens=_LLAMA,
        model=_SPM,
        components=_metaspace_components,
        pad_token_from_file=True,
    ),
    "CodeLlamaTokenizer": TokenizerClass(
        special_tokens=_LLAMA | _FILL,
        more_tokens=tuple(_FILL.values()),
        model=_SPM,
        components=_code_llama_components,
        unknown_token=True,
        begins="with bos_token",
        pad_token_from_file=True,
    ),
    "GemmaTokenizer": TokenizerClass(
        special_tokens={
            f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
        },
        model=_SPM,
        components=_gemma_components,
        unknown_token=True,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        special_tokens=_QWEN,
        model=_AFFIXES,
        components=_qwen_components(r"\p{L}", ""),
        adds_again="texts",
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        special_tokens=_QWEN,
        model=_AFFIXES,
        components=_qwen_components(r"[\p{L}\p{M}]", r"\p{M}"),
    ),
    "GPT2Tokenizer": TokenizerClass(
        special_tokens=_GPT2, model=_AFFIXES, components=_gpt2_components
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        special_tokens=_GPT2 | {"pad_token": "<|padding|>"},
        model=_AFFIXES,
        components=_neox_components,
        begins="plain",
    ),
    "CohereTokenizer": TokenizerClass(
        special_tokens={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        model=_AFFIXES,
        components=_cohere_components,
        adds_again="tokens",
    ),
}
# The class of a `model_type`, in transformers; others have none of their own.
_MODEL_TYPES: Final = {
    "Qwen2Tokenizer": "dots3_note internvl moss_transcribe_diarize qwen2 qwen2_5_vl "
    "qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text "
    "recurrent_gemma zaya",
    "CohereTokenizer": "cohere cohere2",
    PLAIN: "beam bigbird_pegasus ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe "
    "glm4_moe_lite glm4v glm4v_moe got_ocr2 gpt_bigcode granite granitemoe "
    "granitemoehybrid granitemoeshared hyperclovax internlm3 iquestcoder jamba kimi_k25 "
    "kimi_linear llava llava_next mimo_v2_flash minicpm3 minimax_m2 ministral "
    "ministral3 mistral mistral3 mixtral modernbert-decoder nemotron olmo2 olmo3 "
    "olmo_hybrid persimmon phi3 phimoe smolvlm stablelm vipllava xlm-roberta-xl",
}
CLASS_BY_MODEL_TYPE: Final[Mapping[str, str]] = {
    kind: name for name, kinds in _MODEL_TYPES.items() for kind in kinds.split()
}
_MISTRAL: Final = {"ministral", "ministral3", "mistral", "mixtral"}
# Types whose class holds whatever tokenizer_config.json names.
_FIXED_CLASS_TYPES: Final = (
    "ernie4_5 ernie4_5_moe fuyu hyperclovax internlm3 iquestcoder jamba llava llava_next "
    "minicpm3 minimax_m2 modernbert-decoder nemotron phi3 phimoe qwen2 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen4_exp smolvlm vipllava"
)
FIXED_CLASS_TYPES: Final = frozenset(_FIXED_CLASS_TYPES.split())


def class_name(
    model: Mapping[str, Any], tokenizer: Mapping[str, Any], byte_level: bool
) -> str:
    """The class that `AutoTokenizer` chooses, of `CLASSES`, or `PLAIN`.

    `model` is config.json, `tokenizer` tokenizer_config.json; `byte_level` says that
    tokenizer.json mentions ByteLevel.
    """
    model_type = str(model.get("model_type") or "")
    class_of_type = CLASS_BY_MODEL_TYPE.get(model_type)
    named = tokenizer.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(named, str):
        return class_of_type or PLAIN
    named = named.removesuffix("Fast")
    auto_map = tokenizer.get("auto_map")
    if not (auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map):
        overruled = model_type in FIXED_CLASS_TYPES
        foreign = named == "LlamaTokenizer" and byte_level
        if foreign and not overruled and model_type not in _MISTRAL:
            return PLAIN
        if class_of_type and class_of_type != named:
            named = (
                PLAIN if class_of_type == PLAIN else class_of_type if overruled else named
            )
    return named if named in CLASSES else PLAIN
