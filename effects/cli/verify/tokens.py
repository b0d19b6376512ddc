"""Texts and conversations as token ids, by minfer and by transformers."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from minfer.effects.cli.verify.findings import NOTE, SKIPPED, Check, judge
from minfer.effects.cli.verify.passages import TALKS, TEXTS, TOOLS
from minfer.effects.text.chat_templates import ChatOptions, render_chat
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tokenizer_classes import CLASSES, PLAIN


def check_tokenizer(
    folder: Path, minfer_tokenizer: Tokenizer, reference: Any
) -> Iterator[Check]:
    """Token ids, text of token ids, and special tokens.

    The reference is AutoTokenizer; where its class brings parts of its own and is not
    one that minfer knows, with the parts of tokenizer.json, which minfer takes.
    """
    named = sorted(set(minfer_tokenizer.special_tokens.values()))
    texts = [*TEXTS, *(f"a {token} b{token}" for token in named)]
    is_known = type(reference).__name__ in {*CLASSES, PLAIN}
    is_known = is_known or not (folder / "tokenizer.json").is_file()
    differ = [] if is_known else _apply_tokenizer_file(folder, reference, texts)
    if differ:
        reason = (
            f"{type(reference).__name__} of transformers brings a normalizer or "
            "pre-tokenizer that tokenizer.json, which holds here, has not; no fault of "
            "the model's"
        )
        such = f"{len(differ)} texts differ, such as {differ[0][-40:]!r}"
        yield Check("tokenizer class", NOTE, f"{reason}: {such}")
    bad = []
    for text in texts:
        bad += _round_trip_errors(text, minfer_tokenizer, reference)
    # Classes make up special tokens that are not named.
    for name, token in minfer_tokenizer.special_tokens.items():
        expected = getattr(reference, name)
        bad += [] if expected == token else [f"{name} is {token!r} and not {expected!r}"]
    yield judge("tokenizer", bad, f"{len(texts)} texts there and back, special tokens")


def _apply_tokenizer_file(
    folder: Path, reference: Any, texts: Sequence[str]
) -> list[str]:
    """Have their tokenizer follow tokenizer.json; returns the texts to which that makes a
    difference.
    """
    before = [reference.encode(text) for text in texts]
    file = Backend.from_file(str(folder / "tokenizer.json"))
    backend = reference.backend_tokenizer
    backend.normalizer = file.normalizer
    backend.pre_tokenizer = file.pre_tokenizer
    backend.decoder = file.decoder
    return [
        text
        for text, ids in zip(texts, before, strict=True)
        if reference.encode(text) != ids
    ]


def _round_trip_errors(
    text: str, minfer_tokenizer: Tokenizer, reference: Any
) -> list[str]:
    """The differences in a text's ids, or in their decoded text."""
    bad = []
    try:
        ids = reference.encode(text)
    except Exception as error:  # of tokenizers' own code, which has no class of errors
        return [f"{text[:40]!r} is refused by transformers: {error}"]
    encoded = minfer_tokenizer.encode(text)
    if encoded != ids:
        bad.append(f"{text[:40]!r} is {encoded[:8]} and not {ids[:8]}")
    back = reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    if minfer_tokenizer.decode(ids) != back:
        bad.append(f"{ids[:8]} is {minfer_tokenizer.decode(ids)[:40]!r}")
    return bad


def check_template(minfer_tokenizer: Tokenizer, reference: Any) -> Check:
    """Compare conversations rendered by both; refusing one is a result too."""
    if minfer_tokenizer.all_templates is None:
        return Check("chat template", SKIPPED, "the model has none")
    bad = []
    ways: list[ChatOptions] = [
        {"add_generation_prompt": prompt, "tools": tools}
        for prompt in (True, False)
        for tools in (None, TOOLS)
    ]
    for talk, options in [(talk, options) for talk in TALKS for options in ways]:
        rendered = expected = None
        with suppress(Exception):  # a template raises what it likes
            rendered = render_chat(minfer_tokenizer, talk, options)
        with suppress(Exception):
            expected = reference.apply_chat_template(talk, tokenize=False, **options)
        bad += [] if rendered == expected else [f"{rendered!r} and not {expected!r}"]
    return judge("chat template", bad, f"{len(ways) * len(TALKS)} conversations")
