"""The runs of a file or a folder, for commands that read each, or one of them.

A folder has a run for each start of an engine. Messages about other runs than the
requested one go to standard error: standard output is the command's.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from minfer.effects.live.journal.journal_files import RunFiles, runs_in
from minfer.journal.format import JournalError
from minfer.journal.replay import Journal
from minfer.journal.wire_names import name_of

Source = TypeVar("Source")
Result = TypeVar("Result")
UNUSABLE: Final = 2  # the exit code of a journal that cannot be used


def latest(path: Path) -> RunFiles:
    """The latest run, with a message as in `latest_of`. Raises JournalError."""
    return latest_of(path, runs_in(path))


def latest_of(path: Path, runs: Sequence[RunFiles]) -> RunFiles:
    """The last of `runs`; if there are others, prints which it is."""
    *earlier, last = runs
    if earlier:
        which = f"the latest of its {1 + len(earlier)} runs, {last.name}"
        print(f"minfer: {path}: this is {which}", file=sys.stderr)
    return last


def read_each(
    runs: Sequence[Source], find: Callable[[Source], Result]
) -> tuple[list[Result], int]:
    """The results of each usable run, or journal of a router, in order, and the exit code
    of those that are not: their errors are printed. Raises JournalError if none is
    usable.
    """
    results, code = list[Result](), 0
    for number, run in enumerate(runs, 1):
        try:
            results.append(find(run))
        except JournalError as error:
            if not results and number == len(runs):
                raise
            print(f"minfer: {error}", file=sys.stderr)
            code = UNUSABLE
    return results, code


def note_torn(journal: Journal) -> None:
    """Print what is cut off at the end of a journal that was read, as in a crash."""
    for torn in journal.torn:
        print(f"minfer: {torn}", file=sys.stderr)


def machine_of(journal: Journal) -> str:
    """The machine of a run's engine, or nothing: of redacted journals, and of those that
    earlier versions wrote, it is not known.
    """
    return str(journal.about.get("machine", ""))


def wire_name(record: object) -> str:
    """The name of a record's class in journals, which stays when its class is renamed."""
    cls: type = type(record)
    return name_of(cls)
