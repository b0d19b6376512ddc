"""`minfer replay` of a server's folder: replays the journals of its replicas and of its
API servers' routers, and checks that they agree.

    FOLDER/replica-0/RUN-000001.journal      a replica: a run for each time its engine was
    FOLDER/replica-1/...                     started, on whichever machine
    FOLDER/RUN-api-0.routing                 the router of an API server
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from attrs import asdict

from minfer.effects.live.journal.journal_files import (
    SUFFIX,
    RunFiles,
    replica_runs_in,
    runs_in,
)
from minfer.effects.live.journal.routing_journal_file import PREFILL_SUFFIX
from minfer.effects.live.journal.routing_journal_file import SUFFIX as ROUTERS
from minfer.effects.live.request_names import request_of
from minfer.effects.runs import replay_routing, replay_run
from minfer.effects.runs.recorded import UNUSABLE, read_each
from minfer.effects.runs.replay_run import Results
from minfer.effects.runs.replay_state import summary_line
from minfer.journal.agreement import (
    Agreement,
    Disagreement,
    EngineRequest,
    ReplicaRecord,
    RouterRecord,
    compare,
)
from minfer.journal.format import JournalError
from minfer.journal.routed_requests import RoutedRequests

PrintLines: TypeAlias = Callable[[Iterator[str]], None]  # prints lines
_MAX_SHOWN: Final = 5  # disagreements of each kind, at most, that are printed
_MISSING: Final = "{id!r} got tokens from replica {replica}, and is not in its journal"
_UNSENT: Final = "{id!r} is in a journal of replica {replica}, where no router sent it"
_LINE: Final = "{name:<44} {what:>34}  {how}"
_ENDS: Final = {True: "", False: "; it stops while it ran"}  # by `closed`


def replay_server(folder: Path, options: argparse.Namespace) -> int:
    """Replay all journals of a folder, print the results, and return the exit code.
    Raises JournalError if no run of an engine can be used, and ConfigError for an option
    that is for one journal.

    The server may still be writing them. An engine records a request before the router
    gets its first token. So routers are read first: requests that have a token there must
    be in the engines' journals, which are listed and read after that. For the same reason
    routers of engines that only prefill are read after the others.
    """
    replay_routing.refuse_options(
        options, f"is for one engine's journal, as in {folder}/replica-0"
    )
    print_lines = _print_nothing if options.json else _print_all
    routers = _Routers()
    files = sorted(sorted(folder.glob(f"*{ROUTERS}")), key=_is_prefill_router)
    routed, routers_code = _each_router(files, routers)
    engines = _Engines(print_lines, strict=options.strict_policy)
    replicas = replica_runs_in(folder)
    root_runs = runs_in(folder) if any(folder.glob(f"*{SUFFIX}")) else []
    runs = [
        *root_runs,
        *(run for replica_runs in replicas.values() for run in replica_runs),
    ]
    results, code = read_each(runs, engines.verify)
    for router in routed:
        print_lines(_router_lines(router))
    agreement = None
    if routers.records:
        agreement = compare(routers.records, engines.records(replicas))
    if options.json:
        compared = agreement and {**asdict(agreement), "holds": agreement.holds}
        print(json.dumps({"runs": results, "routers": routed, "agreement": compared}))
    else:
        print("\n".join(_totals(results, routed, agreement)))
    diverged = any(router["divergence"] for router in routed)
    disagree = agreement is not None and not agreement.holds
    return max(
        code,
        routers_code,
        replay_run.DIVERGED if diverged or disagree else 0,
        *map(replay_run.code_of, results),
    )


def _each_router(files: Sequence[Path], routers: "_Routers") -> tuple[list[Results], int]:
    """The results of routers, and an exit code. Errors are printed; the code is UNUSABLE
    then, also if none can be used.
    """
    try:
        return read_each(files, routers.verify)
    except JournalError as error:
        print(f"minfer: {error}", file=sys.stderr)
        return [], UNUSABLE


class _Engines:
    """Replays runs of engines, and keeps what is compared with the routers' journals."""

    def __init__(self, print_lines: PrintLines, *, strict: bool) -> None:
        self._print_lines, self._strict = print_lines, strict
        self._requests = dict[str, list[EngineRequest]]()  # by run
        self._from_start = dict[str, bool]()

    def verify(self, run: RunFiles) -> Results:
        """Replay a run; returns the results. Raises JournalError."""
        journal = run.open()
        names = [(name, request_of(name)) for name in journal.request_ids()]
        self._requests[run.name] = [
            EngineRequest(request_id, request_id != name) for name, request_id in names
        ]
        results = replay_run.verify_run(journal, run.name, strict=self._strict)
        self._from_start[run.name] = journal.segments[0].head.turn == 0
        self._print_lines(_engine_lines(results))
        return results

    def records(
        self, replicas: Mapping[str, Sequence[RunFiles]]
    ) -> dict[str, ReplicaRecord]:
        """The requests of each replica, in the order of its runs, by its number."""
        return {
            name: ReplicaRecord(
                [request for run in runs for request in self._requests.get(run.name, ())],
                all(self._from_start.get(run.name, False) for run in runs),
            )
            for name, runs in replicas.items()
        }


