"""`minfer replay` of a server's folder: replays the journals of its replicas and of its
fronts' routers, and checks that they agree.

    FOLDER/replica-0/RUN-000001.journal      a replica: a run for each time its engine was
    FOLDER/replica-1/...                     started, on whichever machine
    FOLDER/RUN-front-0.routing               the router of a front
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

Say: TypeAlias = Callable[[Iterator[str]], None]  # prints lines
_SHOWN: Final = 5  # disagreements of each kind, at most, that are printed
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
    say = _say_nothing if options.json else _say
    routers = _Routers()
    files = sorted(folder.glob(f"*{ROUTERS}"), key=_prefills)
    routed, routers_code = _each_router(files, routers)
    engines, replicas = _Engines(say), replica_runs_in(folder)
    alone = runs_in(folder) if any(folder.glob(f"*{SUFFIX}")) else []
    runs = [*alone, *(run for each in replicas.values() for run in each)]
    found, code = read_each(runs, engines.verify)
    for router in routed:
        say(_router_lines(router))
    agreement = None
    if routers.records:
        agreement = compare(routers.records, engines.records(replicas))
    if options.json:
        compared = agreement and {**asdict(agreement), "holds": agreement.holds}
        print(json.dumps({"runs": found, "routers": routed, "agreement": compared}))
    else:
        print("\n".join(_sums(found, routed, agreement)))
    diverged = any(one["divergence"] for one in routed)
    disagree = agreement is not None and not agreement.holds
    return max(
        code,
        routers_code,
        replay_run.DIVERGED if diverged or disagree else 0,
        *map(replay_run.code_of, found),
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

    def __init__(self, say: Say) -> None:
        self._say = say
        self._asked = dict[str, list[EngineRequest]]()  # by run
        self._whole = dict[str, bool]()

    def verify(self, run: RunFiles) -> Results:
        """Replay a run; returns the results. Raises JournalError."""
        journal = run.open()
        names = [(name, request_of(name)) for name in journal.asked()]
        self._asked[run.name] = [EngineRequest(one, one != name) for name, one in names]
        found = {"run": run.name, **replay_run.verify_run(journal)}
        self._whole[run.name] = journal.segments[0].head.turn == 0
        self._say(_engine_lines(found))
        return found

    def records(
        self, replicas: Mapping[str, Sequence[RunFiles]]
    ) -> dict[str, ReplicaRecord]:
        """The requests of each replica, in the order of its runs, by its number."""
        return {
            name: ReplicaRecord(
                [one for run in runs for one in self._asked.get(run.name, ())],
                all(self._whole.get(run.name, False) for run in runs),
            )
            for name, runs in replicas.items()
        }


class _Routers:
    """Replays journals of routers, and keeps what is compared with the engines'."""

    def __init__(self) -> None:
        self.records: list[RouterRecord] = []

    def verify(self, file: Path) -> Results:
        """Replay a journal; returns the results. Raises JournalError."""
        requests, whole = RoutedRequests(), False
        try:
            found = replay_routing.verify_router(file, requests)
            whole = found["closed"] and not found["divergence"]
        finally:
            record = RouterRecord(file.name, requests.all, whole, _prefills(file))
            self.records.append(record)
        return found


def _prefills(file: Path) -> bool:
    """Whether the file is that of a router of engines that only prefill."""
    return file.stem.endswith(PREFILL_SUFFIX)


def _say(lines: Iterator[str]) -> None:
    print("\n".join(lines), flush=True)


def _say_nothing(lines: Iterator[str]) -> None:
    del lines


def _engine_lines(found: Results) -> Iterator[str]:
    machine = found["about"].get("machine")
    what = f"{found['turns']:,} turns, {found['samples']:,} samples"
    how = _how(found, bool(found["divergence"] or found["raised"]))
    name = f"{found['run']} on {machine}" if machine else found["run"]
    yield _LINE.format(name=name, what=what, how=how)
    if found["raised"]:
        yield from replay_run.raised_lines(found["raised"])
    elif found["divergence"]:
        yield from replay_run.divergence_lines(found["divergence"])


def _router_lines(found: Results) -> Iterator[str]:
    what = f"{found['turns']:,} turns, {found['placed']:,} placed"
    how = _how(found, bool(found["divergence"]))
    yield _LINE.format(name=f"{found['run']}{ROUTERS}", what=what, how=how)
    if found["divergence"]:
        yield from replay_routing.divergence_lines(found["divergence"])


def _how(found: Results, wrong: bool) -> str:
    return "not as recorded" if wrong else f"verified{_ENDS[found['closed']]}"


def _sums(
    runs: Sequence[Results], routers: Sequence[Results], agreement: Agreement | None
) -> Iterator[str]:
    """The totals of all journals, and the comparison."""
    turns = sum(one["turns"] for one in runs)
    samples = sum(one["samples"] for one in runs)
    machines = {one["about"].get("machine") for one in runs} - {None}
    where = f" on {len(machines)} machines" if len(machines) > 1 else ""
    placed = sum(one["placed"] for one in routers)
    yield summary_line(
        "sum",
        f"runs of engines: {len(runs)}{where}, {turns:,} turns, {samples:,} samples; of "
        f"routers: {len(routers)}, {placed:,} placed",
    )
    if agreement is None:
        yield summary_line("compared", "nothing: there is no journal of a router")
    else:
        yield from _agreement_lines(agreement)


def _agreement_lines(it: Agreement) -> Iterator[str]:
    yield summary_line(
        "compared",
        f"{it.found:,} of {it.sent:,} requests that routers sent are in the journals of "
        "their replicas",
    )
    for count, what in (
        (it.unstarted, "are not, and got no token there: an end came before"),
        (
            it.unrecorded,
            "are not, where a journal lacks its beginning, or cannot be read whole",
        ),
        (it.alone, "were resubmitted alone, as they may have killed engines"),
        (it.late, "came after the end of a router's journal that was cut short"),
    ):
        if count:
            yield f"  {count:,} {what}"
    for replica, count in it.absent.items():
        yield summary_line(
            "DISAGREE",
            f"{count:,} requests went to replica {replica}, which has no journal here: "
            f"copy it to replica-{replica}",
        )
    yield from _disagreements(it.missing, _MISSING)
    yield from _disagreements(it.unsent, _UNSENT)


def _disagreements(each: Sequence[Disagreement], words: str) -> Iterator[str]:
    for one in each[:_SHOWN]:
        yield summary_line("DISAGREE", words.format(**asdict(one)))
    if len(each) > _SHOWN:
        yield f"  and {len(each) - _SHOWN:,} more"
