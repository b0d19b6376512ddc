"""Tiny tokenizers, and the files beside them, drawn from a seed: every way in which the
files of a checkpoint name tokens, and contradict each other.
"""

import json
from pathlib import Path
from random import Random
from typing import Any, Final

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from tests.effects.text.trained import BYTES, train

NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
STORED: Final = ("<s>", "</s>", "<unk>", "<|im_start|>")  # in tokenizer.json
NEW: Final = ("<|im_end|>", "<think>", "</think>", "<tool>", "aé", "▁b", "</s>")
CLASSES: Final = (
    None,
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "GPT2TokenizerFast",
    "GPTNeoXTokenizerFast",
    "GemmaTokenizerFast",
    "CohereTokenizerFast",
    "Qwen3_5Tokenizer",
    "CodeLlamaTokenizer",
    "TokenizersBackend",
    "NoSuchTokenizer",
)
TALK: Final = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
TEMPLATES: Final = (
    TALK + "{{ bos_token }}",
    TALK + "{{ eos_token }}{{ image_token }}|{{ tools | length if tools }}",
    "{{ pad_token }}{{ unk_token }}" + TALK + "{{ '?' if add_generation_prompt }}",
    "tools: {{ tools | tojson if tools }}" + TALK,
)
PIECES: Final = ("▁", "a", "b", "c", "▁a", "▁ab", "ab", "日", "é", "▁▁", ".")
MERGES: Final = (("▁", "a"), ("▁a", "b"), ("a", "b"), ("▁", "▁"))
TRAINED: Final = train().to_str()


def byte_level(draw: Random) -> Backend:
    """Tokens of bytes, as GPT-2, Llama 3 and Qwen have them."""
    backend = Backend.from_str(TRAINED)
    if draw.random() < 0.3:
        backend.normalizer = normalizers.NFC()
    if draw.random() < 0.3:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=draw.random() < 0.3),
            ]
        )
    return backend


def sentence_pieces(draw: Random) -> Backend:
    """Llama 2's and Mistral's kind: blanks as ▁, by a normalizer or a pre-tokenizer."""
    names = [*STORED[:3], *BYTES, *PIECES]
    backend = Backend(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [*MERGES],
            byte_fallback=True,
            fuse_unk=True,
            unk_token=draw.choice(["<unk>", None]),
            ignore_merges=draw.random() < 0.2,
        )
    )
    if draw.random() < 0.6:  # Yi's
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        scheme = draw.choice(["first", "always", "never"])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=scheme, split=draw.random() < 0.3
        )
    blanks = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if draw.random() < 0.7 else []
    backend.decoder = decoders.Sequence([*blanks, *strip])
    return backend


def write_tokenizer(folder: Path, draw: Random) -> None:
    """Write tokenizer.json and what stands beside it."""
    backend = draw.choice([byte_level, sentence_pieces])(draw)
    stored = draw.sample(STORED, draw.randint(2, len(STORED)))
    backend.add_tokens([_token(text, draw) for text in stored])
    ends = [text for text in stored if draw.random() < 0.3]
    if ends or draw.random() < 0.3:
        single = " ".join([*ends[:1], "$A", *ends[1:]])
        ids = [(text, backend.token_to_id(text)) for text in ends]
        backend.post_processor = TemplateProcessing(single, f"{single} $B", ids)
    if draw.random() < 0.1:
        backend.enable_truncation(3)
    backend.save(str(folder / "tokenizer.json"))
    config = _config(draw, stored, backend)
    if draw.random() < 0.4:
        write_json(folder / "special_tokens_map.json", _special_map(draw, stored))
    if draw.random() < 0.3:
        first = backend.get_vocab_size()
        added = draw.sample(NEW, 3)
        write_json(
            folder / "added_tokens.json", {t: first + i for i, t in enumerate(added)}
        )
    _write_templates(folder, config, draw)
    if config or draw.random() < 0.8:
        write_json(folder / "tokenizer_config.json", config)


def _token(text: str, draw: Random) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {name: draw.random() < 0.5 for name in names if draw.random() < 0.3}
    return AddedToken(text, **flags)


def _entry(text: str, draw: Random) -> dict[str, Any]:
    """An added token as files have it."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": text} | {n: draw.random() < 0.4 for n in names}


def _named(draw: Random, stored: list[str]) -> Any:
    """A named token: its text or an object."""
    text = draw.choice([*stored, draw.choice(NEW)])
    if draw.random() < 0.3:
        return {"__type": "AddedToken", **_entry(text, draw)}
    return text


def _config(draw: Random, stored: list[str], backend: Backend) -> dict[str, Any]:
    config: dict[str, Any] = {}

    def may(share: float, name: str, *values: Any) -> None:
        if draw.random() < share:
            config[name] = draw.choice(values)

    may(0.8, "tokenizer_class", *CLASSES)
    may(0.3, "legacy", True, False, None)
    may(0.3, "add_prefix_space", True, False, None)
    may(0.3, "add_bos_token", True, False)
    may(0.3, "add_eos_token", True, False)
    may(0.1, "split_special_tokens", True, False)
    may(0.2, "clean_up_tokenization_spaces", True, False)
    for name in NAMES:
        may(0.6, name, _named(draw, stored), _named(draw, stored), None)
    may(0.2, "image_token", "<image>", "<think>")
    may(0.2, "additional_special_tokens", draw.sample(NEW, 2), [], None)
    may(0.2, "extra_special_tokens", draw.sample(NEW, 2), {"video_token": "<tool>"}, [])
    if draw.random() < 0.5:
        size = backend.get_vocab_size()
        old = {str(backend.token_to_id(t)): _entry(t, draw) for t in stored}
        new = {str(size + i): _entry(t, draw) for i, t in enumerate(draw.sample(NEW, 2))}
        listed = [*{**old, **new}.items()]
        draw.shuffle(listed)
        config["added_tokens_decoder"] = dict(listed[: draw.randint(0, len(listed))])
    return config


def _special_map(draw: Random, stored: list[str]) -> dict[str, Any]:
    special_map: dict[str, Any] = {}
    for name in draw.sample(NAMES, 3):
        text = draw.choice([*stored, draw.choice(NEW)])
        special_map[name] = _entry(text, draw) if draw.random() < 0.4 else text
    if draw.random() < 0.4:
        special_map["additional_special_tokens"] = draw.sample(NEW, 2)
    if draw.random() < 0.2:
        special_map["extra_special_tokens"] = draw.choice(
            [draw.sample(NEW, 2), {"video_token": "<tool>"}]
        )
    if draw.random() < 0.2:
        special_map["image_token"] = "<image>"  # noqa: S105 - a token of text
    return special_map


def _write_templates(folder: Path, config: dict[str, Any], draw: Random) -> None:
    def some() -> str:
        return draw.choice(TEMPLATES)

    if draw.random() < 0.7:
        listed = [
            {"name": name, "template": some()}
            for name in draw.sample(["default", "tool_use", "rag"], draw.randint(1, 3))
        ]
        config["chat_template"] = draw.choice([some(), listed, listed])
    if draw.random() < 0.3:
        (folder / "chat_template.jinja").write_text(some())
    if draw.random() < 0.2:
        (folder / "chat_template.json").write_text('{"chat_template": "never read"}')
    if draw.random() < 0.2:
        template_folder = folder / "additional_chat_templates"
        template_folder.mkdir()
        (
            template_folder / f"{draw.choice(['tool_use', 'rag', 'default'])}.jinja"
        ).write_text(some())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, its text as it is."""
    path.write_text(json.dumps(value, ensure_ascii=False))
