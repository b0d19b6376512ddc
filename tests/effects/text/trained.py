"""A small tokenizer, trained here, and texts to try it with."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
    fast_class: Any = PreTrainedTokenizerFast
    fast_class(
        tokenizer_object=backend,
        **{
            "eos_token": "<|end|>",
            "bos_token": "<|start|>",
            "pad_token": "<|pad|>",
            **options,
        },
    ).save_pretrained(folder)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "▁ab", "ab", "日", "é"]


def falls_back(*, strip: bool = True) -> Backend:
    """Sentencepiece's kind: blanks as ▁, and unknown characters as bytes."""
    names = [*SPECIAL, "<unk>", *BYTES, *WORDS]
    backend = Backend(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [("▁", "a"), ("▁a", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",  # noqa: S106 - a token of text
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(chain + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_special_tokens(SPECIAL)
    return backend


def word_pieces() -> Backend:
    """A kind whose tokens are more than their bytes: blanks between words are nowhere."""
    words = ["[UNK]", *SPECIAL, "un", "##do", "##ing", "日", "##本", "é", "a", "b"]
    backend = Backend(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")  # noqa: S106 - likewise
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return backend
