"""The settings of KV events: vLLM's `--kv-events-config`, with its keys.

    {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}

An engine then publishes which blocks its prefix cache stores and removes, for routers of
others (`minfer.effects.live.kv_events`). Addresses are vLLM's: one with `*` or `::`, and
one of ipc or inproc, is listened at; to any other one the engine connects.
"""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

from attrs import Attribute, evolve, field, fields, frozen

from minfer.effects.setup.nearest import check_keys
from minfer.extras import how_to_install
from minfer.values.checks import ConfigError, number

SETTING: Final = "kv_events_config"
PUBLISHERS: Final = ("zmq", "null")
_SCHEMES: Final = ("tcp://", "ipc://", "inproc://")
_MAX_PORT: Final = 2**16 - 1
_PACKAGE: Final = "zmq"
_EXTRA: Final = "kv-events"
_whole: Final = partial(number, prefix=f"{SETTING}: ")


def _flag(_: object, attribute: "Attribute[bool]", value: Any) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{SETTING}: {attribute.name} must be true or false")


def _publisher(_: object, __: "Attribute[str]", value: Any) -> None:
    if value not in PUBLISHERS:
        allowed = " or ".join(map(repr, PUBLISHERS))
        raise ConfigError(f"{SETTING}: publisher must be {allowed}, not {value!r:.80}")


def _address(_: object, attribute: "Attribute[Any]", value: Any) -> None:
    if value is None and attribute.default is None:
        return
    if isinstance(value, str) and value.startswith(_SCHEMES):
        scheme, _, rest = value.partition("://")
        port = rest.rpartition(":")[2]
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= _MAX_PORT
        if rest and (scheme != "tcp" or is_port):
            return
    raise ConfigError(
        f"{SETTING}: {attribute.name} must be like tcp://*:5557 (with a port from 1 to "
        f"{_MAX_PORT}) or ipc:///tmp/events, not {value!r:.80}"
    )


def _text(_: object, attribute: "Attribute[str]", value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{SETTING}: {attribute.name} must be a string")


@frozen(kw_only=True)
class KvEventsConfig:
    """Settings of KV events. Raises ConfigError for values out of range."""

    enable_kv_cache_events: bool = field(default=False, validator=_flag)
    publisher: str = field(default="zmq", validator=_publisher)  # "null": none
    endpoint: str = field(default="tcp://*:5557", validator=_address)
    # where batches that were missed are sent again; None: nowhere
    replay_endpoint: str | None = field(default=None, validator=_address)
    # the last batches, which are kept to be sent again
    buffer_steps: int = field(default=10_000, validator=_whole(1, 2**24))
    # batches that wait for a slow subscriber; those beyond are lost for it
    hwm: int = field(default=100_000, validator=_whole(0, 2**31 - 1))
    # batches that wait to be sent; those beyond are lost
    max_queue_size: int = field(default=100_000, validator=_whole(1, 2**31 - 1))
    topic: str = field(default="", validator=_text)
    # The number of this engine among those of a server: the data parallel rank in its
    # events, by which its ports follow those above.
    rank: int = 0

    def __attrs_post_init__(self) -> None:
        replay = self.replay_endpoint
        if replay is not None and _meet(self.endpoint, replay, self.rank):
            raise ConfigError(
                f"{SETTING}: endpoint {self.endpoint!r} and replay_endpoint {replay!r} "
                "are the same address, or that of another engine; choose ports that are "
                "at least as far apart as there are engines"
            )

    @property
    def publishes(self) -> bool:
        """Whether there are events."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_engine(self, rank: int) -> "KvEventsConfig":
        """Returns the settings of the engine number `rank`, whose addresses no other one
        has. Raises ConfigError if there are none for it.
        """
        return evolve(
            self,
            rank=rank,
            endpoint=_address_of(self.endpoint, rank),
            replay_endpoint=self.replay_endpoint
            and _address_of(self.replay_endpoint, rank),
        )


def _meet(endpoint: str, replay_endpoint: str, rank: int) -> bool:
    """Whether an address of the engine number `rank` is one of an engine up to it."""
    host, _, port = endpoint.rpartition(":")
    replay_host, _, replay_port = replay_endpoint.rpartition(":")
    if host.startswith("tcp://") and host == replay_host:
        return abs(int(port) - int(replay_port)) <= rank
    return endpoint == replay_endpoint


def _address_of(address: str, rank: int) -> str:
    """The address for an engine, as vLLM numbers them: the next ports."""
    if not rank:
        return address
    if address.startswith("inproc://"):
        return f"{address}_dp{rank}"
    base, _, port = address.rpartition(":")
    if not address.startswith("tcp://") or int(port) + rank > _MAX_PORT:
        raise ConfigError(
            f"{SETTING}: {address!r} is the address of one engine, and this server has "
            "several; choose tcp://*:PORT, from which on each engine has a port"
        )
    return f"{base}:{int(port) + rank}"


def kv_events_config(setting: Any) -> KvEventsConfig | None:
    """Returns the configuration from a mapping of its keys, if there is any. Raises
    ConfigError.
    """
    if setting is None or isinstance(setting, KvEventsConfig):
        return setting
    if not isinstance(setting, Mapping):
        raise ConfigError(f"{SETTING} must be a mapping of its keys, not {setting!r:.80}")
    keys = [attribute.name for attribute in fields(KvEventsConfig)]
    check_keys(SETTING, setting, [name for name in keys if name != "rank"])
    if "enable_kv_cache_events" not in setting:
        raise ConfigError(
            f'{SETTING}: nothing is published without "enable_kv_cache_events": true; '
            "add it, or leave the setting out"
        )
    return KvEventsConfig(**setting)


def published_events(setting: Any, *, caches_prefixes: bool) -> KvEventsConfig | None:
    """Returns the configuration if there are events. Raises ConfigError if they cannot
    be published.
    """
    config = kv_events_config(setting)
    if config is None or not config.publishes:
        return None
    if not caches_prefixes:
        raise ConfigError(
            f"{SETTING} is about the prefix cache, which is off; leave "
            "enable_prefix_caching on, or this setting out"
        )
    if find_spec(_PACKAGE) is None:
        raise ConfigError(f"{SETTING} needs {_PACKAGE}: {how_to_install(_EXTRA)}")
    return config
