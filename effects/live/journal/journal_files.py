"""Journal files: finding them, reading them without torch, and writing whole ones.

A run is one file or several, its segments: `RUN-000001.journal` and on. Those of a
running engine are written by `minfer.effects.live.journal.journal_writer`.
"""

import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from minfer.journal import writing as records
from minfer.journal.codec import RECORDS
from minfer.journal.format import JournalError
from minfer.journal.replay import Journal, open_segments
from minfer.records.config import EngineConfig
from minfer.records.policy import Policy
from minfer.records.state import Turn
from minfer.values.checks import ConfigError

SUFFIX: Final = ".journal"
_TIME_CHARS: Final = len("20200101T000000Z")  # a run's start, which its name begins with
_REPLICA: Final = re.compile(r"replica-(\d+)$")  # a replica's folder
_SEGMENT: Final = re.compile(r"-\d{6}$")  # a segment's number, after the run's name


def create(path: Path) -> int:
    """Create a file for writing, readable by its owner only: it contains prompts."""
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
    )


def write_all(file: int, data: bytes) -> int:
    """Write all of `data`, however many calls it takes; returns its length."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])
    return len(data)


def write_journal(
    path: Path,
    config: EngineConfig,
    turns: Iterable[Turn],
    header: Mapping[str, Any] | None = None,
) -> None:
    """Write a whole journal of one segment to a file; a failure leaves no file.

    Raises ConfigError if it cannot be written.
    """
    temporary = path.with_name(path.name + ".part")
    data = records.encode_journal(config, turns, header)
    try:
        temporary.unlink(missing_ok=True)  # a killed process may have left it
        file = create(temporary)
        try:
            write_all(file, data)
        finally:
            os.close(file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{path}: {error.strerror or error}; name another file"
        ) from None


@frozen
class RunFiles:
    """A run and its journal files."""

    name: str
    files: tuple[Path, ...]
    replica: str = ""  # its number, of a server with several

    def open(self, policies: Iterable[Policy] = ()) -> Journal:
        """Returns the run's journal; `policies` are examples of policies that do not come
        with minfer. Raises JournalError.
        """
        classes = {
            **RECORDS,
            **{type(policy).__name__: type(policy) for policy in policies},
        }
        content = {str(file): content_of(file) for file in self.files}
        return Journal(open_segments(content, classes))

    def contains(self, text: str) -> bool:
        """Returns whether its files have a text, such as a request's id. Raises
        JournalError.
        """
        written = json.dumps(text)[1:-1].encode()
        return any(content_of(file).find(written) >= 0 for file in self.files)


def read_journal(path: Path, policies: Iterable[Policy] = ()) -> Journal:
    """Returns the journal in a file; of a folder, that of the latest recorded run, else
    of its last file. `policies` are those of `RunFiles.open`. Raises JournalError.
    """
    return runs_in(path)[-1].open(policies)


def all_runs_in(path: Path) -> list[RunFiles]:
    """Returns the runs of `runs_in` and `replica_runs_in`, in order. Raises JournalError
    if there are none.
    """
    replicas = [run for runs in replica_runs_in(path).values() for run in runs]
    if not replicas:
        return runs_in(path)
    direct = runs_in(path) if any(path.glob(f"*{SUFFIX}")) else []
    return sorted([*direct, *replicas], key=lambda run: _age(run.files[0]))


def replica_runs_in(path: Path) -> dict[str, list[RunFiles]]:
    """Returns the runs of each replica of a server whose folder this is, by its number;
    nothing if it is no such folder. Raises JournalError.
    """
    if not path.is_dir():
        return {}
    runs_of = dict[str, list[RunFiles]]()
    folders = {folder: _REPLICA.match(folder.name) for folder in path.iterdir()}
    numbers = {int(match[1]): folder for folder, match in folders.items() if match}
    for number, folder in sorted(numbers.items()):
        if any(folder.glob(f"*{SUFFIX}")):
            runs_of[str(number)] = [
                evolve(run, name=f"{folder.name}/{run.name}", replica=str(number))
                for run in runs_in(folder)
            ]
    return runs_of


def runs_in(path: Path) -> list[RunFiles]:
    """Returns the run in a file, or the recorded ones in a folder, in order; the latest
    comes last. Raises JournalError.
    """
    if not (path.is_file() or path.is_dir()):  # reading a pipe would never end
        raise JournalError(f"{path}: there is no such file or folder")
    if path.is_file():
        return [RunFiles(path.stem, (path,))]
    files = sorted(path.glob(f"*{SUFFIX}"), key=_age)
    files = [file for file in files if _SEGMENT.search(file.stem)] or files[-1:]
    if not files:
        inner = sorted({file.parent.name for file in path.glob(f"*/*{SUFFIX}")})
        hint = f", but there are some in {', '.join(inner)}: name one" if inner else ""
        raise JournalError(f"{path}: there is no {SUFFIX} file in this folder{hint}")
    runs: dict[str, list[Path]] = {}
    for file in files:
        runs.setdefault(_SEGMENT.sub("", file.stem), []).append(file)
    latest = _SEGMENT.sub("", files[-1].stem)
    runs[latest] = runs.pop(latest)
    return [RunFiles(name, tuple(files)) for name, files in runs.items()]


def _age(file: Path) -> tuple[str, list[int], str]:
    """Returns the sort key of segments: the second in which their run began, then
    numbers, by value.
    """
    numbers = re.findall(r"\d+", file.stem[_TIME_CHARS:])
    return file.stem[:_TIME_CHARS], [int(number) for number in numbers], file.name


def content_of(path: Path) -> Any:
    """Returns a file's content, mapped into memory. Raises JournalError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would never end
            raise JournalError(f"{path}: this is no regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
