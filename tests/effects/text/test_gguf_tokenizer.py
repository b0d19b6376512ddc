"""Tokenizers in GGUF files, beside those that the files were written from."""

import json
import random
import unicodedata
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import CohereTokenizer, GemmaTokenizer, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.gguf_pretokenizers import PRETOKENIZERS
from minfer.effects.text.tokenizer import Tokenizer
from tests.effects.models.gguf.written import add, add_tokenizer, finish
from tests.effects.text.languages import LANGUAGES
from tests.effects.text.trained import BACKEND, BYTES, falls_back

PARTS: Final = (
    *LANGUAGES.values(),
    "def add(a, b):\n    return a + b\n",
    "don't WE'LL I'm",
    "1234567 3.14 0x1f",
    "   ",
    "\n\n",
    "\t \r\n",
    "<|end|>",
    "<|im_start|>user\n",
    "<tool_call>",
    "camelCaseHTTPServer",
    "▁a b",
    "<unk>",
    "a<unk> b</s>",
    "...!?",
)
TEXTS: Final = [
    "".join(draw.choice(PARTS)[: draw.randrange(1, 30)] for _ in range(draw.randrange(5)))
    for draw in map(random.Random, range(1000))
]
# Of Llama 3's tokenizer.json.
LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As in the tokenizer.json of gpt-oss.
O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def writer_of(path: Path, rows: int, arch: str = "llama") -> gguf.GGUFWriter:
    """A file of a model with so many rows of embeddings, but without layers."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(32)
    kind = gguf.GGMLQuantizationType.F32
    add(writer, "token_embd.weight", np.zeros((rows, 8), np.float32), kind)
    return writer


def written(path: Path, backend: Backend, pre: str, **ids: int) -> Tokenizer:
    """Minfer's tokenizer of a file with a byte-level one."""
    writer = writer_of(path, backend.get_vocab_size(), "qwen2")
    add_tokenizer(writer, backend, pre, **ids)
    finish(writer)
    return Tokenizer(path)


def check(tokenizer: Tokenizer, reference: Any, texts: list[str] = TEXTS) -> None:
    """Compare ids, and texts of ids."""
    ids = [tokenizer.encode(text) for text in texts]
    assert ids == [encoding.ids for encoding in reference.encode_batch(texts)]
    for text_ids in ids[:100]:
        assert tokenizer.decode(text_ids) == reference.decode(text_ids)


def byte_level(**settings: Any) -> Backend:
    """A trained tokenizer with an added token that is not special."""
    backend = Backend.from_str(BACKEND)
    for name, component in settings.items():
        setattr(backend, name, component)
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


def split(pattern: str) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, level])


def test_the_bundled_models_tokenizer(tmp_path: Path) -> None:
    folder = bundled_folder()
    reference = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer = written(tmp_path / "model.gguf", reference, "qwen2", eos=0, padding=3)
    # Files do not say that it does not normalise.
    check(tokenizer, reference, [unicodedata.normalize("NFC", text) for text in TEXTS])
    beside = Tokenizer(folder)
    assert tokenizer.eos_ids == (0, 2)  # <|im_end|>, too
    assert tokenizer.special_tokens == {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
    }
    assert tokenizer.special_ids == beside.special_ids
    assert tokenizer.added_ids == beside.added_ids


