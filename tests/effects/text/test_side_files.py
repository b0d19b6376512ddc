"""What holds where the files of a tokenizer speak of the same thing: each row of the
table in `side_files` against transformers, on files that are written by hand.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minfer.effects.models.families.multimodal import MULTIMODAL
from minfer.effects.text import tokenizer_loading
from minfer.effects.text.detokenizer import Detokenizer
from minfer.effects.text.tokenizer import TextError, Tokenizer, TokenizerError
from minfer.effects.text.tokenizer_classes import (
    CLASS_BY_MODEL_TYPE,
    CLASSES,
    FIXED_CLASS_TYPES,
    PLAIN,
    class_name,
)
from tests.effects.text.trained import BACKEND, falls_back

CONFIG: Final = "tokenizer_config.json"
MAP: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
TEXTS: Final = ("a b", "ab <think>b", " a  <think> b", "a<think>", "cafe\u0301 ▁a")
FLAGS: Final = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized", "special"), False
)


def write(
    folder: Path,
    files: Mapping[str, Any],
    backend: Backend | None = None,
    kind: str = "llama",
) -> None:
    """A tokenizer and the files beside it; `kind` is the model type."""
    (backend or Backend.from_str(BACKEND)).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def agree(folder: Path, *texts: str) -> list[list[str]]:
    """The tokens of texts, which are transformers'."""
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    all_ids = []
    for text in texts or TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            text_of = reference.decode(ids, skip_special_tokens=special)
            assert tokenizer.decode(ids, skip_special_tokens=special) == text_of
            pieces = Detokenizer(tokenizer, skip_special_tokens=special)
            assert pieces.push(ids, final=True) == text_of
        all_ids.append(tokenizer.token_names(tokenizer.encode(text)))
    assert tokenizer.special_tokens == reference.special_tokens_map
    return all_ids


def entry(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, **FLAGS, **flags}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "olmo"])
@pytest.mark.parametrize("adds", [{"bos": True}, {"bos": True, "eos": True}, {}])
def test_the_post_processor_holds_whatever_the_config_says_of_begin_and_end(
    tmp_path: Path, kind: str, adds: dict[str, bool]
) -> None:
    emitted: dict[str, Any] = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    emitted |= {f"add_{name}_token": adds.get(name, False) for name in ("bos", "eos")}
    write(tmp_path, {CONFIG: emitted}, kind=kind)
    assert json.loads((tmp_path / CONFIG).read_text()) == emitted
    assert agree(tmp_path, "x") == [["x"]]
    backend = Backend.from_str(BACKEND)
    backend.post_processor = processors.TemplateProcessing(
        "<|start|> $A", "<|start|> $A $B", [("<|start|>", 1)]
    )
    write(tmp_path, {CONFIG: emitted}, backend, kind=kind)
    # This class drops it.
    expected = ["x"] if kind == "olmo" else ["<|start|>", "x"]
    assert agree(tmp_path, "x") == [expected]


@pytest.mark.parametrize("legacy", [True, False, None, "absent"])
@pytest.mark.parametrize("prefix", [True, False, None])
@pytest.mark.parametrize("normalizes", [True, False])
def test_llamas_blanks(
    tmp_path: Path, *, legacy: Any, prefix: bool | None, normalizes: bool
) -> None:
    """Yi-1.5's case: no `▁` behind a special token, unless `legacy` is true."""
    backend = falls_back()
    if normalizes:
        blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(blanks)
        backend.pre_tokenizer = None
    emitted = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": prefix}
    if legacy != "absent":
        emitted["legacy"] = legacy
    write(tmp_path, {CONFIG: emitted}, backend)
    (ids,) = agree(tmp_path, "<|start|>ab")
    behind = prefix is not False and legacy is True
    assert ids == ["<|start|>", *(["▁ab"] if behind else ["ab"])]
    agree(tmp_path)


