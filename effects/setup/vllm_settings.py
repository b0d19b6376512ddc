"""Settings of vLLM's `LLM` that minfer's has under other names, or does not have."""

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from minfer.effects.setup.nearest import nearest
from minfer.effects.setup.option_values import own_value
from minfer.effects.setup.vllm_options import (
    FORMER,
    OFF,
    ON,
    RELEASE,
    Outcome,
    VllmOption,
    vllm_options,
)
from minfer.values.checks import MAX_INT64, ConfigError, is_number

_log = logging.getLogger("minfer.settings")
GIB: Final = 2**30
# Keys of `speculative_config` that are settings of their own, too.
SPECULATIVE_KEYS: Final[Mapping[str, str]] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
_OF_THE_SERVER: Final = "it is an option of minfer serve; leave it out"


def read_settings(
    owner: str, settings: Mapping[str, Any], known: Collection[str]
) -> dict[str, Any]:
    """Returns settings of vLLM's as those that are `known`.

    What has no effect is logged. Raises ConfigError for what cannot be had, with a reason
    and a remedy, and TypeError for a name that vLLM has neither.
    """
    own = {
        name: own_value(name, value)
        for name, value in settings.items()
        if name in known and value is not None
    }
    for name in settings.keys() - known:
        option = vllm_options().get(f"--{name.replace('_', '-')}")
        if option is None:
            raise _unknown(owner, name, known)
        own |= _translate(owner, option, settings, name, own)
    return own


def _translate(
    owner: str,
    option: VllmOption,
    settings: Mapping[str, Any],
    name: str,
    own: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the settings that stand for one of vLLM's. Raises ConfigError."""
    value = settings[name]
    if option.is_neutral(as_word(value)):
        return {}
    match name:
        case "kv_offloading_size":
            return {"kv_host_memory": bytes_of_gib(value)}
        case "mamba_ssm_cache_dtype":
            return {"state_dtype": value}
        case "async_scheduling" if value is False:
            return {"steps_in_flight": 1}
        case _ if name in SPECULATIVE_KEYS:
            given = {
                key: settings[setting]
                for setting, key in SPECULATIVE_KEYS.items()
                if settings.get(setting) is not None
            }
            return {
                "speculative_config": {**(own.get("speculative_config") or {}), **given}
            }
    if option.outcome in (Outcome.SAME, Outcome.ALIAS):
        raise ConfigError(f"{owner}: {name}={value!r:.80} is refused: {_OF_THE_SERVER}")
    if note := judge(option, as_word(value), f"{owner}: {name}={value!r:.80}"):
        _log.warning("%s", note)
    return {}


def bytes_of_gib(value: Any) -> int:
    """Returns the bytes of vLLM's `kv_offloading_size`. Raises ConfigError."""
    if not is_number(value) or not 0 < value <= MAX_INT64 / GIB:
        raise ConfigError(
            f"kv_offloading_size must be a number of GiB above 0, not {value!r:.80}; "
            "leave it out for none"
        )
    return int(value * GIB)


def judge(option: VllmOption, word: str, shown: str) -> str:
    """Returns a note about a value without effect, or nothing for one that asks for
    nothing. Raises ConfigError for a value that cannot be had.
    """
    if option.is_neutral(word):
        return ""
    if option.outcome is Outcome.ALWAYS and word in option.accepts:
        return f"{shown} changes nothing: {option.text}"
    if option.outcome is Outcome.HINT:
        return f"{shown} has no effect: {option.text}"
    # Options without a text are those that minfer has, but not here.
    raise ConfigError(f"{shown} is not supported: {option.text or _OF_THE_SERVER}")


def as_word(value: Any) -> str:
    """Returns a setting's value as a word of the command line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return ON if value else OFF
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{value:g}"
    if not value:
        return ""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError):
        return repr(value)


def _unknown(owner: str, name: str, known: Collection[str]) -> Exception:
    """Returns the error about a setting that vLLM 0.33 has neither."""
    if (reason := FORMER.get(f"--{name.replace('_', '-')}")) is not None:
        return ConfigError(
            f"{owner} has no setting {name!r}, nor has vLLM {RELEASE}: {reason}"
        )
    near = nearest(name, known)
    hint = f"; did you mean {near}?" if near else ""
    return TypeError(
        f"{owner} has no setting {name!r}{hint}; it has {', '.join(sorted(known))}"
    )
