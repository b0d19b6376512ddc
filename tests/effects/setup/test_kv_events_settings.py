"""The settings of KV events."""

import importlib.util
from typing import Any

import pytest

from minfer.effects.setup import kv_events_settings
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.kv_events_settings import (
    KvEventsConfig,
    kv_events_config,
    published_events,
)
from minfer.values.checks import ConfigError

ON: dict[str, Any] = {"enable_kv_cache_events": True}


def test_keys_and_defaults_are_those_of_vllm() -> None:
    config = kv_events_config(ON)
    assert config == KvEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    )
    assert kv_events_config(config) is config
    assert kv_events_config(None) is None


@pytest.mark.parametrize(
    "setting", [None, {"enable_kv_cache_events": False}, {**ON, "publisher": "null"}]
)
def test_events_that_are_off(setting: Any) -> None:
    assert published_events(setting, caches_prefixes=False) is None


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ([], "must be a mapping of its keys"),
        ({**ON, "endpoints": "tcp://*:1"}, "did you mean endpoint"),
        ({**ON, "rank": 1}, "is no key of it"),
        ({"endpoint": "tcp://*:5557"}, 'without "enable_kv_cache_events": true'),
        ({"enable_kv_cache_events": 1}, "must be true or false"),
        ({**ON, "publisher": "nats"}, "publisher must be 'zmq' or 'null', not 'nats'"),
        ({**ON, "endpoint": "http://*:5557"}, "endpoint must be like"),
        ({**ON, "endpoint": "tcp://*"}, "with a port"),
        ({**ON, "endpoint": "tcp://*:0"}, "from 1 to 65535"),
        ({**ON, "endpoint": None}, "endpoint must be like"),
        ({**ON, "replay_endpoint": "tcp://*:99999"}, "replay_endpoint must be like"),
        ({**ON, "buffer_steps": 0}, "buffer_steps"),
        ({**ON, "hwm": -1}, "hwm"),
        ({**ON, "max_queue_size": 1.5}, "max_queue_size"),
        ({**ON, "topic": 5}, "topic must be a string"),
    ],
)
def test_other_settings_are_refused(setting: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineArgs(kv_events_config=setting)


def test_engines_have_addresses_of_their_own() -> None:
    events = {"endpoint": "tcp://*:5557", "replay_endpoint": "inproc://replay"}
    args = EngineArgs(kv_events_config=ON | events)
    assert args.numbered(0).kv_events_config == kv_events_config(ON | events)
    second = kv_events_config(args.numbered(2).kv_events_config)
    assert second is not None
    assert (second.rank, second.endpoint) == (2, "tcp://*:5559")
    assert second.replay_endpoint == "inproc://replay_dp2"
    assert EngineArgs().numbered(1) == EngineArgs()


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/events", "tcp://*:65535"])
def test_addresses_of_one_engine_are_refused_for_several(endpoint: str) -> None:
    args = EngineArgs(kv_events_config={**ON, "endpoint": endpoint})
    with pytest.raises(ConfigError, match="is the address of one engine"):
        args.numbered(1)


def test_the_two_addresses_do_not_meet() -> None:
    for replay, engines in (("5557", 0), ("5558", 1), ("5555", 2), ("5559", 2)):
        setting = {**ON, "replay_endpoint": f"tcp://*:{replay}"}
        for number in range(engines):
            EngineArgs(kv_events_config=setting).numbered(number)
        with pytest.raises(ConfigError, match="at least as far apart"):
            EngineArgs(kv_events_config=setting).numbered(engines)
    with pytest.raises(ConfigError, match="the same address"):
        kv_events_config({**ON, "endpoint": "ipc:///a", "replay_endpoint": "ipc:///a"})


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events_settings, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"kv_events_config needs zmq: pip install"):
        published_events(ON, caches_prefixes=True)
    assert importlib.util.find_spec("zmq") is not None
