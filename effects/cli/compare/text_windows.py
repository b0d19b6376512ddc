"""The text that levels are compared on, as windows of token ids."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attrs import frozen

from minfer.effects.cli.compare.levels import Level, naming
from minfer.effects.setup.prepare import Setup
from minfer.effects.text.tokenizer import Tokenizer
from minfer.values.checks import ConfigError

# Characters that are read for each token that is wanted: tokens are seldom longer.
CHARACTERS_PER_TOKEN: Final = 64

Window = tuple[int, ...]  # token ids


@frozen
class TextWindows:
    """A text's windows, all of the same length."""

    file: str
    sha256: str  # of the characters that were read, in UTF-8
    windows: tuple[Window, ...]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return len(self.windows[0])

    @property
    def positions(self) -> int:
        """Positions whose next token is in the same window."""
        return len(self.windows) * (self.length - 1)

    @property
    def ids(self) -> list[int]:
        """The token ids of all windows."""
        return [token for window in self.windows for token in window]


def read_windows(
    file: Path, max_tokens: int, levels: Sequence[Level], setups: Sequence[Setup]
) -> TextWindows:
    """Returns the windows of a text's first `max_tokens` tokens, for these levels.

    Raises ConfigError if it cannot be read, is shorter than a window, or has other token
    ids at another level.
    """
    text = _read(file, CHARACTERS_PER_TOKEN * max_tokens)
    length = min(max_tokens, *(setup.config.max_model_len for setup in setups))
    ids = _encoded(file, text, setups[0])[:max_tokens]
    for level, setup in zip(levels, setups, strict=True):
        if setup.folder != setups[0].folder:
            with naming(level):
                _check_equal(ids, _encoded(file, text, setup)[:max_tokens])
    if len(ids) < length:
        raise ConfigError(
            f"--text {file} has {len(ids)} tokens, fewer than a window of {length}; give "
            "a longer text, or lower --tokens or --max-model-len, which bound a window"
        )
    starts = range(0, len(ids) - length + 1, length)
    windows = tuple(tuple(ids[start : start + length]) for start in starts)
    return TextWindows(str(file), hashlib.sha256(text.encode()).hexdigest(), windows)


def _read(file: Path, characters: int) -> str:
    """Returns the beginning of a text. Raises ConfigError."""
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read(characters)
    except OSError as error:
        raise ConfigError(
            f"--text {file} cannot be read: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {file} is not UTF-8: {error}") from None


def _encoded(file: Path, text: str, setup: Setup) -> list[int]:
    """Returns a text's token ids. Raises ConfigError if the model has not all of them."""
    ids = Tokenizer(setup.folder).encode(text)
    size = setup.spec.vocab_size
    if max(ids, default=0) >= size:
        raise ConfigError(
            f"{file} has the token {max(ids)}, and the model has {size} tokens; its "
            "tokenizer.json is another model's"
        )
    return ids


def _check_equal(base: list[int], ids: list[int]) -> None:
    """Raise ConfigError if a level's token ids are not the base's."""
    if ids != base:
        raise ConfigError(
            "its tokenizer makes other tokens of the text than the base's; compare "
            "checkpoints of one tokenizer"
        )