NEW = {"340": entry("<think>")}
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # files, and the tokens of "a <think>b"
    "added_tokens.json alone": ({ADDED: {"<think>": 340}}, ["a", "Ġ", "<think>", "b"]),
    "added_tokens.json beside added_tokens_decoder": (
        {ADDED: {"<think>": 340}, CONFIG: {"added_tokens_decoder": {}}},
        ["a", "Ġ", "<", "t", "h", "i", "n", "k", ">", "b"],
    ),
    "additional_special_tokens": (
        {CONFIG: {"additional_special_tokens": ["<think>"]}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "additional_special_tokens beside extra_special_tokens": (
        {
            CONFIG: {
                "additional_special_tokens": ["<think>"],
                "extra_special_tokens": ["b"],
            }
        },
        ["a", "Ġ", "<", "t", "h", "i", "n", "k", ">", "b"],
    ),
    "extra_special_tokens with names": (
        {CONFIG: {"extra_special_tokens": {"think_token": "<think>"}}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "a token with a name of its own": (
        {CONFIG: {"think_token": "<think>"}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "additional_special_tokens of the map": (
        {MAP: {"additional_special_tokens": ["<think>"]}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "the map beside added_tokens_decoder": (
        {
            MAP: {"additional_special_tokens": ["b"], "pad_token": "a"},
            CONFIG: {"added_tokens_decoder": NEW, "pad_token": "<think>"},
        },
        ["a", "Ġ", "<think>", "b"],
    ),
    "the map before the config": (
        {MAP: {"pad_token": "<think>"}, CONFIG: {"pad_token": "Ġ<"}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "an object in the map": (
        {MAP: {"pad_token": entry("<think>", lstrip=True)}},
        ["a", "<think>", "b"],
    ),
    "an object with a type in the config": (
        {
            CONFIG: {
                "pad_token": {"__type": "AddedToken", **entry("<think>", rstrip=True)}
            }
        },
        ["a", "Ġ", "<think>", "b"],
    ),
    "flags of added_tokens_decoder": (
        {CONFIG: {"added_tokens_decoder": {"340": entry("<think>", lstrip=True)}}},
        ["a", "<think>", "b"],
    ),
    "flags of a named token are those of added_tokens_decoder": (
        {
            CONFIG: {
                "added_tokens_decoder": {"340": entry("<think>", lstrip=True)},
                "pad_token": "<think>",
            }
        },
        ["a", "<think>", "b"],
    ),
    "single words of added_tokens_decoder": (
        {CONFIG: {"added_tokens_decoder": {"340": entry("<think>", single_word=True)}}},
        ["a", "Ġ", "<", "t", "h", "i", "n", "k", ">", "b"],
    ),
    "flags of a token that tokenizer.json has": (
        {
            CONFIG: {
                "added_tokens_decoder": {"2": entry("<|end|>", special=True), **NEW},
                "eos_token": "<|end|>",
            }
        },
        ["a", "Ġ", "<think>", "b"],
    ),
    "a flag that is none": (
        {CONFIG: {"added_tokens_decoder": {"340": {**entry("<think>"), "new": 1}}}},
        ["a", "Ġ", "<think>", "b"],
    ),
    "a named token that nothing else has": (
        {CONFIG: {"bos_token": "<think>", "eos_token": None}},
        ["a", "Ġ", "<think>", "b"],
    ),
}

BARE: Final = (
    "an object in the map",
    "flags of a named token are those of added_tokens_decoder",
)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "cohere"])
@pytest.mark.parametrize("row", ROWS)
def test_added_tokens(tmp_path: Path, row: str, kind: str) -> None:
    files, expected = ROWS[row]
    write(tmp_path, files, kind=kind)
    ids = agree(tmp_path, "a <think>b")
    # Qwen's class takes the flags off named tokens.
    bare = kind == "qwen2" and row in BARE
    assert ids == [["a", "Ġ", "<think>", "b"] if bare else expected]
    agree(tmp_path)


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_skipped_as_decode_skips_them(
    tmp_path: Path, *, special: bool
) -> None:
    """A token that tokenizer.json has as special stays so whatever its flags become, and
    one that a normalizer respells is not skipped.
    """
    listed = {"2": entry("<|end|>", special=special)}
    write(tmp_path, {CONFIG: {"added_tokens_decoder": listed}})
    agree(tmp_path, "a<|end|>b")
    assert 2 in Tokenizer(tmp_path).special_ids
    backend = falls_back()
    backend.normalizer = normalizers.Prepend("▁")
    backend.add_tokens([AddedToken("<X>", special=special, normalized=True)])
    write(tmp_path, {}, backend, kind="mistral")
    agree(tmp_path, "a<X>b", "<X> a")
    assert backend.token_to_id("<X>") not in Tokenizer(tmp_path).special_ids
    (tmp_path / CONFIG).unlink()
    write(tmp_path, {ADDED: {"<|end|>": 2}})  # which does not say that it is special
    agree(tmp_path, "a<|end|>b")
    assert 2 in Tokenizer(tmp_path).special_ids


@pytest.mark.parametrize(
    "kind", [PLAIN, "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"]
)
def test_the_padding_of_tokenizer_json_names_a_token(tmp_path: Path, kind: str) -> None:
    backend = falls_back() if kind == "LlamaTokenizer" else Backend.from_str(BACKEND)
    backend.enable_padding(pad_id=300, pad_token="<think>")  # noqa: S106 - no password
    write(tmp_path, {CONFIG: {"tokenizer_class": kind}}, backend, kind="lfm2")
    agree(tmp_path)
    write(tmp_path, {CONFIG: {"tokenizer_class": kind, "pad_token": None}}, backend)
    agree(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({CONFIG: {"pad_token": entry("<think>", lstrip=True)}}, ["a", "<think>", "b"]),
        (
            {MAP: {"additional_special_tokens": [entry("<think>")]}},
            ["a", "Ġ", "<think>", "b"],
        ),
        ({CONFIG: {"pad_token": 3, "extra_special_tokens": 4}}, None),
    ],
)
def test_what_transformers_refuses_is_read_for_what_it_says(
    tmp_path: Path, files: dict[str, Any], expected: list[str] | None
) -> None:
    write(tmp_path, files)
    with pytest.raises((TypeError, AttributeError)):
        AutoTokenizer.from_pretrained(tmp_path).encode("a")
    tokenizer = Tokenizer(tmp_path)
    if expected is not None:
        assert tokenizer.token_names(tokenizer.encode("a <think>b")) == expected


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("pieces", [True, False])
def test_classes_that_bring_parts_of_their_own(
    tmp_path: Path, name: str, *, pieces: bool
) -> None:
    """Whatever tokenizer.json has, but where the class is known to be wrong for it."""
    backend = falls_back() if pieces else None
    emitted = {"tokenizer_class": f"{name}Fast", "unk_token": "a"}
    write(tmp_path, {CONFIG: emitted}, backend)
    reference_class = type(AutoTokenizer.from_pretrained(tmp_path)).__name__
    foreign = name == "LlamaTokenizer" and not pieces
    assert reference_class == (PLAIN if foreign else name)
    agree(tmp_path, "a b", "cafe\u0301 12 ab", "<|start|>a")


def test_the_table_of_classes_is_transformers() -> None:
    known_classes = {*CLASSES, PLAIN}
    reference_classes = {
        # With mistral-common, the table has its class, for folders with a tekken.json.
        kind: PLAIN if name == "MistralCommonBackend" else name
        for kind in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL)
        for name in [auto.TOKENIZER_MAPPING_NAMES.get(kind)]
    }
    assert {
        kind: name for kind, name in reference_classes.items() if name in known_classes
    } == CLASS_BY_MODEL_TYPE
    overruled = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert overruled & CLASS_BY_MODEL_TYPE.keys() == FIXED_CLASS_TYPES


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "phi3", "mistral", "none", *MULTIMODAL]
)
@pytest.mark.parametrize("byte_level", [True, False])
@pytest.mark.parametrize(
    "named", [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer"]
)
def test_which_class_is_chosen(
    tmp_path: Path, kind: str, *, byte_level: bool, named: str | None
) -> None:
    emitted = {} if named is None else {"tokenizer_class": named}
    write(tmp_path, {CONFIG: emitted}, None if byte_level else falls_back(), kind)
    reference_class = type(AutoTokenizer.from_pretrained(tmp_path)).__name__
    assert class_name({"model_type": kind}, emitted, byte_level) == reference_class


def test_special_tokens_that_are_to_be_split(tmp_path: Path) -> None:
    write(tmp_path, {CONFIG: {"split_special_tokens": True}})
    (ids,) = agree(tmp_path, "a<|end|>")
    assert "<|end|>" not in ids


def test_an_unknown_token_that_is_no_token_is_reported_with_the_text(
    tmp_path: Path,
) -> None:
    emitted = {"tokenizer_class": "GemmaTokenizer", "unk_token": "<none>"}
    write(tmp_path, {CONFIG: emitted}, kind="gemma")
    with pytest.raises(TextError, match="cannot encode the text: Unk token `<none>`"):
        Tokenizer(tmp_path).encode(" ")


def test_a_tokenizer_that_its_class_cannot_take(tmp_path: Path) -> None:
    write(tmp_path, {CONFIG: {"tokenizer_class": "LlamaTokenizer"}})
    path = tmp_path / "tokenizer.json"
    state = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **state}))
    agree(tmp_path, "a")
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: corrupt"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer"])
def test_what_is_as_its_class_makes_it_is_not_made_again(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a second, of a large vocabulary."""
    backend = falls_back() if name == "LlamaTokenizer" else None
    write(
        tmp_path, {CONFIG: {"tokenizer_class": name, "unk_token": "a"}}, backend, "qwen3"
    )
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    monkeypatch.setattr(tokenizer_loading, "_with_class_components", None)
    agree(tmp_path)
