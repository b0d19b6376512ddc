"""Allowed values of settings, and how the command line reads them.

An `OptionKind` is both: a validator of an attrs field, so that a wrong value is refused
whatever its source, and argparse's parameters to make such a value of a word.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import Attribute, field, frozen

from minfer.effects.setup.custom_template import CustomTemplate
from minfer.effects.setup.kv_events_settings import kv_events_config
from minfer.effects.setup.lora_settings import read_modules
from minfer.effects.setup.speculation_settings import speculative_config
from minfer.policies.builtin import policy_named
from minfer.records.policy import Policy
from minfer.values.checks import MAX_INT64, ConfigError, is_number

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)")
_UNITS: Final = " kmgt"  # each a factor of 1,000 or 1,024 more than the one before
# Names of one value that vLLM has several of, by setting.
VALUE_ALIASES: Final[Mapping[str, Mapping[str, str]]] = {
    "quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        "modelopt_fp4": "modelopt",
        "fp8_per_tensor": "fp8",
    },
    "load_format": {"safetensors": "auto", "hf": "auto", "gguf": "auto"},
    "dtype": {f"torch.{name}": name for name in ("float16", "bfloat16", "float32")},
}
AUTO_LENGTH: Final = -1  # of `max_model_len`: as many tokens as fit into memory
ITL_WORDS: Final = ("auto", "none")  # values of `itl_target` that are not numbers
MIN_CONTEXT_TOKENS: Final = 2  # tokens of a context


def own_value(setting: str, value: Any) -> Any:
    """Returns minfer's name of a value of a setting, if vLLM has another one for it."""
    names = VALUE_ALIASES.get(setting, {})
    is_dtype = type(value).__module__ == "torch"
    return names.get(str(value), value) if is_dtype or isinstance(value, str) else value


def read_seconds(text: str) -> float:
    """Returns a finite number of seconds that is not negative."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return seconds


def read_itl_target(text: str) -> float | str:
    """Returns milliseconds, or the text if it is no number: `ITL_WORDS` are valid."""
    try:
        return float(text)
    except ValueError:
        return text


def _is_itl_target(value: Any) -> bool:
    fits = is_number(value) and 0 < value <= MAX_INT64
    return value is None or fits or value in ITL_WORDS


def read_bytes(text: str) -> int:
    """Returns the bytes of a size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x
    2^30.
    """
    size = _read_size(text)
    if size is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 512M, 2G or 2000000000"
        )
    return size


def read_length(text: str) -> int:
    """Returns a number of tokens as vLLM reads it: 4k is 4,000, 4K is 4,096; "auto" is
    -1.
    """
    if text.strip() in ("auto", str(AUTO_LENGTH)):
        return AUTO_LENGTH
    length = None if "B" in text else _read_size(text)
    if length is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens; write 4096, 4k (4,000), 4K (4,096) or "
            f"auto"
        )
    return length


def _read_size(text: str) -> int | None:
    """Returns a number with a unit, or a whole number; None: it is neither."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = match.groups()
    if "." in number and not unit:
        return None
    base = 1000 if unit.islower() else 1024
    return int(float(number) * base ** _UNITS.index(unit[:1].lower() or " "))


def _is_length(value: Any) -> bool:
    is_whole = is_number(value, whole=True)
    return value is None or (
        is_whole and (value == AUTO_LENGTH or MIN_CONTEXT_TOKENS <= value <= MAX_INT64)
    )


