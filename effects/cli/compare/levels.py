"""Levels by name, and the settings of an engine that they mean."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.kv_format import KV_CACHE_DTYPES
from minfer.effects.models.architecture.quantization import LEVELS
from minfer.effects.models.architecture.state_parts import STATE_DTYPES
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.setup.engine_args import DTYPES, EngineArgs
from minfer.effects.setup.prepare import Setup, prepare
from minfer.values.checks import ConfigError

AS_STORED: Final = "auto"  # the checkpoint's own dtype and format
_DTYPE_ALIASES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_QUANTIZATION: Final = "quantization"
KV: Final = "kv:"  # before a type of KV cache
STATE: Final = "state:"  # before a type of states of recurrent layers
DEFAULT_LEVELS: Final = (AS_STORED, "int8", "int4")


@frozen
class Level:
    """One level: its name as it was given, and its engine's settings."""

    name: str
    args: EngineArgs


def levels_of(names: Sequence[str], args: EngineArgs) -> tuple[Level, ...]:
    """Returns the levels of these names, of the model of `args`. Raises ConfigError."""
    for name in ("dtype", _QUANTIZATION):
        if getattr(args, name, None) not in (None, AS_STORED):
            raise ConfigError(
                f"--{name} does not go with compare; give it as a level, as in "
                f"--levels {AS_STORED} {getattr(args, name)}"
            )
    return tuple(Level(name, evolve(args, **_settings(name))) for name in names)


def _settings(name: str) -> Mapping[str, Any]:
    """Returns the settings that a level changes. Raises ConfigError."""
    if name == AS_STORED:
        return {}
    dtype_name = DTYPES.get(_DTYPE_ALIASES.get(name, name))
    if dtype_name is not None:
        return {"dtype": dtype_name}
    if name in LEVELS:
        return {_QUANTIZATION: name}
    if name.startswith(KV) and name.removeprefix(KV) in KV_CACHE_DTYPES:
        return {"kv_cache_dtype": name.removeprefix(KV)}
    if name.startswith(STATE) and name.removeprefix(STATE) in STATE_DTYPES:
        return {"state_dtype": name.removeprefix(STATE)}
    if "/" in name or (name and Path(name).is_dir()):
        return {"model": name}
    dtypes = ", ".join((*_DTYPE_ALIASES, *DTYPES))
    raise ConfigError(
        f"{name!r} is no level; --levels takes {AS_STORED} (the checkpoint's own dtype), "
        f"a dtype ({dtypes}), a value of --quantization ({', '.join(LEVELS)}), {KV} and "
        f"a value of --kv-cache-dtype ({', '.join(KV_CACHE_DTYPES)}), {STATE} and a "
        f"value of --state-dtype ({', '.join(STATE_DTYPES)}), or another checkpoint: its "
        "folder, or its name on the hub (org/name)"
    )


@contextmanager
def naming(level: Level) -> Iterator[None]:
    """Name the level in errors of its settings and its checkpoint. Raises ConfigError."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"level {level.name}: {error}") from error


def prepared(levels: Sequence[Level]) -> list[Setup]:
    """Returns each level's setup, before any is loaded.

    Raises ConfigError for a level that cannot run here, and for one whose vocabulary has
    another size than the base's.
    """
    setups: list[Setup] = []
    for level in levels:
        with naming(level):
            setup = prepare(level.args, warns=False)
            size = setup.spec.vocab_size
            base = setups[0].spec.vocab_size if setups else size
            if size != base:
                raise ConfigError(
                    f"its vocabulary has {size} tokens, and the base's has {base}; "
                    "compare checkpoints of one tokenizer"
                )
        setups.append(setup)
    return setups
