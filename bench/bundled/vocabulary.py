"""The tokenizer of both models: byte-level BPE, and what marks turns, reasoning and
calls.

Digits are tokens of their own, so that a number's places line up; nothing is normalised,
so every text survives a round trip. The split before merges is Qwen's: readers that
assume it for this architecture then agree with the file.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE: Final = 4096
CONTEXT: Final = 2048
LONGEST: Final = 20  # bytes of a token
END, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL: Final = (END, TURN_START, TURN_END, PAD)  # these ids: 0, 1, 2, 3
# Marks that are part of an answer's text, and so not special.
MARKS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja").read_text("utf-8")


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer for such texts."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[*SPECIAL, *MARKS],
        max_token_length=LONGEST,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _plain_marks(tokenizer)


def _plain_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with marks that are not special: trainers know no others."""
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(written))


def settings() -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }


def generation() -> dict[str, Any]:
    """The contents of generation_config.json: ends of documents and of turns stop."""
    return {
        "bos_token_id": 0,
        "do_sample": True,
        "eos_token_id": [0, SPECIAL.index(TURN_END)],
        "pad_token_id": SPECIAL.index(PAD),
        "temperature": 0.7,
        "top_p": 0.9,
    }
