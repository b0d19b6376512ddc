"""The tokenizer against transformers'."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors
from transformers import AutoTokenizer

from minfer.effects.models.checkpoint.checkpoint import CheckpointError, CorruptFileError
from minfer.effects.text.tokenizer import TextError, Tokenizer, TokenizerError
from tests.effects.text.trained import BACKEND, TEXTS, falls_back, save


def agree(folder: Path) -> None:
    tokenizer, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert plain == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )
        assert tokenizer.token_names(ids) == reference.convert_ids_to_tokens(ids)
    assert tokenizer.special_ids >= set(reference.all_special_ids)
    assert all(
        reference.decode([i], skip_special_tokens=True) == ""
        for i in tokenizer.special_ids
    )
    begin = tokenizer.encode(
        tokenizer.special_tokens["bos_token"], add_special_tokens=False
    )
    assert begin == [reference.bos_token_id]
    assert reference.eos_token_id in tokenizer.eos_ids


def bos_template() -> Backend:
    backend = Backend.from_str(BACKEND)
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 1)]
    )
    return backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extra_special_tokens": ["<think>", "</think>"]},
        {"eos_token": "<|other end|>"},
    ],
)
def test_agrees_with_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, **options)
    agree(tmp_path)


def test_begin_token_of_the_template(tmp_path: Path) -> None:
    save(tmp_path, bos_template())
    agree(tmp_path)
    assert Tokenizer(tmp_path).encode("a")[0] == 1


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {
        "341": {
            "content": "</think>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": False,
        },
        "340": {
            "content": "<think>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        },
    }
    path.write_text(json.dumps(config))
    agree(tmp_path)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = Backend.from_str(BACKEND)
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    save(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("zqzqzqz")) == 7


def test_eos_ids_are_merged(tmp_path: Path) -> None:
    save(tmp_path)
    assert Tokenizer(tmp_path).eos_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert Tokenizer(tmp_path).eos_ids == (9, 7, 2)


@pytest.mark.parametrize("odd", [-1, [-1, -100], 10**30, 1.5, "2", True, [[7]], {}])
def test_ids_that_are_none_end_no_sequence(tmp_path: Path, odd: Any) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": odd}))
    assert Tokenizer(tmp_path).eos_ids == (2,)


def test_missing_and_corrupt_files(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: not found.*save_pretrained"
    ):
        Tokenizer(tmp_path)
    save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = path.read_bytes()
    for broken in (b"", b"{}", content[:500], b"\xff\xfe"):
        path.write_bytes(broken)
        with pytest.raises(
            TokenizerError, match=r"tokenizer\.json: corrupt.*save_pretrained"
        ):
            Tokenizer(tmp_path)
    path.write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="tokenizer_config"):
        Tokenizer(tmp_path)
    assert issubclass(TokenizerError, CheckpointError)


def test_lone_surrogates_raise(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.long
def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save(tmp_path)
    code = (
        "import sys; from minfer.effects.text.tokenizer import Tokenizer; "
        f"Tokenizer({str(tmp_path)!r}); "
        "assert not {'torch', 'transformers', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bytes_of_a_token_that_stands_for_one(tmp_path: Path) -> None:
    save(tmp_path, falls_back())
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.in_bytes, tokenizer.byte_level) == (True, False)
    (first, *_) = tokenizer.encode("ü", add_special_tokens=False)[1:]
    assert tokenizer.token_bytes(first) == "ü".encode()[:1]
    assert tokenizer.whole_text(first) is None  # half a character
    (word,) = tokenizer.encode("ab", add_special_tokens=False)
    assert (tokenizer.token_bytes(word), tokenizer.whole_text(word)) == (b" ab", " ab")


def test_an_unusual_decoder_is_not_taken_for_bytes(tmp_path: Path) -> None:
    for number, decoder in enumerate([decoders.Strip("_", 1, 0), decoders.Metaspace()]):
        backend = falls_back(strip=False)
        chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*chain, decoder])
        folder = tmp_path / str(number)
        save(folder, backend)
        assert not Tokenizer(folder).in_bytes
        assert Tokenizer(folder).whole_text(5) is None
