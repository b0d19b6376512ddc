"""What a step does on a device besides the model's own products: one interface.

A backend has the cache that a model attends through, and the operations that feed rows,
draw tokens and keep what was drawn. There are two: plain torch and numpy for the CPU
(`cpu_backend.py`), and Triton's kernels for a GPU (`cuda_backend.py`), whose references
in torch run where there is none. All tensors are on the backend's device; nothing here
waits for it, but on the CPU. What a backend is asked is the same, so a new one (of
another maker's GPUs, say) is one more file.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device_rows import DeviceRows
from minfer.effects.execution.routes import Routes
from minfer.effects.models.cache import PagedCache
from minfer.effects.models.spec import ModelSpec
from minfer.plan import Copy, Open


class Cache(PagedCache, Protocol):
    """The cache of a model's layers, as an executor keeps it."""

    @property
    def data(self) -> Tensor:
        """All of it; how it is laid out is the backend's."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy positions of blocks, in all layers."""
        ...

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """A row gets these blocks to write to, the first of them from the slot `start`
        on; what an earlier owner left there must not reach it.
        """
        ...


@frozen(eq=False)
class Drawn:
    """What a sampler drew, and where it could not: both [rows] int32."""

    tokens: Tensor
    broken: Tensor  # 1 where logits are not finite: the token means nothing


class Shaper(Protocol):
    """Changes the logits of rows that ask for it, as `minfer.shape` says, and keeps what
    that needs of the tokens before.
    """

    def open(self, row: int, opened: Open) -> None:
        """A row is taken over; what is launched after this finds it so."""
        ...

    def shape(self, logits: Tensor, who: Tensor, positions: Tensor) -> Tensor:
        """Logits [draws, vocab] in float32 as tokens at `positions` are drawn from them;
        of rows that ask for nothing as they were.
        """
        ...

    def count(self, who: Tensor, positions: Tensor, drawn: Drawn) -> None:
        """These tokens were drawn."""
        ...


class Backend(Protocol):
    """The operations of a step on one device."""

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        ...

    @property
    def routes(self) -> Routes:
        """Which kernels serve what."""
        ...

    @property
    def described(self) -> list[tuple[str, str]]:
        """The same in words, for whom it concerns: journals, `minfer plan`."""
        ...

    def make_cache(
        self, spec: ModelSpec, blocks: int, block_size: int, length: int
    ) -> Cache:
        """A cache that a model can run with, for positions below `length`. Raises
        MemoryError or torch.OutOfMemoryError.
        """
        ...

    def make_shaper(self, rows: DeviceRows) -> Shaper:
        """What shapes the logits of these rows. Raises torch.OutOfMemoryError."""
        ...

    def num_splits(self, decode_rows: int, spec: ModelSpec, context: int) -> int:
        """Ranges that contexts of up to `context` tokens are cut into, for so many decode
        rows.
        """
        ...

    def fuses(self, tokens: int, intermediate: int) -> bool:
        """Whether a product of gate and up that includes SiLU would be faster."""
        ...

    def scatter(self, arena: Tensor, pairs: Tensor) -> None:
        """Change words of `arena`; see `kernels.rows.scatter`."""
        ...

    def gather(
        self,
        rows: Tensor,
        given: Tensor | None,
        last: Tensor,
        next_: Tensor,
        table: Tensor,
        block_size: int,
        tokens: Tensor,
        positions: Tensor,
        ahead: Tensor,
        slots: Tensor,
    ) -> None:
        """Inputs of a step; see `kernels.rows.gather`."""
        ...

    def sample(
        self,
        logits: Tensor,
        who: Tensor,
        rows: DeviceRows,
        positions: Tensor,
        *,
        filtered: bool,
        streams: Tensor | None = None,
    ) -> Drawn:
        """Draw a token at `positions` [draws] from each of `logits` [draws, vocab].

        Draw i is of device row who[i] and is made as that row was opened to sample.
        `filtered` False promises that none of them leaves tokens out. `streams` [device
        rows] are drawn by instead of the rows' own, if there are any.
        """
        ...

    def advance(
        self,
        rows: Tensor,
        positions: Tensor,
        drawn: Tensor,
        broken: Tensor,
        last: Tensor,
        next_: Tensor,
        scratch: int,
        out: Tensor,
    ) -> None:
        """Keep what rows drew; see `kernels.rows.advance`."""
        ...

    def spread(
        self,
        rows: Tensor,
        counts: Tensor,
        said: Tensor,
        proposed: Tensor | None,
        next_: Tensor,
        scratch: int,
        out: Tensor,
    ) -> None:
        """Drafts as inputs; see `kernels.verify.spread`."""
        ...

    def stand(
        self,
        before: Tensor,
        drafts: Tensor,
        owners: Tensor,
        last: Tensor,
        next_: Tensor,
        place: int,
        scratch: int,
        who: Tensor,
        positions: Tensor,
        accepted: Tensor,
    ) -> None:
        """Whose draft is what was drawn in its place; see `kernels.verify.stand`."""
        ...

    def keep(self, logits: Tensor, who: Tensor, out: Tensor, scratch: int) -> None:
        """Keep logits of rows but for the scratch row; see `kernels.masks.keep`."""
        ...

    def hide(self, kept: Tensor, who: Tensor, masks: Tensor) -> Tensor:
        """Logits that were kept for rows, without what is not allowed; see
        `kernels.masks.hide`.
        """
        ...

    def logprobs(
        self, logits: Tensor, tokens: Tensor, who: Tensor, asked: Tensor, out: Tensor
    ) -> None:
        """Log-probabilities of what was drawn; see `kernels.logprobs.logprobs`."""
        ...