def test_words_are_divided_as_the_name_says(tmp_path: Path) -> None:
    # Merges over all borders of words.
    vocab: dict[str, int] = json.loads(BACKEND)["model"]["vocab"]
    pairs = [(a, b) for a in "Ġa1Ċ'e" for b in "Ġa1Ċ'e"]
    for a, b in pairs:
        vocab.setdefault(a + b, len(vocab))
    cases = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        "llama-bpe": split(LLAMA3),
    }
    cases |= dict.fromkeys(("refact", "starcoder"), cases["smollm"])
    cases |= dict.fromkeys(("gpt-4o", "minimax-m2", "llama4"), split(O200K))
    cases |= dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), split(LLAMA3))
    for name, words in cases.items():
        bpe = models.BPE(vocab, pairs, ignore_merges=name == "llama-bpe")
        reference = byte_level(model=bpe, pre_tokenizer=words)
        check(written(tmp_path / f"{name}.gguf", reference, name), reference)
    make: Any
    for name, make in (("qwen2", Qwen2Tokenizer), ("command-r", CohereTokenizer)):
        reference = make(vocab=vocab, merges=pairs).backend_tokenizer
        check(written(tmp_path / f"{name}.gguf", reference, name), reference)


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_texts_come_back(tmp_path: Path, name: str) -> None:
    tokenizer = written(tmp_path / "model.gguf", byte_level(), name)
    for text in LANGUAGES.values():
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3"])
def test_sentencepieces_kind(tmp_path: Path, arch: str) -> None:
    gemma = arch.startswith("gemma")
    prefix = not gemma
    words = ["▁", *"abcden日é\n", "▁a", "▁ab", "ab", "abc", "nd", "and", "▁and"]
    words += ["▁▁", "▁▁▁▁"]
    names = ["<unk>", "<s>", "</s>", *BYTES, *words, "<tool_call>"]
    kinds = [2, 3, 3, *[6] * len(BYTES), *[1] * len(words), 4]
    draw = random.Random(0)
    scores = [-draw.random() for _ in names]
    path = tmp_path / "model.gguf"
    writer = writer_of(path, len(names), arch)
    writer.add_tokenizer_model("llama")
    # Converters write Gemma's runs of blanks so, without scores of their own.
    blanks = {"▁▁": "  ", "▁▁▁▁": "    "} if gemma else {}
    for name in blanks:
        kinds[names.index(name)], scores[names.index(name)] = 4, -1000.0
    writer.add_token_list([blanks.get(name, name) for name in names])
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(prefix)
    finish(writer)

    pieces = {name: i for i, name in enumerate(names) if kinds[i] in (1, 4)}
    by_score = {name: float(-i) if gemma else scores[i] for name, i in pieces.items()}
    vocab = {name: i for i, name in enumerate(names)}
    reference = falls_back(strip=prefix)
    reference.model = models.BPE(
        vocab,
        generate_merges(pieces, by_score),
        unk_token="<unk>",  # noqa: S106 - a token of text
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    reference.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    reference.pre_tokenizer = pre_tokenizers.Sequence([])
    reference.add_special_tokens(["<unk>", "<s>", "</s>"])
    reference.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer = Tokenizer(path)
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert plain == [reference.encode(text).ids for text in TEXTS]
    assert tokenizer.encode("a") == [1, *reference.encode("a").ids]
    assert [tokenizer.decode(ids) for ids in plain] == [
        reference.decode(ids, skip_special_tokens=True) for ids in plain
    ]
    assert tokenizer.in_bytes
    assert tokenizer.strips == prefix


def test_gemma_4s_kind(tmp_path: Path) -> None:
    """Merges of tokens as they are, which the file has, and bytes for what is unknown."""
    pairs = [("▁", "▁"), ("▁", "a"), ("▁a", "b"), ("a", "b"), ("\n", "\n"), ("n", "d")]
    merged = [left + right for left, right in pairs]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *BYTES, *"▁abcden日é\n"]
    names += [*merged, "<tool_call>", "<turn|>", "<|tool_response>"]
    vocab = {name: i for i, name in enumerate(names)}
    kinds = [1] * len(names)
    for name in [*names[:5], "<turn|>"]:
        kinds[vocab[name]] = 3  # the converter marks the unknown token so, too
    for name in BYTES:
        kinds[vocab[name]] = 6
    for name in ("<tool_call>", "<|tool_response>"):
        kinds[vocab[name]] = 4
    path = tmp_path / "model.gguf"
    writer = writer_of(path, len(names), "gemma4")
    writer.add_sliding_window_pattern([False])
    writer.add_head_count_kv(1)
    writer.add_key_length(4)
    writer.add_key_length_swa(4)
    writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_scores([-1000.0] * len(names))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    for name in ("pad", "eos", "bos", "unk", "mask"):
        getattr(writer, f"add_{name}_token_id")(vocab[f"<{name}>"])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)  # llama.cpp puts it there all the same
    finish(writer)

    make: Any = GemmaTokenizer
    reference = make(vocab=vocab, merges=pairs).backend_tokenizer
    special = [name for name, kind in zip(names, kinds, strict=True) if kind == 3]
    reference.add_special_tokens(special)
    added = ("<tool_call>", "<|tool_response>")
    reference.add_tokens([AddedToken(name, normalized=False) for name in added])
    tokenizer = Tokenizer(path)
    texts = [*TEXTS, "a\n\n\nb", "  a   ab", "<|tool_response>ab<turn|>"]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert plain == [reference.encode(text).ids for text in texts]
    assert tokenizer.encode("a") == [vocab["<bos>"], *reference.encode("a").ids]
    assert [tokenizer.decode(ids) for ids in plain] == [
        reference.decode(ids, skip_special_tokens=True) for ids in plain
    ]
    ends = [vocab[name] for name in ("<eos>", "<turn|>", "<|tool_response>")]
    assert [*tokenizer.eos_ids] == ends


