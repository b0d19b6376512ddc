"""Tokenizers of checkpoints without tokenizer.json, against the files' own libraries."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from minfer.effects.text import tokenizer_conversion
from minfer.effects.text.tokenizer import Tokenizer, TokenizerError

# None begins with a blank: transformers puts no other one before it, sentencepiece does.
TEXTS = (
    "the thing in an inn",
    "two  blanks, a tab\tand\nlines\n\n",
    "naïve café, 東京 🙂 Ünïcödé",
    "def f(x):\n    return x ** 2 + 12345",
    "<s>the</s>",
)
CORPUS = "the thing that thinks in the inn and then another one\n" * 20
RANKS = [bytes([value]) for value in range(256)]
RANKS += [b"th", b"the", b"in", b" t", b" th", b" the", b"an", b"and"]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROLS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>")
Encode = Callable[[str], list[int]]


def write(folder: Path, model_type: str, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sentencepiece_files(folder: Path) -> Encode:
    (folder / "corpus").write_text(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    write(folder, "llama", tokenizer_class="LlamaTokenizer", chat_template="{{ 1 }}")
    processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return processor.encode


def tiktoken_files(folder: Path) -> Encode:
    lines = [f"{base64.b64encode(text).decode()} {i}" for i, text in enumerate(RANKS)]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    write(folder, "llama", tokenizer_class="PreTrainedTokenizerFast")
    pattern = (  # transformers takes that of GPT-4 and Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = {text: i for i, text in enumerate(RANKS)}
    encoding = tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return encoding.encode


def tekken_files(folder: Path) -> Encode:
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(text).decode(), "token_str": None}
        for i, text in enumerate(RANKS)
    ]
    controls = [
        {"rank": i, "token_str": text, "is_control": True}
        for i, text in enumerate(CONTROLS)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + len(CONTROLS),
        "default_num_special_tokens": len(CONTROLS),
        "version": "v7",
    }
    document = {"config": config, "vocab": vocabulary, "special_tokens": controls}
    (folder / "tekken.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tekkenizer = Tekkenizer.from_file(folder / "tekken.json")
    return lambda text: tekkenizer.encode(text, bos=True, eos=False)


def merges_files(folder: Path) -> Encode:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS.splitlines(),
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
        ),
    )
    backend.model.save(str(folder))
    write(folder, "gpt2", tokenizer_class="GPT2Tokenizer")
    return lambda text: backend.encode(text).ids


@pytest.fixture(autouse=True)
def cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home


@pytest.mark.long
@pytest.mark.parametrize(
    "write_files", [sentencepiece_files, tiktoken_files, tekken_files, merges_files]
)
def test_files_without_tokenizer_json_are_converted_once(
    write_files: Callable[[Path], Encode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = write_files(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    tokenizer = Tokenizer(tmp_path)
    for text in TEXTS:
        # Only transformers reads special tokens in a text.
        if "<s>" not in text:
            assert tokenizer.encode(text) == encode(text), text
    assert {path.name for path in tmp_path.iterdir()} == before
    monkeypatch.setattr(
        tokenizer_conversion, "_convert_in_process", None
    )  # kept: not run again
    assert Tokenizer(tmp_path).encode(TEXTS[0]) == encode(TEXTS[0])


@pytest.mark.long
def test_what_cannot_be_converted_is_refused_with_the_command(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    (tmp_path / "own.py").write_text(f"open({str(proof)!r}, 'w')\n")
    (tmp_path / "qwen.tiktoken").write_bytes(base64.b64encode(b"a") + b" 0\n")
    auto_map = {"AutoTokenizer": ["own.Tokenizer", None]}
    write(tmp_path, "llama", tokenizer_class="LlamaTokenizer", auto_map=auto_map)
    with pytest.raises(TokenizerError, match=r"qwen\.tiktoken \(.+from_pretrained"):
        Tokenizer(tmp_path)
    assert not proof.exists()


def test_missing_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("sys.executable", "/bin/false")
    monkeypatch.setattr(tokenizer_conversion, "_is_installed", lambda _: False)
    with pytest.raises(TokenizerError, match=r"pip install '\.\[tokenizers\]'"):
        Tokenizer(tmp_path)


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not found"):
        Tokenizer(tmp_path)
