"""vLLM's options on minfer's command line.

Before a command parses its arguments, the options of vLLM among them that the command
does not have are added to its parser: as another name of one of its own, or with an
action that takes what asks for nothing, notes what has no effect, and refuses the rest
with a reason and a remedy. Options that nobody typed cost nothing.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from minfer.effects.cli.standard_streams import print_message
from minfer.effects.setup.vllm_options import (
    ALIASES,
    FLAG,
    FORMER,
    OFF,
    ON,
    RELEASE,
    Outcome,
    VllmOption,
    vllm_options,
)
from minfer.effects.setup.vllm_settings import SPECULATIVE_KEYS, bytes_of_gib, judge
from minfer.values.checks import ConfigError

_NARGS: Final[dict[str, Any]] = {FLAG: 0, "value": None, "many": "+", "optional": "?"}
_ENGINE_OPTION: Final = "--max-num-seqs"  # of all commands that have an engine


def add_vllm_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add the options of vLLM that are among `names`, which a command lacks, if it has an
    engine.
    """
    if _ENGINE_OPTION in parser._option_string_actions:
        for name in names:
            _add(parser, name)


def _add(parser: argparse.ArgumentParser, name: str) -> None:
    """Add an option, if it is one of vLLM's."""
    if name in FORMER:
        _add_action(
            parser, name, "?", _refuser(f"nor has vLLM {RELEASE}: {FORMER[name]}")
        )
        return
    option = vllm_options().get(name)
    negated = option is not None and _is_negation(option, name)
    if option is None and name.startswith("--no-"):
        # vLLM takes --no-enable-x and --no-disable-x for each of its flags.
        option, negated = vllm_options().get(f"--{name.removeprefix('--no-')}"), True
        if option is not None and option.kind != FLAG:
            return
    if option is None:
        return
    own = parser._option_string_actions.get(ALIASES.get(option.name, option.name))
    if option.name in _SPECIAL and own is not None:
        convert = _SPECIAL[option.name]
        _add_action(parser, name, _NARGS[option.kind], _setter(own, convert, negated))
    elif own is not None and option.kind == FLAG:
        _add_action(parser, name, 0, _setter(own, lambda _, on: on, negated))
    elif own is not None:
        parser._option_string_actions[name] = own  # another name of it
    elif option.name == "--async-scheduling" and negated:
        own = parser._option_string_actions["--steps-in-flight"]
        _add_action(parser, name, 0, _setter(own, lambda *_: 1, negated))
    else:
        _add_action(parser, name, _NARGS[option.kind], _judger(option, negated))


def _is_negation(option: VllmOption, name: str) -> bool:
    """Whether a name of a flag turns it off."""
    return option.kind == FLAG and name.startswith("--") and name != option.name


# Makes the value of an option's destination: of the one it has, and the given one.
_Convert = Callable[[Any, Any], Any]


def _read_offloading(_: Any, word: str) -> int:
    try:
        size: float | str = float(word)
    except ValueError:
        size = word
    return bytes_of_gib(size)


def _speculative(key: str) -> _Convert:
    def convert(config: Any, word: str) -> dict[str, Any]:
        value = int(word) if word.isdecimal() else word
        return {**(config or {}), key: value}

    return convert


_SPECIAL: Final[dict[str, _Convert]] = {
    "--kv-offloading-size": _read_offloading,
    "--enable-log-requests": lambda _, on: "text" if on else "off",
    **{
        f"--{setting.replace('_', '-')}": _speculative(key)
        for setting, key in SPECULATIVE_KEYS.items()
    },
}
_Use = Callable[[argparse.Namespace, Any, str], None]


class _VllmAction(argparse.Action):
    """An option whose use is a function."""

    def __init__(self, *, use: _Use, **settings: Any) -> None:
        super().__init__(**settings)
        self._use = use

    def __call__(
        self, _: Any, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Use the option. Raises argparse.ArgumentError."""
        try:
            self._use(namespace, values, str(option))
        except (ConfigError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentError(None, f"{error}") from None


def _add_action(
    parser: argparse.ArgumentParser, name: str, nargs: Any, use: _Use
) -> None:
    parser.add_argument(
        name,
        nargs=nargs,
        action=_VllmAction,
        use=use,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def _setter(own: argparse.Action, convert: _Convert, negated: bool) -> _Use:
    def use(namespace: argparse.Namespace, values: Any, _: str) -> None:
        given = not negated if values == [] else values
        earlier = getattr(namespace, own.dest, None)
        setattr(namespace, own.dest, convert(earlier, given))

    return use


def _judger(option: VllmOption, negated: bool) -> _Use:
    def use(_: argparse.Namespace, values: Any, name: str) -> None:
        word, shown = _as_word(values), name
        if option.kind == FLAG:
            word = OFF if negated else ON
        elif values is not None:
            shown = f"{name} {word:.80}"
        note = judge(option, word, shown)
        if note and option.outcome in (Outcome.ALWAYS, Outcome.HINT):
            print_message(note)

    return use


def _refuser(reason: str) -> _Use:
    def use(_: argparse.Namespace, __: Any, name: str) -> None:
        raise ConfigError(f"minfer has no {name}, {reason}")

    return use


def _as_word(values: Any) -> str:
    """Returns the values of an option as one word; JSON without blanks."""
    word = " ".join(values) if isinstance(values, list) else str(values or "")
    try:
        return json.dumps(json.loads(word), separators=(",", ":"))
    except ValueError:
        return word
