"""The bounds that a server's operator may set by options; others follow from the model
(`limits`).
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Final

from attrs import Factory, field, frozen

from minfer.effects.execution.tiers.folder_epochs import FolderEpochs
from minfer.effects.live.adapters.sources import AdapterSources
from minfer.effects.serving.access.api_keys import ApiKeys, read_keys
from minfer.effects.serving.access.reasoning_cipher import reasoning_key
from minfer.effects.serving.access.tenants import Tenants
from minfer.effects.serving.wire.connections import ConnectionLimits
from minfer.effects.setup.lora_settings import read_folders, read_hub_names
from minfer.values.checks import ConfigError

BODY_TIMEOUT_SECONDS: Final = 60.0


@frozen(kw_only=True)
class ServerBounds:
    """Who has access, and the time limits."""

    keys: ApiKeys = field(factory=ApiKeys)
    tenants: Tenants = field(
        default=Factory(lambda self: Tenants(self.keys), takes_self=True), eq=False
    )
    workers: int = 0  # processes that prepare large bodies; 0: threads of this one
    body_timeout: float = BODY_TIMEOUT_SECONDS  # seconds that a body may take to come
    request_timeout: float | None = None  # seconds that an answer may take; None: any
    enforce_deadlines: bool = False  # requests whose own deadline has passed
    # Of reasoning that clients keep. Made before API servers are forked.
    reasoning_key: bytes = field(factory=partial(reasoning_key, ""), eq=False, repr=False)
    refuse_hosted_tools: bool = False  # else they are left out
    trust_request_chat_template: bool = False  # whether requests may bring templates
    tokenizer_info: bool = False  # whether GET /tokenizer_info is served
    # Where adapters may come from while it serves, beside those it is started with.
    adapter_sources: AdapterSources = field(factory=AdapterSources)
    vllm_metrics: bool = False  # whether /metrics has vLLM's names, too
    connection_limits: ConnectionLimits = field(factory=ConnectionLimits)


def read_bounds(options: argparse.Namespace) -> ServerBounds:
    """The bounds of the command line. Raises ConfigError."""
    file = options.api_keys_file
    keys = read_keys(options.api_key, None if file is None else Path(file))
    disk = options.kv_disk
    folder = None if disk is None else FolderEpochs.open(Path(disk))
    return ServerBounds(
        keys=keys,
        tenants=Tenants(keys, options.cache_secret, folder),
        workers=check_whole("preparers", options.preparers, 0),
        body_timeout=check_seconds("body-timeout", options.body_timeout),
        request_timeout=None
        if options.request_timeout is None
        else check_seconds("request-timeout", options.request_timeout),
        enforce_deadlines=options.enforce_deadlines,
        reasoning_key=reasoning_key(options.cache_secret),
        refuse_hosted_tools=options.refuse_hosted_tools,
        trust_request_chat_template=options.trust_request_chat_template,
        tokenizer_info=options.enable_tokenizer_info_endpoint,
        adapter_sources=_read_adapter_sources(options, keys),
        vllm_metrics=options.vllm_metrics,
        connection_limits=ConnectionLimits(
            connections=check_whole("max-connections", options.max_connections, 1),
            header=check_seconds("header-timeout", options.header_timeout),
        ),
    )


def _read_adapter_sources(options: argparse.Namespace, keys: ApiKeys) -> AdapterSources:
    """Where adapters may come from, by the command line. Raises ConfigError."""
    sources = AdapterSources(
        folders=read_folders(options.lora_folders),
        hub=read_hub_names(options.lora_hub),
        runtime_updates=options.allow_runtime_lora_updating,
    )
    given = {
        "--lora-modules": options.lora_modules,
        "--lora-folders": sources.folders,
        "--lora-hub": sources.hub,
        "--allow-runtime-lora-updating": sources.runtime_updates,
    }
    for name, value in given.items():
        if value and not options.enable_lora:
            raise ConfigError(f"{name} needs --enable-lora; add it, or leave {name} out")
    if not sources.runtime_updates:
        return sources
    if not any(key.admin for key in keys.known):
        raise ConfigError(
            "--allow-runtime-lora-updating needs a key with admin = true, which alone "
            "may load adapters; add one to the file of --api-keys-file"
        )
    if not sources.on_first_use:
        raise ConfigError(
            "--allow-runtime-lora-updating loads adapters from the folders of "
            "--lora-folders and the list of --lora-hub; add one of them"
        )
    return sources


def check_seconds(name: str, value: float) -> float:
    """The seconds of an option. Raises ConfigError."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{name} must be a number of seconds above 0, not {value}")
    return value


def check_whole(name: str, value: int, low: int) -> int:
    """The whole number of an option. Raises ConfigError."""
    if value < low:
        raise ConfigError(f"--{name} must be a whole number from {low}, not {value}")
    return value
