"""The tiers of the settings, for KV blocks: host memory, and the external store, which is
a folder, or other engines.
"""

from pathlib import Path
from typing import Final

from minfer.effects.execution.tiers.block_folder import capacity, file_bytes
from minfer.effects.execution.tiers.peers.peer_plan import DECODE
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import MemoryPlan, memory_limit, size_text
from minfer.records.config import EngineConfig
from minfer.records.tiers import LOAD, RECOMPUTE, ExternalStore, HostTier
from minfer.values.checks import ConfigError
from minfer.values.texts import counted

DEFAULT_DISK_BYTES: Final = 64 << 30  # bytes, by default; or
FILE_SYSTEM_DIVISOR: Final = 4  # one byte in 4 of the file system
KEYS_PER_DEVICE_BLOCK: Final = 2  # keys, for each block of the device, at least
MIN_DISK_BLOCKS: Final = 2  # blocks


def host_tier(args: EngineArgs, memory: MemoryPlan, *, on_cpu: bool) -> HostTier | None:
    """Returns the tier in host memory. Raises ConfigError if it is too small, or larger
    than the control group allows.
    """
    if args.kv_host_memory is None:
        return None
    _check_supported(args, memory, "kv_host_memory", "host memory")
    # Each rank keeps its part of a block.
    pages = args.kv_host_memory // (memory.block_bytes * args.parallel.ranks)
    if not pages:
        raise ConfigError(
            f"kv_host_memory is {size_text(args.kv_host_memory)}, and a KV block has "
            f"{size_text(memory.block_bytes)}; give it several blocks, or leave it out"
        )
    limit = memory_limit()
    total_planned = args.kv_host_memory + (memory.total if on_cpu else 0)
    if limit is not None and total_planned > limit:
        raise ConfigError(
            f"kv_host_memory is {size_text(args.kv_host_memory)}, and the control group "
            f"of this process may have {size_text(limit)}, of which the model and its KV "
            f"cache take {size_text(total_planned - args.kv_host_memory)}; make it "
            f"smaller"
        )
    return HostTier(pages=pages, choice=args.kv_host_choice)


def external_store(args: EngineArgs, memory: MemoryPlan) -> ExternalStore | None:
    """Returns the external store: other engines, or a disk. Raises ConfigError."""
    if args.kv_peers is None:
        return _disk_tier(args, memory)
    if args.kv_disk is not None:
        raise ConfigError(
            "kv_disk is not supported where prefill and decode are apart; leave it out"
        )
    _check_supported(args, memory, "--prefill", "another engine")
    is_decode = args.kv_peers.role == DECODE
    num_keys = KEYS_PER_DEVICE_BLOCK * memory.num_blocks
    choice = LOAD if is_decode else RECOMPUTE
    return ExternalStore(max_known_keys=num_keys, push_only=True, choice=choice)


def _disk_tier(args: EngineArgs, memory: MemoryPlan) -> ExternalStore | None:
    """Returns the tier on disk. Raises ConfigError if it is too small, or larger than the
    file system.
    """
    if args.kv_disk is None:
        if args.kv_disk_size is not None:
            raise ConfigError("kv_disk_size is for kv_disk; name a folder, too")
        return None
    _check_supported(args, memory, "kv_disk", "a folder")
    if args.executor != "torch":
        raise ConfigError(
            f"the {args.executor} executor has no KV to keep in kv_disk; leave it out"
        )
    size, total = disk_size(args), capacity(Path(args.kv_disk))
    if size > total:
        raise ConfigError(
            f"kv_disk_size is {size_text(size)}, and the file system of {args.kv_disk} "
            f"has {size_text(total)}; make it smaller"
        )
    blocks = size // file_bytes(memory.block_bytes)
    if blocks < MIN_DISK_BLOCKS:
        raise ConfigError(
            f"kv_disk_size is {size_text(size)}, and the file of a KV block has "
            f"{size_text(file_bytes(memory.block_bytes))}; give it several blocks"
        )
    num_keys = max(blocks, KEYS_PER_DEVICE_BLOCK * memory.num_blocks)
    return ExternalStore(max_known_keys=num_keys, choice=args.kv_disk_choice)


def disk_size(args: EngineArgs) -> int:
    """Bytes of the files in `kv_disk`, of these settings or by default."""
    if args.kv_disk_size is not None:
        return args.kv_disk_size
    return min(
        DEFAULT_DISK_BYTES, capacity(Path(args.kv_disk or ".")) // FILE_SYSTEM_DIVISOR
    )


def describe_tiers(
    args: EngineArgs, config: EngineConfig, memory: MemoryPlan
) -> list[tuple[str, str]]:
    """The tiers of an engine, and how many blocks they hold, in words."""
    rows = list[tuple[str, str]]()
    if config.host is not None:
        content = _content_text(config, config.host.pages)
        rank_bytes = config.host.pages * memory.block_bytes
        total_size = size_text(rank_bytes * args.parallel.ranks)
        rows.append(("KV in host memory", f"{total_size}: {content}"))
    if args.kv_disk is not None:
        size = disk_size(args)
        content = _content_text(config, size // file_bytes(memory.block_bytes))
        rows.append(("KV on disk", f"{size_text(size)} in {args.kv_disk}: {content}"))
    return rows


def _content_text(config: EngineConfig, pages: int) -> str:
    blocks = pages // config.block_pages
    tokens = counted(blocks * config.block_size, "token")
    return f"{counted(blocks, 'block')}, {tokens}"


def _check_supported(args: EngineArgs, memory: MemoryPlan, name: str, store: str) -> None:
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"{name} is for the prefix cache, which is switched off; leave one of the "
            "settings out"
        )
    if args.journal_redact:
        raise ConfigError(
            f"--journal-redact does not cover the keys of KV blocks in {store} yet; "
            f"leave it or {name} out"
        )
    if memory.draft is not None:
        raise ConfigError(
            f"{name} is not supported beside a draft model, whose KV would be missing; "
            "speculate by lookups, or leave one of the settings out"
        )
