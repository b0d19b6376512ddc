"""Reads the adapter_config.json of a PEFT checkpoint.

Theory. peft finds the modules that an adapter changes by `target_modules`: a list of
names or ends of names, a regular expression that the whole name matches, or "all-linear".
Each has the rank `r` and the factor `lora_alpha / r` (with `use_rslora`, `lora_alpha /
sqrt(r)`) of the config, unless a pattern of `rank_pattern` or `alpha_pattern` matches the
end of its name. Fields that change what a model computes, and that minfer does not know
or cannot do, are refused by name; those that matter only in training are ignored.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, frozen

from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.json_files import read_optional

if TYPE_CHECKING:
    import regex

CONFIG_NAME: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
PATTERN_SECONDS: Final = 0.5  # that a regular expression of a config may take
MATCHING_SECONDS: Final = 10.0  # of a processor, for all matches with those of a config
MAX_PATTERN_CHARS: Final = 2**14  # compiling more would hold up all threads
_MAX_SHOWN_CHARS: Final = 100  # of a value in an error
MAX_SCALING: Final = 1e6
# Fields that say how an adapter was trained, and nothing of what it computes. With Conv1D
# modules alone, which no model here has, fan_in_fan_out would change it.
IGNORED: Final = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    ]
)
READ: Final = frozenset(
    [
        "alpha_pattern",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    ]
)
# Initialisations that leave the weights of the model as they are. With the others, peft
# changes them whenever it loads the adapter.
KEEPS_WEIGHTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
REASONS: Final[Mapping[str, str]] = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules beside the low-rank matrices are not supported",
    "bias": "adapters with biases are not supported",
    "lora_bias": "adapters with biases are not supported",
    "trainable_token_indices": "new embeddings of tokens are not supported",
    "layer_replication": "copies of layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "kasa_config": "a diagonal between the low-rank matrices (KaSA) is not supported",
}


class AdapterError(CheckpointError):
    """An adapter cannot be used. The message names the fault, the file and the remedy."""


def _shown(value: object) -> str:
    """Returns a value as an error shows it."""
    return repr(value)[:_MAX_SHOWN_CHARS]


@define(eq=False)
class PatternMatcher:
    """Matches the regular expressions of one config, for a limited time."""

    path: Path
    _seconds: float = field(default=0.0, init=False)  # spent so far

    def match(self, pattern: str, name: str) -> "regex.Match[str] | None":
        """Returns the match of a pattern with a whole name. Raises `AdapterError` if it
        is no pattern, or takes too long.
        """
        import regex

        if len(pattern) > MAX_PATTERN_CHARS:
            raise self._error(
                f"the regular expression {_shown(pattern)} has {len(pattern)} "
                f"characters, and at most {MAX_PATTERN_CHARS} are read"
            )
        begin = time.thread_time()
        try:
            # Other threads go on meanwhile.
            found = regex.fullmatch(
                pattern, name, timeout=PATTERN_SECONDS, concurrent=True
            )
        except (regex.error, RecursionError) as error:
            raise AdapterError(
                f"{self.path}: {_shown(pattern)} is not a regular expression "
                f"({str(error)[:_MAX_SHOWN_CHARS]}); correct it"
            ) from error
        except TimeoutError as error:
            raise self._error(
                f"the regular expression {_shown(pattern)} takes longer than "
                f"{PATTERN_SECONDS} s for {_shown(name)}"
            ) from error
        self._seconds += time.thread_time() - begin
        if self._seconds > MATCHING_SECONDS:
            raise self._error(
                f"its regular expressions take longer than {MATCHING_SECONDS} s in all"
            )
        return found

    def _error(self, fault: str) -> "AdapterError":
        return AdapterError(f"{self.path}: {fault}; list the names of modules instead")


@frozen(kw_only=True)
class PeftConfig:
    """What adapter_config.json says."""

    path: Path
    rank: int
    alpha: float
    by_root: bool  # the factor is alpha / sqrt(rank)
    ranks: Mapping[str, int]  # by patterns of names
    alphas: Mapping[str, float]
    targets: str | frozenset[str]  # "all-linear", a pattern, or names
    parameters: frozenset[str]  # names of stacked matrices of experts
    excluded: str | frozenset[str]
    layers: frozenset[int] | None  # None: all
    layer_patterns: tuple[str, ...]
    base_model: str | None
    matcher: PatternMatcher

    def rank_of(self, name: str) -> int:
        """Returns the rank of the matrices of a module."""
        return self.ranks.get(self._pattern(self.ranks, name), self.rank)

    def scaling_of(self, name: str) -> float:
        """Returns the factor of the product of a module's matrices."""
        alpha = self.alphas.get(self._pattern(self.alphas, name), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def _pattern(self, patterns: Iterable[str], name: str) -> str:
        """Returns the first pattern that matches the end of a name, or the name."""
        for pattern in patterns:
            if self.matcher.match(rf"(.*\.)?({pattern})", name):
                return pattern
        return name

    def targets_module(self, name: str) -> bool:
        """Returns whether peft would give a module of this name an adapter."""
        if self._listed(self.excluded, name):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return self._listed(self.targets, name)
        return self._listed(self.targets, name) and self._in_layers(name)

    def targets_parameter(self, name: str) -> bool:
        """Returns whether peft would give a stacked matrix of this name an adapter."""
        return self._listed(self.parameters, name)

    def _listed(self, names: str | frozenset[str], name: str) -> bool:
        """Returns whether a name matches a pattern, or it or an end of it, of whole words
        between dots, is one of the names.
        """
        if isinstance(names, str):
            return self.matcher.match(names, name) is not None
        words = name.split(".")
        return any(".".join(words[first:]) in names for first in range(len(words)))

    def _in_layers(self, name: str) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layer_patterns or (r"[^.]*",):
            found = self.matcher.match(
                rf"(?:.*?\.)?(?:{pattern})\.(?P<index>\d+)\..*", name
            )
            if found is not None:
                return self._layer(pattern, found["index"]) in self.layers
        return False

    def _layer(self, pattern: str, digits: str | None) -> int:
        """Returns the number of a layer that a pattern found."""
        if digits is None or not digits.isdecimal():
            raise AdapterError(
                f"{self.path}: layers_pattern {_shown(pattern)} does not find the number "
                "of a layer; give the name of the list of layers, as in peft"
            )
        return int(digits)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read the adapter_config.json of a folder. Raises `AdapterError` for values that are
    not of their type, and for fields that minfer does not support; `CorruptFileError`.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise AdapterError(
            f"{folder}: holds no {CONFIG_NAME}; give the folder that peft's "
            f"save_pretrained wrote"
        )
    config = read_optional(path)
    _refuse_unsupported(path, config)
    reader = _Reader(path, config)
    layers = config.get("layers_to_transform")
    base_model = config.get("base_model_name_or_path")
    return PeftConfig(
        path=path,
        rank=reader.integer("r", 8),
        alpha=reader.number("lora_alpha", 8),
        by_root=reader.flag("use_rslora"),
        ranks=reader.mapping("rank_pattern", int),
        alphas=reader.mapping("alpha_pattern", float),
        targets=reader.names("target_modules"),
        parameters=frozenset(reader.list("target_parameters")),
        excluded=reader.names("exclude_modules"),
        layers=None if layers in (None, []) else reader.indices("layers_to_transform"),
        layer_patterns=reader.list("layers_pattern"),
        base_model=base_model if isinstance(base_model, str) else None,
        matcher=PatternMatcher(path),
    )


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `AdapterError` for a config with values that are not supported."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{path}: peft_type is {_shown(kind)}, and only 'LORA' is supported; merge "
            f"it into its base model (in peft, merge_and_unload and save_pretrained)"
        )
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool)) and start not in KEEPS_WEIGHTS:
        raise AdapterError(
            f"{path}: init_lora_weights is {_shown(start)}, with which the weights of "
            f"the base model are others; convert it (in peft, save_pretrained with "
            f"path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        is_neutral = value in (None, False, "none") or value == [] or value == {}
        if name in IGNORED or name in READ or is_neutral:
            continue
        reason = REASONS.get(name, "this field is not supported")
        raise AdapterError(
            f"{path}: {name[:_MAX_SHOWN_CHARS]} is {_shown(value)}: {reason}; merge "
            f"the adapter into its base model (in peft, merge_and_unload and "
            f"save_pretrained)"
        )


@frozen
class _Reader:
    """Typed reads of a config; each raises `AdapterError`."""

    path: Path
    config: Mapping[str, Any]

    def error(self, key: str, expected: str) -> AdapterError:
        found = _shown(self.config.get(key))
        return AdapterError(
            f"{self.path}: {key} must be {expected}, found {found}; correct it"
        )

    def integer(self, key: str, default: int) -> int:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if not _is_factor(value):
            raise self.error(key, f"a number of at most {MAX_SCALING:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value not in (None, True, False):
            raise self.error(key, "true or false")
        return bool(value)

    def mapping(self, key: str, kind: type) -> Mapping[str, Any]:
        values = self.config.get(key) or {}
        if not isinstance(values, dict):
            raise self.error(key, "an object of patterns and numbers")
        for value in values.values():
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if kind is int and not (is_integer and value > 0):
                raise self.error(key, "an object of patterns and positive integers")
            if not _is_factor(value):
                raise self.error(key, "an object of patterns and numbers")
        return values

    def list(self, key: str) -> tuple[str, ...]:
        value = self._texts(key)
        return (value,) if isinstance(value, str) else tuple(value)

    def names(self, key: str) -> str | frozenset[str]:
        value = self._texts(key)
        return value if isinstance(value, str) else frozenset(value)

    def _texts(self, key: str) -> str | Sequence[str]:
        value = self.config.get(key) or []
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(
            isinstance(name, str) for name in value
        ):
            raise self.error(key, "a list of names, or a string")
        return value

    def indices(self, key: str) -> frozenset[int]:
        value = self.config[key]
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise self.error(key, "the number of a layer, or a list of them")
        return frozenset(numbers)


def _is_factor(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= MAX_SCALING
