"""Tokenizer against transformers, streaming against whole decoding, stop strings against
search.
"""

import json
import random
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minfer.effects.models.checkpoint import CheckpointError, CorruptFileError
from minfer.effects.text.chat import ChatOptions, ChatTemplateError, render_chat
from minfer.effects.text.tokenizer import (
    _ALPHABET,
    Detokenizer,
    StopMatcher,
    TextError,
    Tokenizer,
    TokenizerError,
)

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "naïve café — “quoted” 日本語テキスト 👩‍👩‍👧 🇩🇪 🙂🙂",
    "x" * 9,
]
TEXTS = [
    "",
    " ",
    "def add(a, b):\n    return a",
    "日本語 👩‍👩‍👧 ünï",
    "a<|end|>b <|start|>",
    "<think>x</think>",
    "\x00\x7f\ufffd\u200b",
    "a\r\n\t b",
]
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]


def train() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


BACKEND = train().to_str()


def save(folder: Path, backend: Backend | None = None, **options: Any) -> None:
    backend = backend or Backend.from_str(BACKEND)
    made: Any = PreTrainedTokenizerFast
    made(
        tokenizer_object=backend,
        **{
            "eos_token": "<|end|>",
            "bos_token": "<|start|>",
            "pad_token": "<|pad|>",
            **options,
        },
    ).save_pretrained(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save(tmp_path)
    return Tokenizer(tmp_path)


def agree(folder: Path) -> None:
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        plain = ours.encode(text, add_special_tokens=False)
        assert plain == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert all(
        theirs.decode([i], skip_special_tokens=True) == "" for i in ours.special_ids
    )
    begin = ours.encode(ours.special_tokens["bos_token"], add_special_tokens=False)
    assert begin == [theirs.bos_token_id]
    assert theirs.eos_token_id in ours.eos_ids


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
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
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


def test_missing_and_corrupt_files(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: not found.*save_pretrained"
    ):
        Tokenizer(tmp_path)
    save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_bytes()
    for broken in (b"", b"{}", whole[:500], b"\xff\xfe"):
        path.write_bytes(broken)
        with pytest.raises(
            TokenizerError, match=r"tokenizer\.json: corrupt.*save_pretrained"
        ):
            Tokenizer(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorruptFileError, match="tokenizer_config"):
        Tokenizer(tmp_path)
    assert issubclass(TokenizerError, CheckpointError)


def test_lone_surrogates_raise(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save(tmp_path)
    code = (
        "import sys; from minfer.effects.text.tokenizer import Tokenizer; "
        f"Tokenizer({str(tmp_path)!r}); "
        "assert not {'torch', 'transformers', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def stream(
    tokenizer: Tokenizer, ids: list[int], draw: random.Random, *, skip: bool
) -> list[str]:
    decoder = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    while at < len(ids):
        step = draw.choice([1, 1, 1, 2, 5])
        pieces.append(decoder.push(ids[at : at + step]))
        at += step
    return [*pieces, decoder.push([], final=True)]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    """Random tokens are mostly invalid UTF-8: broken characters everywhere."""
    draw = random.Random(seed)
    if seed % 3 == 0:  # single bytes of real text: every character split
        ids = in_bytes(tokenizer, "é日👩‍👩‍👧🇩🇪a🙂".encode())
        ids[draw.randrange(len(ids)) :] = ids[: draw.randrange(len(ids))]
    elif seed % 3 == 1:
        ids = [
            draw.randrange(tokenizer._backend.get_vocab_size() + 5)
            for _ in range(draw.randrange(80))
        ]
    else:
        ids = tokenizer.encode("".join(draw.choices(CORPUS + TEXTS, k=6)))
    for skip in (True, False):
        pieces = stream(tokenizer, ids, draw, skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def in_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids that spell `data` byte by byte."""
    letters = {value: char for char, value in _ALPHABET.items()}
    ids = [tokenizer._backend.token_to_id(letters[byte]) for byte in data]
    assert None not in ids
    return [token for token in ids if token is not None]


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = "日👩‍👩‍👧é"
    decoder = Detokenizer(tokenizer)
    ids = in_bytes(tokenizer, text.encode())
    pieces = [decoder.push([token]) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert decoder.push([], final=True) == ""


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    decoder = Detokenizer(tokenizer)
    ids = in_bytes(tokenizer, "a日".encode()[:-1])
    assert decoder.push(ids) == "a"
    assert decoder.push([], final=True) == tokenizer.decode(ids)[1:] == "\ufffd"


def test_tokenizers_with_byte_fallback_stream_too(tmp_path: Path) -> None:
    """The kind that sentencepiece models have: spaces as ▁, unknown
    characters as <0x..>.
    """
    words = [
        "<|pad|>",
        "<|start|>",
        "<|end|>",
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
    ]
    backend = Backend(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("▁", "a"), ("▁a", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",  # noqa: S106 - a token of text
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    save(tmp_path, backend)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.byte_level
    for text in ["ab a b", "a日ab 👩‍👩‍👧a", "  a  b", "é" * 40]:
        ids = tokenizer.encode(text)
        for seed in range(5):
            pieces = stream(tokenizer, ids, random.Random(seed), skip=True)
            assert "".join(pieces) == tokenizer.decode(ids)
            assert not any("\ufffd" in piece for piece in pieces)


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that ends first, the longest of those, found letter by letter."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings_against_search(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab\n", k=draw.randrange(40)))
    stops = [
        "".join(draw.choices("ab\n", k=draw.randrange(1, 7)))
        for _ in range(draw.randrange(1, 4))
    ]
    matcher, got, found, at = StopMatcher(stops), "", None, 0
    while at < len(text) and found is None:
        step = draw.randrange(4)
        piece, found = matcher.push(text[at : at + step])
        got, at = got + piece, at + step
        if found is None:  # only what may begin a stop string is held back
            held = text[len(got) : at]
            assert held == "" or any(stop.startswith(held) for stop in stops)
            assert searched(text[:at], stops)[1] is None
    if found is None:
        got += matcher.push("", final=True)[0]
    assert (got, found) == searched(text, stops)


def test_stop_strings_may_not_be_empty() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}
    {%- if m.extra is defined %}{{ m.extra | tojson }}{% endif %}
{%- endfor %}
{%- set ns = namespace(found=false) %}{% set ns.found = true %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if ns.found and add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
{%- for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}
{%- generation %}{{ eos_token }}{% endgeneration %}
{{- strftime_now('%Y') }} {{ flavour }}"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <kind> & 'brief'."},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "oh ",
        "extra": {"é": [1, None, "<b>"]},
        "name": None,
    },
]


@pytest.mark.parametrize("mode", ["prompt", "plain", "continue"])
@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f"}}]]
)
def test_chats_render_as_in_transformers(tmp_path: Path, mode: str, tools: Any) -> None:
    save(tmp_path, chat_template=TEMPLATE)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == TEMPLATE
    options: dict[str, Any] = {
        "add_generation_prompt": mode == "prompt",
        "tools": tools,
        "continue_final_message": mode == "continue",
    }
    how: Any = {**options, "chat_template_kwargs": {"flavour": "sweet"}}
    got = render_chat(ours, CHAT, how)
    assert got == theirs.apply_chat_template(
        CHAT, tokenize=False, flavour="sweet", **options
    )
    # As the template.
    assert mode == "continue" or str(datetime.now().year) in got  # noqa: DTZ005


@pytest.mark.parametrize(
    "template",
    [
        "a {%- generation -%} x {{ flavour }} {%- endgeneration %}\n b",
        (
            "{% for m in messages %}\n  "
            "{% generation %}\n{% set q = m %}{{ q.content }}\n"
            "  {% endgeneration %}\n{{ q }}{{ loop.index }}{% endfor %}"
        ),
        "{% if true %}{%generation%}{{ 1 }}{%+ endgeneration -%}   z{% endif %}",
        "{% set k = 1 %}{% generation %}{% set k = 2 %}{{ k }}{% endgeneration %}{{ k }}",
    ],
)
def test_generation_blocks_render_as_in_transformers(
    tmp_path: Path, template: str
) -> None:
    """With their white space and their scope."""
    save(tmp_path, chat_template=template)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    got = render_chat(ours, CHAT, {"chat_template_kwargs": {"flavour": "sweet"}})
    assert got == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, flavour="sweet"
    )


def test_templates_in_the_config_are_found(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for stored in (
        "hello",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "hello"}],
    ):
        path.write_text(json.dumps({**config, "chat_template": stored}))
        assert Tokenizer(tmp_path).chat_template == "hello"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer(tmp_path).chat_template == "newer"


@pytest.mark.parametrize(
    ("template", "messages", "options", "says"),
    [
        (None, CHAT, {}, "no chat template"),
        (TEMPLATE, [], {}, "no messages"),
        (TEMPLATE, ["hi"], {}, "found str"),
        (TEMPLATE, [{"role": "tool", "content": ""}], {}, "no tools"),
        ("{% if %}", CHAT, {}, "chat template failed"),
        ("{{ messages[9].content.x }}", CHAT, {}, "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHAT, {}, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, {}, "unsafe"),
        ("{{ dict.__class__.__init__ }}{{ dict.mro() }}", CHAT, {}, "failed"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", CHAT, {}, "failed"),
        ("{{ namespace(_x=1) }}", CHAT, {}, "cannot store"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", CHAT, {}, "recurses"),
        (
            "hi",
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": False},
            "does not show",
        ),
        ("hi", CHAT, {"continue_final_message": True}, "exclude"),
        (
            "hi",
            [{"role": "user"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "content is text",
        ),
    ],
)
def test_chats_that_fail(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Any,
    options: ChatOptions,
    says: str,
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(tokenizer, messages, options)