class _Routers:
    """Replays journals of routers, and keeps what is compared with the engines'."""

    def __init__(self) -> None:
        self.records: list[RouterRecord] = []

    def verify(self, file: Path) -> Results:
        """Replay a journal; returns the results. Raises JournalError."""
        requests, is_whole = RoutedRequests(), False
        try:
            results = replay_routing.verify_router(file, requests)
            is_whole = results["closed"] and not results["divergence"]
        finally:
            record = RouterRecord(
                file.name, requests.all, is_whole, _is_prefill_router(file)
            )
            self.records.append(record)
        return results


def _is_prefill_router(file: Path) -> bool:
    """Whether the file is that of a router of engines that only prefill."""
    return file.stem.endswith(PREFILL_SUFFIX)


def _print_all(lines: Iterator[str]) -> None:
    print("\n".join(lines), flush=True)


def _print_nothing(lines: Iterator[str]) -> None:
    del lines


def _engine_lines(results: Results) -> Iterator[str]:
    machine = results["about"].get("machine")
    counts = f"{results['turns']:,} turns, {results['samples']:,} samples"
    outcome = _outcome(results, bool(results["divergence"] or results["raised"]))
    name = f"{results['run']} on {machine}" if machine else results["run"]
    yield _LINE.format(name=name, what=counts, how=outcome)
    if results["raised"]:
        yield from replay_run.raised_lines(results["raised"])
    elif results["divergence"]:
        yield from replay_run.divergence_lines(results["divergence"])


def _router_lines(results: Results) -> Iterator[str]:
    counts = f"{results['turns']:,} turns, {results['placed']:,} placed"
    outcome = _outcome(results, bool(results["divergence"]))
    yield _LINE.format(name=f"{results['run']}{ROUTERS}", what=counts, how=outcome)
    if results["divergence"]:
        yield from replay_routing.divergence_lines(results["divergence"])


def _outcome(results: Results, wrong: bool) -> str:
    return "not as recorded" if wrong else f"verified{_ENDS[results['closed']]}"


def _totals(
    runs: Sequence[Results], routers: Sequence[Results], agreement: Agreement | None
) -> Iterator[str]:
    """The totals of all journals, and the comparison."""
    turns = sum(run["turns"] for run in runs)
    samples = sum(run["samples"] for run in runs)
    machines = {run["about"].get("machine") for run in runs} - {None}
    on_machines = f" on {len(machines)} machines" if len(machines) > 1 else ""
    placed = sum(router["placed"] for router in routers)
    yield summary_line(
        "sum",
        f"runs of engines: {len(runs)}{on_machines}, {turns:,} turns, {samples:,} "
        f"samples; of routers: {len(routers)}, {placed:,} placed",
    )
    if agreement is None:
        yield summary_line("compared", "nothing: there is no journal of a router")
    else:
        yield from _agreement_lines(agreement)


def _agreement_lines(agreement: Agreement) -> Iterator[str]:
    yield summary_line(
        "compared",
        f"{agreement.found:,} of {agreement.sent:,} requests that routers sent are in "
        "the journals of their replicas",
    )
    for count, phrase in (
        (agreement.unstarted, "are not, and got no token there: an end came before"),
        (
            agreement.unrecorded,
            "are not, where a journal lacks its beginning, or cannot be read whole",
        ),
        (agreement.alone, "were resubmitted alone, as they may have killed engines"),
        (agreement.late, "came after the end of a router's journal that was cut short"),
    ):
        if count:
            yield f"  {count:,} {phrase}"
    for replica, count in agreement.absent.items():
        yield summary_line(
            "DISAGREE",
            f"{count:,} requests went to replica {replica}, which has no journal here: "
            f"copy it to replica-{replica}",
        )
    yield from _disagreements(agreement.missing, _MISSING)
    yield from _disagreements(agreement.unsent, _UNSENT)


def _disagreements(disagreements: Sequence[Disagreement], words: str) -> Iterator[str]:
    for disagreement in disagreements[:_MAX_SHOWN]:
        yield summary_line("DISAGREE", words.format(**asdict(disagreement)))
    if len(disagreements) > _MAX_SHOWN:
        yield f"  and {len(disagreements) - _MAX_SHOWN:,} more"
