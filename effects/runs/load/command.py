"""`minfer bench serve`: a load on a server, and the numbers of it."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tqdm import tqdm

from minfer.effects.runs.load import load_metrics as metrics
from minfer.effects.runs.load import load_report as report
from minfer.effects.runs.load.due_times import due_times
from minfer.effects.runs.load.load_client import Client, LoadPlan, Outcome
from minfer.effects.runs.load.load_options import ENDPOINTS, PROMPTS
from minfer.effects.runs.load.load_prompts import (
    ListedPrompts,
    Prompts,
    RandomPrompts,
    read_prompts,
)
from minfer.effects.runs.load.request_record import LoadError
from minfer.effects.runs.load.target_server import first_model, read_url, warm_up

FAILED: Final = 1  # exit codes, as those of all commands
_SIGNALLED: Final = 128  # and the signal's number, as a shell counts
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bench_serve(options: argparse.Namespace) -> int:
    """Put a load on a server and print its numbers; returns the exit code.

    Raises LoadError.
    """
    load = _load(options, _prompts(options))
    path = report.result_path(options, load.model)
    warm_up(load)
    print(_heading(load, options), flush=True)
    client, caught, unsaved = Client(load), list[int](), ""
    with _signals(client.stop, caught):
        outcome = _run(client, load)
        found = metrics.metrics_of(
            outcome, dict(options.goodput), options.metric_percentiles
        )
        if path is not None:  # first: the terminal may have gone
            try:
                report.save(path, options, load, found)
            except OSError as error:
                unsaved = f"{path}: {error.strerror}; the result is not saved"
        print(report.table(found), flush=True)
    paced = bool(load.due) and load.max_concurrency is None
    for doubt in metrics.warnings(found, paced=paced):
        print(f"minfer: {doubt}", file=sys.stderr, flush=True)
    if unsaved:
        print(f"minfer: {unsaved}", file=sys.stderr, flush=True)
        return FAILED
    if caught:
        return _SIGNALLED + caught[0]
    return FAILED if found["failed"] else 0


def _prompts(options: argparse.Namespace) -> Prompts:
    """The prompts that options describe. Raises LoadError."""
    chat, path = options.backend == "openai-chat", options.dataset_path
    if options.dataset_name == "custom":
        if path is None:
            raise LoadError("--dataset-name custom needs --dataset-path FILE")
        return read_prompts(path, options.random_output_len, chat=chat)
    if path is not None:
        raise LoadError(f"--dataset-path {path} needs --dataset-name custom")
    return RandomPrompts(
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        chat=chat,
        seed=str(options.seed),
    )


def _load(options: argparse.Namespace, prompts: Prompts) -> LoadPlan:
    """The load that options describe. Raises LoadError."""
    base = read_url(options.base_url)
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("MINFER_API_KEY", "")
    there = len(prompts.prompts) if isinstance(prompts, ListedPrompts) else PROMPTS
    count, rate = options.num_prompts or there, options.request_rate
    due: tuple[float, ...] = ()
    if rate < math.inf:
        due = due_times(count, rate, options.burstiness, options.seed)
    body = {"temperature": options.temperature}
    return LoadPlan(
        url=base + (options.endpoint or ENDPOINTS[options.backend]),
        model=options.model or first_model(base, key),
        prompts=prompts,
        count=count,
        due=due,
        max_concurrency=options.max_concurrency,
        key=key,
        body={**body, "ignore_eos": True} if options.ignore_eos else body,
    )


def _heading(load: LoadPlan, options: argparse.Namespace) -> str:
    how = []
    if load.due:
        how.append(f"{options.request_rate:g} a second")
    if load.max_concurrency is not None:
        how.append(f"at most {load.max_concurrency:,} at once")
    return (
        f"{load.count:,} requests to {load.model} at {load.url}, "
        f"{', '.join(how or ['all at once'])}"
    )


def _run(client: Client, load: LoadPlan) -> Outcome:
    """Run a client, with a progress bar if there is a terminal."""
    with tqdm(total=load.count, unit=" requests", leave=False, disable=None) as bar:

        def show(client: Client) -> None:
            way = client.sent - len(client.records)
            state = f"{way} in flight, {client.failed} failed"
            bar.set_postfix_str(state, refresh=False)
            bar.update()

        client.show = show
        return client.run()


@contextmanager
def _signals(stop: Callable[[], None], caught: list[int]) -> Iterator[None]:
    """Handle signals meanwhile: they end the load, and its numbers are still shown and
    saved. A signal that was ignored, as SIGHUP is under nohup, stays ignored.
    """

    def catch(number: int, _: object) -> None:
        caught.append(number)
        stop()

    before = {one: signal.getsignal(one) for one in _SIGNALS}
    heeded = [one for one in _SIGNALS if before[one] is not signal.SIG_IGN]
    for one in heeded:
        signal.signal(one, catch)
    try:
        yield
    finally:
        for one in heeded:
            signal.signal(one, before[one])