def test_chat_templates_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    backend = byte_level()
    writer = writer_of(path, backend.get_vocab_size(), "qwen2")
    add_tokenizer(writer, backend, "llama-bpe", bos=1, eos=2)
    writer.add_chat_template(
        [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ]
    )
    writer.add_add_eos_token(True)
    finish(writer)
    tokenizer = Tokenizer(path)
    assert (tokenizer.templates.plain, tokenizer.templates.with_tools) == (
        "plain",
        "tools",
    )
    changed = tokenizer.with_template("own")
    assert (changed.templates.plain, changed.templates.with_tools) == ("own", None)
    assert (tokenizer.chat_template, changed.all_templates) == ("plain", "own")
    assert tokenizer.encode("a")[0] == 1  # as in llama.cpp, where the file does not say
    assert tokenizer.encode("a")[-1] == 2


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tokenizer.ggml.pre", "new", "ggml.pre = 'new' is not supported; llama-bpe, "),
        (
            "tokenizer.ggml.model",
            "t5",
            "ggml.model = 't5' is not supported; gpt2, llama, gemma4 are",
        ),
        ("tokenizer.ggml.eos_token_id", 9999, "must be an integer from 0 to 338"),
        ("tokenizer.ggml.merges", ["a"], "merges has 'a' as element 0, not two tokens"),
        ("tokenizer.ggml.merges", ["a 日"], "the tokenizer cannot be built"),
        ("tokenizer.ggml.tokens", ["a", "a"], "tokens has the same string twice"),
        ("tokenizer.ggml.tokens", ["a"] * 999, "an array of 1 to 339 tokens"),
        (
            "tokenizer.ggml.tokens",
            ["a" * 2000],
            "a string of 2000 characters; at most 1024",
        ),
        ("tokenizer.ggml.token_type", [1], "must be an array of 339 elements, as"),
        ("tokenizer.ggml.add_bos_token", "yes", "must be true or false, found 'yes'"),
    ],
)
def test_faults_are_named(tmp_path: Path, key: str, value: Any, error: str) -> None:
    path = tmp_path / "model.gguf"
    backend = byte_level()
    writer = writer_of(path, backend.get_vocab_size(), "qwen2")
    add_tokenizer(writer, backend, "gpt-2", eos=2)
    pairs = writer.kv_data[0]
    pairs.pop(key, None)
    if key == "tokenizer.ggml.tokens":
        pairs.pop("tokenizer.ggml.token_type")
        pairs.pop("tokenizer.ggml.eos_token_id")
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
    finish(writer)
    with pytest.raises(CheckpointError, match=error) as caught:
        Tokenizer(path)
    assert str(path) in str(caught.value)
