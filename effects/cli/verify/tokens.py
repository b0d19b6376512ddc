"""Texts and conversations as token ids, by minfer and by transformers."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from minfer.effects.cli.verify.findings import NOTE, SKIPPED, Check, judged
from minfer.effects.cli.verify.passages import TALKS, TEXTS, TOOLS
from minfer.effects.text.chat_templates import ChatOptions, render_chat
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tokenizer_classes import CLASSES, PLAIN


def tokenizer(folder: Path, ours: Tokenizer, theirs: Any) -> Iterator[Check]:
    """Token ids, text of token ids, and special tokens.

    The reference is AutoTokenizer; where its class brings parts of its own and is not
    one that minfer knows, with the parts of tokenizer.json, which minfer takes.
    """
    named = sorted(set(ours.special_tokens.values()))
    texts = [*TEXTS, *(f"a {token} b{token}" for token in named)]
    known = type(theirs).__name__ in {*CLASSES, PLAIN}
    known = known or not (folder / "tokenizer.json").is_file()
    differ = [] if known else _as_the_file_says(folder, theirs, texts)
    if differ:
        what = (
            f"{type(theirs).__name__} of transformers brings a normalizer or "
            "pre-tokenizer that tokenizer.json, which holds here, has not; no fault of "
            "the model's"
        )
        such = f"{len(differ)} texts differ, such as {differ[0][-40:]!r}"
        yield Check("tokenizer class", NOTE, f"{what}: {such}")
    bad = []
    for text in texts:
        bad += _there_and_back(text, ours, theirs)
    # Classes make up special tokens that are not named.
    for name, token in ours.special_tokens.items():
        other = getattr(theirs, name)
        bad += [] if other == token else [f"{name} is {token!r} and not {other!r}"]
    yield judged("tokenizer", bad, f"{len(texts)} texts there and back, special tokens")


def _as_the_file_says(folder: Path, theirs: Any, texts: Sequence[str]) -> list[str]:
    """Have their tokenizer follow tokenizer.json; returns the texts to which that makes a
    difference.
    """
    before = [theirs.encode(text) for text in texts]
    file = Backend.from_file(str(folder / "tokenizer.json"))
    backend = theirs.backend_tokenizer
    backend.normalizer = file.normalizer
    backend.pre_tokenizer = file.pre_tokenizer
    backend.decoder = file.decoder
    return [
        text
        for text, ids in zip(texts, before, strict=True)
        if theirs.encode(text) != ids
    ]


def _there_and_back(text: str, ours: Tokenizer, theirs: Any) -> list[str]:
    """The differences in a text's ids, or in their decoded text."""
    bad = []
    ids = theirs.encode(text)
    found = ours.encode(text)
    if found != ids:
        bad.append(f"{text[:40]!r} is {found[:8]} and not {ids[:8]}")
    back = theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    if ours.decode(ids) != back:
        bad.append(f"{ids[:8]} is {ours.decode(ids)[:40]!r}")
    return bad


def template(ours: Tokenizer, theirs: Any) -> Check:
    """Compare conversations rendered by both; refusing one is a result too."""
    if ours.all_templates is None:
        return Check("chat template", SKIPPED, "the model has none")
    bad = []
    ways: list[ChatOptions] = [
        {"add_generation_prompt": prompt, "tools": tools}
        for prompt in (True, False)
        for tools in (None, TOOLS)
    ]
    for talk, how in [(talk, how) for talk in TALKS for how in ways]:
        found = right = None
        with suppress(Exception):  # a template raises what it likes
            found = render_chat(ours, talk, how)
        with suppress(Exception):
            right = theirs.apply_chat_template(talk, tokenize=False, **how)
        bad += [] if found == right else [f"{found!r} and not {right!r}"]
    return judged("chat template", bad, f"{len(ways) * len(TALKS)} conversations")
