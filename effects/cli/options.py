"""Options that several commands share, and the settings that follow from them."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from minfer.effects.setup.engine_args import add_engine_options, engine_args
from minfer.effects.setup.option_values import read_json_object
from minfer.records.request import ParameterError, SamplingParams
from minfer.sampling.params import ADVISED, ROW_FIELDS
from minfer.sampling.structured import StructuredOutputs

# What a command without --model runs.
TOY: Final = (
    "the bundled model, a toy that shows that the engine works (--model: a real one)"
)
# Its limits, for descriptions of commands.
TOY_LIMITS: Final = (
    "Without --model, the bundled model runs: a toy of 6 million parameters that shows "
    "that the engine works. It gets 128 * 3 and 100 * 100 wrong."
)
# The defaults with which the bundled model works best.
MAX_TOKENS: Final = 128
DEFAULTS: Final[Mapping[str, float]] = {"temperature": 0.7, "top_p": 0.9}
# The fields of `SamplingParams` with options of the same names.
_GIVEN: Final = (
    *ADVISED,
    "n",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)


def engine_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of an engine that has one."""
    add_engine_options(parser.add_argument_group("model and engine"))


def template_options(add: Callable[..., Any]) -> None:
    """Add the options of how conversations are rendered."""
    add(
        "--chat-template",
        metavar="FILE",
        help="the chat template, in place of the checkpoint's: a file in Jinja, or the "
        "template's text",
    )
    add(
        "--default-chat-template-kwargs",
        type=read_json_object,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'; a "
        "request's chat_template_kwargs come before them",
    )


def dry_run_option(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not load the model: made-up text at once, to try the interface",
    )


def sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the output's length and of sampling."""
    group = parser.add_argument_group("what to write")
    add = group.add_argument
    add(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help="most tokens to write, from 1; 0: as many as fit (default: %(default)s)",
    )
    for name in ADVISED:
        _row_option(group, name)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    add(
        "--stop-token-ids",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end after this token id; may be given several times",
    )
    add(
        "--include-stop-str-in-output",
        action="store_true",
        help="keep the text that ends it, as the last of the output",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="go on when the model says that the text ends",
    )
    _shape_options(group)
    add("--stats", action="store_true", help="write timings to standard error at the end")


def _shape_options(group: argparse._ArgumentGroup) -> None:
    """Add the options for single tokens and words."""
    add = group.add_argument
    add(
        "--min-tokens",
        type=int,
        default=0,
        metavar="N",
        help="do not let the text end by itself before N tokens (default: %(default)s)",
    )
    add(
        "--logit-bias",
        type=_logit_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X, from -100 to 100, to a token id's logit; may be given several times",
    )
    add(
        "--allowed-token-ids",
        type=int,
        action="append",
        metavar="ID",
        help="write this token id; may be given several times, for all that may be "
        "written",
    )
    add(
        "--bad-words",
        action="append",
        default=[],
        metavar="TEXT",
        help="never write this word; may be given several times",
    )


def _logit_bias(text: str) -> tuple[int, float]:
    """A token id and its logit bias. Raises ArgumentTypeError."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        message = f"{text!r} is not like 13=-5: a token id and what is added to its logit"
        raise argparse.ArgumentTypeError(message) from None


def _row_option(group: argparse._ArgumentGroup, name: str) -> None:
    """Add an option as the table of parameters describes it."""
    meaning = ROW_FIELDS[name]
    default = DEFAULTS.get(name, getattr(SamplingParams(), name))
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=int if meaning.word == "int32" else float,
        metavar=meaning.metavar,
        help=f"{meaning.help} (default: what the model's makers advise, or {default:g})",
    )


def sampling_params(
    options: argparse.Namespace, advice: Mapping[str, float]
) -> SamplingParams:
    """The sampling parameters of the options; defaults are the model's `advice`.

    Raises ParameterError.
    """
    if options.max_tokens < 0:
        raise ParameterError(
            "max_tokens",
            f"must be from 1, or 0 for as many as fit, not {options.max_tokens}",
        )
    params: dict[str, Any] = {**DEFAULTS, **advice}
    explicit = {name: getattr(options, name, None) for name in _GIVEN}
    params |= {name: value for name, value in explicit.items() if value is not None}
    return SamplingParams(
        **params,
        max_tokens=options.max_tokens or None,
        structured_outputs=_structured_outputs(options),
    )


def structured_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the output's constraint."""
    group = parser.add_argument_group("how the text must look")
    group.add_argument(
        "--json-schema", metavar="FILE", help="JSON that is as the schema in FILE says"
    )
    group.add_argument(
        "--regex", metavar="REGEX", help="a text that all of this expression matches"
    )


def _structured_outputs(options: argparse.Namespace) -> StructuredOutputs | None:
    """The constraint of the options. Raises ParameterError."""
    file = getattr(options, "json_schema", None)
    regex = getattr(options, "regex", None)
    if file is None and regex is None:
        return None
    schema = None
    if file is not None:
        try:
            schema = Path(file).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ParameterError("json_schema", f"cannot be read: {error}") from None
    return StructuredOutputs(json=schema, regex=regex)


def llm_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments for an `LLM`. Raises ConfigError and ParameterError.

    Errors of sampling parameters are raised before anything is loaded.
    """
    sampling_params(options, {})
    args = engine_args(options, executor="dry" if options.dry_run else "torch")
    return attrs.asdict(args, recurse=False)
