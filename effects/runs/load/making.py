"""From options to a load: which prompts, how many, and when they are due."""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from minfer.effects.runs.arrivals import Trace
from minfer.effects.runs.load.http import read_address
from minfer.effects.runs.load.load import Load, Target
from minfer.effects.runs.load.options import PROMPTS, base_url
from minfer.effects.runs.load.pace import due_times
from minfer.effects.runs.load.prompts import (
    Listed,
    ListedPrompts,
    Prompts,
    RandomPrompts,
    Tokens,
    TracePrompts,
)
from minfer.effects.runs.load.record import LoadError
from minfer.effects.runs.traces import read_trace
from minfer.request import Request
from minfer.runs.redact import redacted_config

_OURS: Final = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens")
# What is wrong with options that do not go together.
_TWO_SOURCES: Final = "--trace and --prompts exclude each other; leave one of them out"
_TWO_PACES: Final = "a --trace has its own pace: use --speed, not --request-rate"
_ENDLESS: Final = (
    "--duration needs --max-concurrency or --request-rate: without either, all requests "
    "are sent at once"
)
_NOWHERE: Final = "--save-detailed needs --json FILE to save to"
_NO_EVENTS: Final = "--usage-per-event needs --stream: there are no events without"
_NO_TIMES: Final = (
    "without --stream nothing but e2el is known; leave out the other goals of --goodput"
)


def load_of(options: argparse.Namespace, model: str) -> Load:
    """The load that options describe. Raises LoadError and TraceError."""
    check(options)
    trace = read_trace(options.trace, options.num_prompts) if options.trace else None
    due: tuple[float, ...] = ()
    if trace is not None:
        prompts, due = _of_trace(trace, options)
        count: int | None = len(due)
    else:
        prompts = _listed(options) if options.prompts else _random(options)
        count = _count(options, prompts)
        if options.request_rate < math.inf and count is not None:
            due = due_times(count, options.request_rate, options.burstiness, options.seed)
    return Load(
        target=_target(options, model),
        prompts=prompts,
        count=count,
        due=due,
        duration=options.duration,
        max_concurrency=options.max_concurrency,
        timeout=options.timeout,
    )


def check(options: argparse.Namespace) -> None:
    """Raise LoadError for options that do not go together."""
    paced = options.request_rate < math.inf
    endless = options.duration and not (options.num_prompts or options.trace)
    other_goals = any(not goal.startswith("e2el") for goal in options.goodput)
    ours = [name for name in _OURS if name in options.extra_body]
    wrong = {
        _TWO_SOURCES: options.trace and options.prompts,
        _TWO_PACES: options.trace and paced,
        _ENDLESS: endless and not (options.max_concurrency or paced),
        _NOWHERE: options.save_detailed and not options.json,
        _NO_EVENTS: options.usage_per_event and not options.stream,
        _NO_TIMES: other_goals and not options.stream,
        f"--extra-body must not have {' or '.join(ours)}": ours,
    }
    for why, so in wrong.items():
        if so:
            raise LoadError(why)


def _target(options: argparse.Namespace, model: str) -> Target:
    body: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.usage_per_event:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body["stream_options"] = usage
    return Target(
        address=read_address(base_url(options)),
        model=model,
        chat=options.endpoint == "chat",
        stream=options.stream,
        key=options.api_key,
        body={**body, **options.extra_body},
    )


def _count(options: argparse.Namespace, prompts: Prompts) -> int | None:
    """How many requests; None for as many as there is time for."""
    if options.num_prompts:
        return int(options.num_prompts)
    if options.duration:
        within = options.duration * options.request_rate
        return None if math.isinf(within) else max(1, math.ceil(within))
    return len(prompts.prompts) if isinstance(prompts, ListedPrompts) else PROMPTS


def _tokens(options: argparse.Namespace) -> Tokens:
    return Tokens(options.vocab_size, words=options.endpoint == "chat")


def _random(options: argparse.Namespace) -> RandomPrompts:
    return RandomPrompts(
        tokens=_tokens(options),
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
        seed=str(options.seed),
    )


def _of_trace(
    trace: Trace, options: argparse.Namespace
) -> tuple[Prompts, tuple[float, ...]]:
    """A trace's prompts, and when they are due. Raises LoadError."""
    if trace.rows:
        times = tuple([row.time / options.speed for row in trace.rows])
        return TracePrompts(_tokens(options), trace.rows, str(options.seed)), times
    if options.endpoint == "chat":
        raise LoadError("a journal has token ids, which --endpoint chat cannot send")
    if trace.config is not None and trace.config == redacted_config(trace.config):
        raise LoadError(
            f"{options.trace} has no token ids to send; record without --journal-redact"
        )
    came = [(time, one) for time, one in trace.events if isinstance(one, Request)]
    listed = [
        Listed(one.prompt, max(1, trace.lengths.get((one.id, 0), one.max_tokens)))
        for _, one in came
    ]
    return ListedPrompts(listed), tuple([time / options.speed for time, _ in came])


def _listed(options: argparse.Namespace) -> ListedPrompts:
    """The prompts of a file. Raises LoadError."""
    path: Path = options.prompts
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise LoadError(f"--prompts {path}: {why}") from None
    found = [*_read(path, lines, options)]
    if not found:
        raise LoadError(f"--prompts {path}: there are no prompts in it")
    return ListedPrompts(found)


def _read(path: Path, lines: list[str], options: argparse.Namespace) -> Iterator[Listed]:
    chat, most = options.endpoint == "chat", options.random_output_len
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        told: Any = {"prompt": line}
        if line.startswith("{"):
            try:
                told = json.loads(line)
            except ValueError as error:
                raise LoadError(f"{path}, line {number}: {error}") from None
        given = told.get("messages", told.get("prompt"))
        if not _fits(given, messages="messages" in told, chat=chat):
            wanted = "text or messages" if chat else "text or token ids"
            raise LoadError(f"{path}, line {number}: its prompt must be {wanted}")
        tokens = told.get("max_tokens", most)
        if type(tokens) is not int or tokens < 1:
            raise LoadError(
                f"{path}, line {number}: max_tokens must be a whole number from 1"
            )
        yield Listed(given, tokens)


def _fits(given: Any, *, messages: bool, chat: bool) -> bool:
    """Whether a prompt can be sent."""
    if messages:
        return (
            chat and isinstance(given, list) and all(isinstance(m, dict) for m in given)
        )
    ids = isinstance(given, list) and all(type(one) is int for one in given)
    return bool(given) and (isinstance(given, str) or (ids and not chat))
