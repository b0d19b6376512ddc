"""A small corpus and its tokenizer, made once."""

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from bench.bundled import corpus
from bench.bundled.dialogues import any_dialogue
from bench.bundled.prepare import CORPUS, TOKENIZER
from bench.bundled.sources import Source, Sources
from bench.bundled.vocabulary import train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundled")
    names = ("corpus", "packing", "model", "train")
    texts = [(Path("bench/bundled") / f"{name}.py").read_text("utf-8") for name in names]
    files = [
        Source("minfer", name, text) for name, text in zip(names, texts, strict=True)
    ]
    sources = Sources(
        trained=files[:3], held_out=files[3:], licences={"minfer": "MIT"}, left_out=0
    )
    corpus.write(sources, folder / CORPUS)
    rng = Random(0)
    tokenizer = train([*texts, *(any_dialogue(rng).text() for _ in range(1500))])
    (folder / TOKENIZER).write_text(tokenizer.to_str(), "utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / TOKENIZER))
