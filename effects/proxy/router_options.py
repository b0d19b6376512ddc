"""The settings of a router."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import field, frozen

from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.proxy.backends import KvSource
from minfer.effects.proxy.tenants import TrustedProxies
from minfer.effects.serving.access.api_keys import ApiKeys
from minfer.effects.text.tools.formats import Parsers

CACHE_TOKENS: Final = 2**20
KV_BLOCK_TOKENS: Final = 16  # tokens; vLLM's default
MAX_WAITING: Final = 1024
BACKEND_TIMEOUT_SECONDS: Final = 600.0
JOURNAL_BYTES: Final = 2**30


@frozen(kw_only=True)
class RouterOptions:
    """How requests are routed."""

    backends: Sequence[str]  # base URLs, as `read_backends` returns them
    policy: str = "prefix"
    keys: ApiKeys = field(factory=ApiKeys)  # that clients must have
    proxies: TrustedProxies = field(factory=TrustedProxies)
    cache_tokens: int = CACHE_TOKENS  # that each backend is assumed to cache
    # Where backends report what they cache, by name; then `model` has the tokenizer,
    # blocks have as many tokens as theirs, and templates and parsers are theirs.
    kv_sources: Mapping[str, KvSource] = field(factory=dict)
    kv_block_size: int = KV_BLOCK_TOKENS
    model: str | None = None
    templates: TemplateSettings = field(factory=TemplateSettings)
    parsers: Parsers = field(factory=Parsers)
    max_body: int | None = None  # bytes; None: by the contexts of the backends
    workers: int = 0  # processes that read large bodies; 0: threads
    max_waiting: int = MAX_WAITING  # requests
    backend_timeout: float = (
        BACKEND_TIMEOUT_SECONDS  # seconds between two parts of a response
    )
    journal: Path | None = None  # a folder
    journal_size: int = JOURNAL_BYTES
