"""Perplexity of a text, and divergence from the base's probabilities."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch import Tensor

from minfer.effects.cli.compare.results import Quality
from minfer.effects.cli.compare.text_windows import TextWindows, Window
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.state_parts import DEFAULT_STATE_DTYPE
from minfer.effects.setup.memory import size_text
from minfer.values.checks import ConfigError

# Positions whose logits are held at once: 150 MB of float32 for 150,000 tokens.
POSITIONS_PER_CHUNK: Final = 256


@frozen(eq=False)
class BaseProbabilities:
    """The base's log-probabilities at each position, in a file: float32, [positions,
    vocab].
    """

    rows: "np.memmap[tuple[int, int], np.dtype[np.float32]]"

    @classmethod
    def of(cls, folder: Path, positions: int, vocab: int) -> "BaseProbabilities":
        """Returns an empty file in a folder."""
        shape = (positions, vocab)
        return cls(np.memmap(folder / "base", np.float32, mode="w+", shape=shape))

    def write(self, start: int, values: Tensor) -> None:
        """Keep log-probabilities [count, vocab] from a position on."""
        self.rows[start : start + len(values)] = values.cpu().numpy()

    def read(self, start: int, like: Tensor) -> Tensor:
        """Returns as many as `like` has, on its device."""
        return torch.from_numpy(self.rows[start : start + len(like)]).to(like.device)


def check_disk(positions: int, vocab: int) -> None:
    """Raise ConfigError if the base's probabilities do not fit on the disk."""
    needs, folder = 4 * positions * vocab, tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise ConfigError(
            f"the base's probabilities need {size_text(needs)} in {folder}, which has "
            f"{size_text(free)}; lower --tokens, or name another folder in TMPDIR"
        )


@define
class Sums:
    """Sums over positions; the last two stay empty without a base."""

    positions: int = 0
    cost: float = 0.0  # nats
    divergence: float = 0.0  # nats
    agreed: int = 0
    compared: bool = field(default=False, kw_only=True)

    def add(self, log_probs: Tensor, targets: Tensor, base: Tensor | None) -> None:
        """Add positions with log-probabilities `log_probs` [count, vocab], next tokens
        [count], and the base's log-probabilities.
        """
        self.positions += len(log_probs)
        self.cost -= float(log_probs.gather(1, targets[:, None]).double().sum())
        if base is not None:
            self.compared = True
            terms = F.kl_div(log_probs, base, reduction="none", log_target=True)
            self.divergence += float(terms.sum(dtype=torch.float64))
            self.agreed += int((log_probs.argmax(-1) == base.argmax(-1)).sum())

    def quality(self) -> Quality:
        """Returns the means."""
        count = self.positions
        mean = torch.tensor(self.cost / count, dtype=torch.float64)
        return Quality(
            perplexity=float(mean.exp()),
            kl_divergence=self.divergence / count if self.compared else None,
            top1_agreement=self.agreed / count if self.compared else None,
        )


def score_text(
    executor: TorchExecutor,
    block_size: int,
    text: TextWindows,
    base: BaseProbabilities | None,
    *,
    is_base: bool,
) -> Quality:
    """Returns the quality of a model on a text; the base's probabilities are written to
    `base`, others compared with them.
    """
    sums = Sums()
    with executor.between_steps():
        for targets, log_probs in _log_probabilities(executor, block_size, text):
            start = sums.positions
            if base is not None and is_base:
                base.write(start, log_probs)
            base_log_probs = (
                None if base is None or is_base else base.read(start, log_probs)
            )
            sums.add(log_probs, targets, base_log_probs)
    return sums.quality()


def _log_probabilities(
    executor: TorchExecutor, block_size: int, text: TextWindows
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield next tokens [count] and log-probabilities [count, vocab] in float32, over all
    positions in order.
    """
    blocks = -(-text.length // block_size)
    pages = blocks + executor.state_pages(block_size)
    cache = executor.make_cache(pages, block_size, text.length)
    count = _positions_at_once(executor.runner.spec)
    for window in text.windows:
        for start in range(0, text.length - 1, count):
            row = _row(window, start, count, range(blocks), range(blocks, pages))
            batch = make_batch([row], block_size, executor.device)
            logits = executor.model(batch, cache)
            targets = window[start + 1 : start + 1 + len(row.tokens)]
            yield (
                torch.tensor(targets, device=logits.device),
                logits.float().log_softmax(-1),
            )


def _positions_at_once(spec: ModelSpec) -> int:
    """Returns the positions of a step: one where states are rounded behind each step, as
    they are in decode steps.
    """
    is_rounded = spec.has_states and spec.state_dtype != DEFAULT_STATE_DTYPE
    return 1 if is_rounded else POSITIONS_PER_CHUNK


def _row(window: Window, start: int, count: int, table: range, state: range) -> BatchRow:
    """Returns the inputs of the next `count` positions of a window, without its last
    token.
    """
    tokens = window[start : min(start + count, len(window) - 1)]
    return BatchRow(tokens, start, table, len(tokens), state)
