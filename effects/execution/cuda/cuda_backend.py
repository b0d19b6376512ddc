"""A GPU's backend: Triton's kernels, or on the CPU their references in plain torch."""

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.execution.cuda.cuda_shaper import CudaShaper
from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.cache_layout import CacheLayout, plain_layout
from minfer.effects.models.ranks import Communicator
from minfer.kernels.logprobs import logprobs
from minfer.kernels.masked_logits import mask_logits, store_logits
from minfer.kernels.rows import advance, gather, scatter
from minfer.kernels.sample import sample, sample_divided
from minfer.kernels.verify_drafts import accept_drafts, write_draft_inputs
from minfer.records.config import EngineConfig


@frozen(eq=False)
class CudaBackend:
    """A backend; see `Backend`. `device` can be the CPU in tests."""

    device: torch.device
    routes: Routes

    scatter = staticmethod(scatter)
    gather = staticmethod(gather)
    advance = staticmethod(advance)
    logprobs = staticmethod(logprobs)
    keep = staticmethod(store_logits)
    hide = staticmethod(mask_logits)
    write_draft_inputs = staticmethod(write_draft_inputs)
    accept_drafts = staticmethod(accept_drafts)

    @classmethod
    def make(
        cls, spec: ModelSpec, config: EngineConfig, device: torch.device
    ) -> "CudaBackend":
        """Returns the backend for a model in an engine of these sizes."""
        return cls(device, Routes.for_device(spec, config, device))

    @property
    def described(self) -> list[tuple[str, str]]:
        """Which kernels serve what, in words."""
        return self.routes.described()

    def routes_of(self, spec: ModelSpec, config: EngineConfig) -> Routes:
        """Returns the routes of another model in the same engine."""
        return Routes.for_device(spec, config, self.device)

    def make_cache(
        self,
        spec: ModelSpec,
        pages: int,
        block_size: int,
        length: int,
        layout: CacheLayout | None = None,
    ) -> CudaCache:
        """Returns a cache for positions below `length`. torch.OutOfMemoryError."""
        layout = plain_layout(spec, block_size) if layout is None else layout
        return CudaCache.make(spec, layout, pages, block_size, length, self.device)

    def make_shaper(self, rows: DeviceRows) -> CudaShaper:
        """Returns the shaper of these rows' logits. torch.OutOfMemoryError."""
        return CudaShaper(rows, self.device)

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
        """Sample a token for each row, without a sort."""
        tokens, broken = sample(
            logits=logits,
            rows=rows,
            values=device_rows.sampling,
            streams=device_rows.stream if streams is None else streams,
            positions=positions,
            filtered=filtered,
        )
        return DrawnTokens(tokens, broken)

    def sample_divided(
        self,
        logits_part: Tensor,
        rows: Tensor,
        device_rows: DeviceRows,
        positions: Tensor,
        ranks: Communicator,
    ) -> DrawnTokens | None:
        """Sample from the best tokens of all ranks' parts."""
        drawn = sample_divided(
            logits=logits_part,
            rows=rows,
            values=device_rows.sampling,
            streams=device_rows.stream,
            positions=positions,
            vocab=device_rows.vocab,
            first=ranks.rank_info.tensor_rank * logits_part.shape[1],
            exchange=ranks.gather,
        )
        return None if drawn is None else DrawnTokens(*drawn)
