"""The CPU's backend: plain torch for products and rows, numpy for sampling."""

from typing import Final

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from minfer.effects.execution.cpu.cpu_sampler import Sampling, choose
from minfer.effects.execution.cpu.cpu_shaper import CpuShaper
from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.routes import Routes
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.cache_layout import CacheLayout, plain_layout
from minfer.kernels import plain, quantized
from minfer.records.config import EngineConfig
from minfer.sampling.reference_sampler import RowSampling

# Sampling of the scratch row: the cheapest.
PADDING_SAMPLING: Final = RowSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample=0
)


@frozen(eq=False)
class CachedSampling:
    """The last sampled rows and their parameters, reused while steps stay the same."""

    rows: list[int]
    opened: int  # the value of `DeviceRows.opened`
    sampling: Sampling


def describe_products(spec: ModelSpec) -> list[tuple[str, str]]:
    """Returns what multiplies a model's quantized matrices on this processor."""
    quantization = spec.quantization
    if quantization is None:
        return []
    return [
        ("matrix products", quantized.product_description(quantization.format.scheme))
    ]


@define(eq=False)
class CpuBackend:
    """A backend; see `Backend`."""

    device: torch.device = field(factory=lambda: torch.device("cpu"))
    routes: Routes = field(factory=lambda: Routes(no_quack="it is for GPUs"))
    described: list[tuple[str, str]] = field(factory=list)  # see `describe_products`
    cached: CachedSampling | None = None

    scatter = staticmethod(plain.scatter)
    gather = staticmethod(plain.gather)
    advance = staticmethod(plain.advance)
    logprobs = staticmethod(plain.logprobs)
    keep = staticmethod(plain.store_logits)
    hide = staticmethod(plain.mask_logits)
    write_draft_inputs = staticmethod(plain.write_draft_inputs)
    accept_drafts = staticmethod(plain.accept_drafts)

    def make_cache(
        self,
        spec: ModelSpec,
        pages: int,
        block_size: int,
        length: int,
        layout: CacheLayout | None = None,
    ) -> KVCache:
        """Returns a cache for positions below `length`, with more pages than the engine
        knows of, for the scratch row: a page, and those of a state. MemoryError.
        """
        layout = plain_layout(spec, block_size) if layout is None else layout
        pages += 1 + layout.state_pages
        return make_cache(spec, pages, block_size, max_model_len=length, layout=layout)

    def make_shaper(self, rows: DeviceRows) -> CpuShaper:
        """Returns the shaper of these rows' logits."""
        return CpuShaper(rows)

    def routes_of(self, spec: ModelSpec, config: EngineConfig) -> Routes:  # noqa: ARG002  # a GPU's
        """Returns the same for all models: there is nothing to choose from."""
        return self.routes

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        device_rows: DeviceRows,
        positions: Tensor,
        *,
        filtered: bool,  # noqa: ARG002  # known row by row
        streams: Tensor | None = None,
    ) -> DrawnTokens:
        """Sample a token for each row, in numpy."""
        sampling = self._sampling(rows.tolist(), device_rows)
        if streams is not None:
            row_streams = streams.index_select(0, rows)[list(sampling.rows)]
            sampling = evolve(sampling, streams=row_streams.numpy().view(np.uint64))
        choice = choose(logits, sampling, positions.numpy())
        broken = torch.zeros_like(positions)
        if choice.broken:
            broken[list(choice.broken)] = 1
        tokens = np.where(broken, 0, choice.tokens).astype(np.int32)
        return DrawnTokens(torch.from_numpy(tokens), broken)

    def sample_divided(self, *_: object) -> None:
        """Logits are gathered: a CPU's step takes far longer than that."""

    def _sampling(self, rows: list[int], device_rows: DeviceRows) -> Sampling:
        last = self.cached
        if last is None or last.opened != device_rows.opened or last.rows != rows:
            owners = [device_rows.owners[row] for row in rows]
            row_params = [
                PADDING_SAMPLING if owner is None else owner.sampling for owner in owners
            ]
            last = CachedSampling(
                rows, device_rows.opened, Sampling.of(row_params, device_rows.vocab)
            )
            self.cached = last
        return last.sampling
