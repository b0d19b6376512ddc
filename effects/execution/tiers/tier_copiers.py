"""The copiers of an engine's tiers: host memory, and the keyed one."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from attrs import evolve

from minfer.effects.execution.tiers.block_folder import BlockFolder
from minfer.effects.execution.tiers.keyed_copier import BlocksRemovedError, KeyedCopier
from minfer.effects.execution.tiers.keyed_store import KeyedStore
from minfer.effects.execution.tiers.page_copier import PageCopier
from minfer.effects.execution.tiers.paged_tensors import PagedTensor
from minfer.effects.execution.tiers.transfer_thread import ReportEnd
from minfer.records.config import EngineConfig
from minfer.records.messages import Lost, Move, TransferCommand
from minfer.records.tiers import ExternalStore, HostTier
from minfer.values.checks import ConfigError

# Pages that are loaded to measure the rate of loads.
MEASURED_PAGES: Final = 32
# Measurements take at most this part of a folder: engines start together.
FOLDER_DIVISOR: Final = 4
_log = logging.getLogger("minfer.executor")
AnyTier = TypeVar("AnyTier", HostTier, ExternalStore)


class TierCopiers:
    """Performs transfers between the device and the tiers of a configuration."""

    def __init__(
        self,
        config: EngineConfig,
        make_tensors: Callable[[int, int], Sequence[PagedTensor]],
        store: KeyedStore | None,
    ) -> None:
        """`make_tensors` returns the tensors of the cache, given the number of pages in
        host memory and the number of slices; `store` has the blocks of the external
        store. Raises NoHostMemoryError.
        """
        self.bundle = max(group.pages for group in config.groups)  # pages of a block
        self.host: PageCopier | None = None
        self.keyed: KeyedCopier | None = None
        if store is not None:
            self.keyed = KeyedCopier(make_tensors, store, config.groups)
        if config.host is not None:
            self.host = PageCopier(make_tensors(config.host.pages, 1))

    def move(self, command: TransferCommand, report: ReportEnd) -> None:
        """Begin a transfer; `report` is called at its end, from any thread."""
        if isinstance(command, Move):
            if self.host is not None:
                self.host.move(command, report)
                return
        elif self.keyed is not None:
            self.keyed.move(command, report)
            return
        report(Lost(command.number, "there is no such tier for KV pages"))

    def with_costs(self, config: EngineConfig, token: float) -> EngineConfig:
        """Returns the configuration with the measured costs of loads, where the KV of a
        token is computed in `token` seconds. Before any plan. Raises ConfigError for a
        folder that cannot be used, and NoHostMemoryError.
        """
        host, keyed = config.host, config.external_store
        max_pages = min(config.num_blocks, MEASURED_PAGES)
        if host is not None and self.host is not None:
            count = min(max_pages, host.pages)
            host = _with_costs(host, self.host.seconds, 1, count, token)
        store = None if self.keyed is None else self.keyed.store
        if (
            keyed is not None
            and self.keyed is not None
            and isinstance(store, BlockFolder)
        ):
            seconds = partial(self.keyed.seconds, store)
            room = store.blocks(self.keyed.block_bytes) // FOLDER_DIVISOR
            blocks = max(1, min(max_pages // self.bundle, room))
            reason = ""
            try:
                keyed = _with_costs(keyed, seconds, self.bundle, blocks, token)
            except ConfigError:
                if not store.full:
                    raise
                reason = "it is full"
            except BlocksRemovedError:
                reason = "other engines removed the blocks that were to be loaded"
            if reason:
                _log.warning("loads from %s count as fast: %s", store.path, reason)
                keyed = evolve(keyed, token_seconds=token)
        return evolve(config, host=host, external_store=keyed)

    def close(self) -> None:
        """End all transfers, and release memory."""
        for copier in (self.host, self.keyed):
            if copier is not None:
                copier.close()


def _with_costs(
    tier: AnyTier,
    seconds: Callable[[int], float],
    bundle: int,
    blocks: int,
    token: float,
) -> AnyTier:
    """Returns a tier with its costs, where `seconds` returns those of a load of up to
    `blocks` blocks, of `bundle` pages.
    """
    first_seconds, all_seconds = seconds(1), seconds(blocks)
    block_seconds = max(0.0, (all_seconds - first_seconds) / max(1, blocks - 1))
    return evolve(
        tier,
        load_seconds=max(0.0, first_seconds - block_seconds),
        page_seconds=block_seconds / bundle,
        token_seconds=token,
    )