def read_json_object(text: str) -> Mapping[str, Any]:
    """Returns the object of a text in JSON. Raises argparse.ArgumentTypeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text:.80}")
    return value


@frozen
class OptionKind:
    """The allowed values of a setting.

    `description` describes them in words, `is_valid` tests a value. `metavar`, `read` and
    `choices` are argparse's: the name in help texts, the function that makes a value of a
    word, and all words, if they are few.
    """

    description: str
    is_valid: Callable[[Any], bool]
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None

    def __call__(self, _: object, attribute: "Attribute[Any]", value: object) -> None:
        """Refuse an invalid value of a field. Raises ConfigError."""
        if not self.is_valid(value):
            raise ConfigError(
                f"{attribute.name} must be {self.description}, not {value!r}"
            )


def read_count(text: str) -> int:
    """Returns a whole number as vLLM reads it: 8k is 8,000, 8K is 8,192."""
    try:
        return int(text)
    except ValueError:
        count = None if "B" in text else _read_size(text)
    if count is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; write 8192, 8k (8,000) or 8K (8,192)"
        )
    return count


def whole_number(
    low: int = 1,
    metavar: str = "N",
    read: Callable[[str], int] = read_count,
    high: int = MAX_INT64,
) -> OptionKind:
    """Returns the kind of whole numbers from `low` to `high`, or None."""

    def is_valid(value: Any) -> bool:
        return value is None or (is_number(value, whole=True) and low <= value <= high)

    shown_high = "2^63 - 1" if high == MAX_INT64 else high
    return OptionKind(
        f"a whole number from {low} to {shown_high}", is_valid, metavar, read
    )


def one_of(
    choices: tuple[str, ...],
    metavar: str | None = None,
    *,
    optional: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> OptionKind:
    """Returns the kind of a few words, or None if `optional`; help texts list them unless
    there is a `metavar`. The command line takes `aliases` of words, too.
    """

    def fits(value: Any) -> bool:
        return (optional and value is None) or value in choices

    def read(text: str) -> str:
        return names.get(text, text)

    names = aliases or {}
    shown_choices = None if metavar else choices
    return OptionKind(
        f"one of {', '.join(choices)}", fits, metavar, read, choices=shown_choices
    )


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 < value <= 1)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path | None)


def _is_model(value: Any) -> bool:
    return _is_path(value) and value != ""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_template(value: Any) -> bool:
    return isinstance(value, str | Path | CustomTemplate | None)


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def resolve_policy(policy: str | Policy) -> Policy:
    """Returns a policy, also by its name. Raises ConfigError."""
    if isinstance(policy, str):
        return policy_named(policy)
    if isinstance(policy, type):
        raise _policy_error(f"{policy!r} is a class: make one of it")
    for name in vars(Policy):
        if not name.startswith("_") and not hasattr(policy, name):
            raise _policy_error(f"{policy!r} lacks {name}")
    return policy


def _policy_error(reason: str) -> ConfigError:
    return ConfigError(f"scheduling_policy must be a name or a policy; {reason}")


COUNT: Final = whole_number()
LENGTH: Final = OptionKind(
    f"a whole number from {MIN_CONTEXT_TOKENS} to 2^63 - 1, or {AUTO_LENGTH}: as many "
    f"as fit",
    _is_length,
    "N",
    read_length,
)
BYTES: Final = whole_number(1, "BYTES", read_bytes)
ITL: Final = OptionKind(
    "a number of milliseconds above 0, auto or none",
    _is_itl_target,
    "MS",
    read_itl_target,
)
SHARE: Final = OptionKind("above 0 and at most 1", _is_share, "SHARE", float)
MODEL: Final = OptionKind("the path of a checkpoint folder", _is_model, "MODEL")
FOLDER: Final = OptionKind("a folder", _is_path, "DIR")
TEMPLATE: Final = OptionKind(
    "the path of a file, or a template's text", _is_template, "FILE"
)
OBJECT: Final = OptionKind(
    "a mapping of names to values", _is_object, "JSON", read_json_object
)
FLAG: Final = OptionKind("true or false", _is_flag)
WORD: Final = OptionKind("a word", _is_word, "WORD")
TEXT: Final = OptionKind(
    "a word", lambda value: value is None or isinstance(value, str), "NAME"
)
SPECULATION: Final = OptionKind(
    "a mapping of its keys",
    lambda value: speculative_config(value) is not None or value is None,
    "JSON",
    read_json_object,
)
KV_EVENTS: Final = OptionKind(
    "a mapping of its keys",
    lambda value: kv_events_config(value) is not None or value is None,
    "JSON",
    read_json_object,
)
LORA_MODULES: Final = OptionKind(
    "a list of NAME=PATH",
    lambda value: isinstance(value, list | tuple) and read_modules(value) is not None,
    "NAME=PATH",
)
POLICY: Final = OptionKind(
    "a name or a policy", lambda value: resolve_policy(value) is not None, "NAME"
)


def option(default: Any, text: str, kind: OptionKind | None = None) -> Any:
    """Returns a field that is also an option: its metadata are argparse's parameters.

    Without a kind it is a flag.
    """
    arguments: dict[str, Any]
    if kind is not None:
        arguments = {"type": kind.read, "metavar": kind.metavar, "choices": kind.choices}
    elif default:
        arguments = {"action": argparse.BooleanOptionalAction}
    else:
        arguments = {"action": "store_true"}
    metadata = {"help": text, **arguments}
    return field(default=default, validator=kind or FLAG, metadata=metadata)
