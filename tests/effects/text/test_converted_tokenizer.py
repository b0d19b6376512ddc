"""Folders without a tokenizer.json: as transformers and sentencepiece read them, or
refused with the command that writes one.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from minfer.effects.models.fallback import quiet
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tokenizer_loading import TokenizerError
from tests.effects.text.languages import LANGUAGES

TEXTS = ["def add(a, b):\n    return 12", "naïve café", *LANGUAGES.values(), ""]
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def described(folder: Path, **more: Any) -> Path:
    settings = {"tokenizer_class": "LlamaTokenizer", **SPECIAL, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.long
def test_a_sentencepiece_model_alone_is_read(tmp_path: Path) -> None:
    trained: Any = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 20))
    trained.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    described(tmp_path)
    ours = Tokenizer(tmp_path)
    read: Any = transformers.AutoTokenizer.from_pretrained
    with quiet():
        theirs = read(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    theirs = trained.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS[:2]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert ours.special_tokens == SPECIAL


def test_vocabulary_and_merges_alone_are_read(tmp_path: Path) -> None:
    letters = {
        letter: i for i, letter in enumerate(["<s>", "</s>", "<unk>", *"abc", "ab"])
    }
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    described(tmp_path, tokenizer_class="GPT2Tokenizer")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert Tokenizer(tmp_path).encode("abc") == [6, 5]


@pytest.mark.long
def test_tekken_alone_is_read(tmp_path: Path) -> None:
    common: Any = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    base: Any = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    pieces = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b" d", b" de", b"ef"]
    control = ["<unk>", "<s>", "</s>"]
    control += [one.value for one in base.SpecialTokens if one.value not in control]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + len(control),
        "default_num_special_tokens": len(control),
        "version": "v7",
    }
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for i, piece in enumerate(pieces)
    ]
    special = [
        {"rank": i, "token_str": text, "is_control": True}
        for i, text in enumerate(control)
    ]
    file = {"config": config, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    theirs = common.Tekkenizer.from_file(str(tmp_path / "tekken.json"))
    ours = Tokenizer(tmp_path)
    for text in ("abc de 12", *TEXTS):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, bos=False, eos=False)
    assert ours.special_tokens["eos_token"] == control[2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"no model"),
        ("qwen.tiktoken", base64.b64encode(b"a") + b" 0\n"),
        ("tekken.json", b"{}"),
    ],
)
def test_what_cannot_be_converted_says_which_command_can(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    described(tmp_path)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path)
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "tokenizer.json"))
    assert f"makes no tokenizer of {name} (" in said
    assert f".save_pretrained({str(tmp_path)!r})" in said


def test_code_of_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    (tmp_path / "own.py").write_text(f"open({str(proof)!r}, 'w')\n")
    (tmp_path / "qwen.tiktoken").write_bytes(b"")
    described(tmp_path, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    with pytest.raises(TokenizerError, match="not found, and transformers makes no"):
        Tokenizer(tmp_path)
    assert not proof.exists()
