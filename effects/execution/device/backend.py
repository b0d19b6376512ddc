"""The interface for what a step does on a device besides the model's own products.

A backend has the cache that a model attends through, and the operations that gather
inputs, sample tokens and store them in the rows. There are two: plain torch and numpy for
the CPU (`cpu_backend.py`), and Triton kernels for a GPU (`cuda_backend.py`), whose
references in torch run where there is no GPU. All tensors are on the backend's device;
nothing here waits for a GPU. A new backend (for GPUs of another vendor, say) is one more
file that implements this interface.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.cache_layout import CacheLayout
from minfer.effects.models.ranks import Communicator
from minfer.kernels.row_state import RowTensors, StepInputs
from minfer.records.config import EngineConfig
from minfer.records.plan import Copy, NewRow


class Cache(PagedCache, Protocol):
    """The cache of a model's layers, as an executor keeps it."""

    @property
    def data(self) -> Tensor:
        """All of the cache but scales; its layout is up to the backend."""
        ...

    def page_views(self) -> list[Tensor]:
        """Returns views [pages, ...] of all that is stored, scales of INT8 included."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy positions of blocks, in all layers."""
        ...

    def clear(self, blocks: Sequence[int], start: int = 0) -> None:
        """Prepare newly allocated blocks of a row, the first of them from slot `start`
        on: what the previous owner left there must not affect the row.
        """
        ...


@frozen(eq=False)
class DrawnTokens:
    """Sampled tokens, and which rows failed: both [rows] int32."""

    tokens: Tensor
    broken: Tensor  # 1 where logits are not finite: the token is meaningless


class Shaper(Protocol):
    """Changes the logits of rows that request it, as in `minfer.sampling.logits`, and
    keeps the state of earlier tokens that this needs.
    """

    def open(self, row: int, opened: NewRow) -> None:
        """Reset a row for a new owner, for all that is launched after this."""
        ...

    def shape(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits [draws, vocab] in float32 from which the tokens at
        `positions` are sampled; logits of rows that request no change stay as they are.
        """
        ...

    def count(self, rows: Tensor, positions: Tensor, drawn: DrawnTokens) -> None:
        """Count these sampled tokens."""
        ...


class Backend(Protocol):
    """The operations of a step on one device."""

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        ...

    @property
    def routes(self) -> Routes:
        """Which kernel serves which part of a step."""
        ...

    @property
    def described(self) -> list[tuple[str, str]]:
        """The routes in words, for journals and `minfer plan`."""
        ...

    def routes_of(self, spec: ModelSpec, config: EngineConfig) -> Routes:
        """Returns the routes of another model in the same engine: of a draft model."""
        ...

    def make_cache(
        self,
        spec: ModelSpec,
        pages: int,
        block_size: int,
        length: int,
        layout: CacheLayout | None = None,
    ) -> Cache:
        """Returns a cache for a model, for positions below `length`; without `layout`,
        all layers are one group. Raises MemoryError or torch.OutOfMemoryError.
        """
        ...

    def make_shaper(self, rows: DeviceRows) -> Shaper:
        """Returns the shaper of these rows' logits. Raises torch.OutOfMemoryError."""
        ...

    def scatter(self, arena: Tensor, pairs: Tensor) -> None:
        """Change words of `arena`; see `kernels.rows.scatter`."""
        ...

    def gather(
        self,
        rows: Tensor,
        extra: Tensor | None,
        state: RowTensors,
        block_size: int,
        out: StepInputs,
    ) -> None:
        """Gather a step's inputs; see `kernels.rows.gather`."""
        ...

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        device_rows: DeviceRows,
        positions: Tensor,
        *,
        filtered: bool,
        streams: Tensor | None = None,
    ) -> DrawnTokens:
        """Sample a token at `positions` [draws] from each row of `logits` [draws, vocab].

        Draw i is for device row rows[i], with that row's sampling parameters. `filtered`
        False promises that no row filters tokens. `streams` [device rows], if given,
        replace the rows' own noise streams.
        """
        ...

    def sample_divided(
        self,
        logits_part: Tensor,
        rows: Tensor,
        device_rows: DeviceRows,
        positions: Tensor,
        ranks: Communicator,
    ) -> DrawnTokens | None:
        """`sample` where each rank has a part [draws, columns] of the logits, and no row
        filters tokens; None where they must be gathered.
        """
        ...

    def advance(
        self,
        rows: Tensor,
        positions: Tensor,
        drawn: Tensor,
        broken: Tensor,
        state: RowTensors,
        out: Tensor,
    ) -> None:
        """Store sampled tokens in the rows; see `kernels.rows.advance`."""
        ...

    def write_draft_inputs(
        self,
        rows: Tensor,
        counts: Tensor,
        drafts: Tensor,
        proposed: Tensor | None,
        state: RowTensors,
        out: Tensor,
    ) -> None:
        """Write drafts as inputs; see `kernels.verify_drafts.write_draft_inputs`."""
        ...

    def accept_drafts(
        self,
        before: Tensor,
        drafts: Tensor,
        owners: Tensor,
        state: RowTensors,
        place: int,
        next_rows: Tensor,
        positions: Tensor,
        accepted: Tensor,
    ) -> None:
        """Find the rows whose draft equals the sampled token; see
        `kernels.verify_drafts.accept_drafts`.
        """
        ...

    def keep(self, logits: Tensor, rows: Tensor, out: Tensor, scratch: int) -> None:
        """Keep logits of all rows but the scratch row; see
        `kernels.masked_logits.store_logits`.
        """
        ...

    def hide(self, kept: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """Returns the kept logits of rows with disallowed tokens masked; see
        `kernels.masked_logits.mask_logits`.
        """
        ...

    def logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Tensor, requested: Tensor, out: Tensor
    ) -> None:
        """Compute sampled tokens' log-probabilities; see `kernels.logprobs.logprobs`."""
        ...
