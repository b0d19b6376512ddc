"""`minfer view`: a run as one HTML page, which needs nothing but a browser.

Theory. Most turns say little, so what is kept of a run is a few numbers per turn and per
planned step, and a log of what was out of the ordinary: arrivals, admissions, chunks of
prompts, preemptions, ends. The page works the rest out: a sequence that decodes for a
thousand turns is an entry where that begins and one where it ends, whatever the batch.
All is columns of numbers, and a table of the texts, ids and errors, that they point into;
deflated, and in base64, which cannot hold a `<`: nothing that a request says can become
part of the page's markup.
"""

import argparse
import base64
import hashlib
import json
import sys
import webbrowser
import zlib
from array import array
from collections.abc import Iterable
from math import inf, isfinite
from operator import sub
from pathlib import Path
from typing import Any, Final

import minfer.messages as say
from minfer.config import SIZES, ConfigError, EngineConfig
from minfer.effects.live.journal_files import read_journal
from minfer.plan import Plan
from minfer.request import MAX_SAMPLES, Request
from minfer.sequence import SampleId
from minfer.state import EngineState, Turn

_TOP: Final = 2**30 - 1  # what a cell holds; only nonsense is larger, and is cut off
_TABLES: Final = {
    "turn": ("free", "cached", "shareable", "running", "waiting", "tokens", "done"),
    "step": ("turn", "number", "decode", "chunks", "prefill", "repeat"),
    "sample": ("id", "sample", "n", "prompt", "most", "about"),
    "log": ("turn", "kind", "who", "a", "b", "c"),
}
# What the log says: the kinds of its entries, and what their cells a, b and c are. Text
# stands as its place in the table of texts, a sample as its number (-1: nobody).
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "Present": (
        "state",
    ),  # as the recording begins: 0 waits, 1 fills, 2 decodes, 3 waits again
    "Submit": (),
    "Cancel": ("id",),
    "Finish": ("length", "reason"),
    "Failed": ("step", "error"),
    "Admitted": ("hit", "known", "copied"),
    "Missed": ("block", "blocks"),
    "Held": ("cause", "needs", "available"),
    "Preempted": ("by", "known", "computed"),
    "Finished": ("reason", "length", "error"),
    "Voided": ("step", "error", "rows"),
    "Ignored": ("event", "detail"),
    "Overruled": ("question", "why"),
    "Chunk": (
        "step",
        "tokens",
        "last",
    ),  # of a history, planned; after the last one, a token
}
_PLACES: Final = {kind: place for place, kind in enumerate(_KINDS)}


class ViewError(ConfigError):
    """There is nothing to show, or no place to write it; the message says which."""


class Run:
    """The columns of a run: `take` its turns in order."""

    def __init__(self) -> None:
        self.first, self.start = 0, 0.0  # number and time (seconds) of the first turn
        self.time = array("d")  # whole microseconds since the first turn
        self.tables = {
            table: [array("i") for _ in names] for table, names in _TABLES.items()
        }
        self.texts: dict[str, int] = {}
        self.serving: dict[SampleId, list[int]] = {}  # who has not ended, by name
        self.gens: dict[int, int] = {}  # who a generation is
        self.cached = self.prompt = 0  # tokens, whose ratio is the prefix-hit share

    def take(self, turn: Turn) -> None:
        """Add a turn."""
        state, commands = turn.transition.state, turn.transition.commands
        if not self.time:
            self.first, self.start = turn.number, state.time
            self._present(turn.before)
        since = (state.time - self.start) * 1e6
        self.time.append(max(round(since) if isfinite(since) else 0, *self.time[-1:], 0))
        done = self._events(turn)
        emits = [one for one in commands if isinstance(one, say.Emit)]
        for end in (end for emit in emits for end in emit.finished):
            self._end(end)
        for reason in (
            r for r in turn.transition.reasons if not isinstance(r, say.Ended)
        ):
            self._say(reason)  # of an end, `Finished` said it
            if isinstance(reason, say.Admitted):
                self.cached, self.prompt = (
                    self.cached + reason.cached,
                    self.prompt + reason.prompt,
                )
        pool, tokens = state.blocks, sum(sum(map(len, emit.tokens)) for emit in emits)
        self._add(
            "turn",
            pool.free,
            pool.idle,
            pool.live,
            len(state.running),
            len(state.waiting),
            tokens,
            done,
        )
        for command in commands:
            if isinstance(command, say.Execute):
                self._plan(command.plan)

    def _events(self, turn: Turn) -> int:
        """Log what came in; returns the step whose results did, or -1."""
        done, flying = -1, {plan.step for plan in turn.before.inflight}
        for request in _entered(turn):
            for sample in range(max(1, min(request.n, MAX_SAMPLES))):
                self._note("Submit", self._sample(request, sample))
        for event in turn.events:
            if isinstance(event, say.Executed):
                done = (
                    event.step
                    if type(event.step) is int and event.step in flying
                    else done
                )
            elif type(event) in say.EVENTS and not isinstance(
                event, say.Tick | say.Submit
            ):
                self._say(event)
        return done

    def _present(self, before: EngineState) -> None:
        """Learn who is there already: a recording may begin in the middle of a run."""
        run = before.running
        for seq, gen, sched, base in zip(
            run.seqs, run.gens, run.sched, run.base, strict=True
        ):
            self.gens[gen] = self._sample(seq.request, seq.sample)
            self._note("Present", self.gens[gen], 1 + (sched >= base))
        for seq in before.waiting:
            self._note(
                "Present", self._sample(seq.request, seq.sample), 3 * bool(seq.preempted)
            )

    def _plan(self, plan: Plan) -> None:
        """Log the chunks of a plan; rows that decode are only counted."""
        for one in plan.opens:
            self.gens[plan.gens[one.index]] = self._who(one.name)
        prefill, chunks = 0, len(plan.fills)
        for fill in plan.fills:
            who, last = (
                self.gens.get(plan.gens[fill.index], -1),
                int(plan.most[fill.index] > 0),
            )
            self._note("Chunk", who, plan.step, len(fill.tokens), last)
            prefill += len(fill.tokens)
        self._add(
            "step",
            len(self.time) - 1,
            plan.step,
            len(plan.gens) - chunks,
            chunks,
            prefill,
            plan.repeat,
        )

    def _sample(self, request: Request, sample: int) -> int:
        """Enter a sample; returns its number."""
        who = len(self.tables["sample"][0])
        said = (
            ("priority", request.priority, 0),
            ("client", request.client, ""),
            ("deadline", request.deadline, inf),
        )
        about = ", ".join(
            f"{name} {value}" for name, value, usual in said if value != usual
        )
        self._add(
            "sample",
            self._cell(request.id),
            sample,
            request.n,
            len(request.prompt),
            request.max_tokens,
            self._cell(about),
        )
        self.serving.setdefault((request.id, sample), []).append(who)
        return who

    def _end(self, end: say.Finished) -> None:
        """Log an end. Several have one name in the turn in which one of them follows
        another.
        """
        here = self.serving.pop((end.id, end.sample), [-1])
        self._say(end, here.pop(0))
        self.serving |= {(end.id, end.sample): here} if here else {}

    def _say(self, one: Any, who: int = -1) -> None:
        """Log an event or a reason."""
        if who < 0 and hasattr(one, "id"):
            who = self._who((one.id, getattr(one, "sample", 0)))
        kind = type(one).__name__
        self._note(kind, who, *(self._cell(getattr(one, name)) for name in _KINDS[kind]))

    def _who(self, name: SampleId) -> int:
        return self.serving.get(name, (-1,))[0]

    def _note(self, kind: str, who: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._add("log", max(0, len(self.time) - 1), _PLACES[kind], who, a, b, c)

    def _add(self, table: str, *cells: int) -> None:
        for column, cell in zip(self.tables[table], cells, strict=True):
            column.append(max(-_TOP, min(cell, _TOP)))

    def _cell(self, value: Any) -> int:
        if isinstance(value, str):
            return self.texts.setdefault(value, len(self.texts))
        return self._who(value) if isinstance(value, tuple) else int(value)


def _entered(turn: Turn) -> list[Request]:
    """The requests that a turn took on or refused; one whose id is being served is
    ignored.

    The reason for that does not say which of several it was, so the events are followed:
    who is served at each of them.
    """
    came = [event.request for event in turn.events if isinstance(event, say.Submit)]
    reasons, commands = turn.transition.reasons, turn.transition.commands
    if not any(isinstance(r, say.Ignored) and r.event == "submit" for r in reasons):
        return came
    served, entered = set(_served(turn.before)), list[Request]()
    emits = [one for one in commands if isinstance(one, say.Emit)]
    ends = [(end, bool(emit.ids)) for emit in emits for end in emit.finished]
    stepped = {(end.id, end.sample) for end, ran in ends if ran or end.reason == "error"}
    refused = [end.id for end, _ in ends if end.reason == "rejected" and not end.sample]
    for event in turn.events:
        match event:
            case say.Submit(one) if not any(name == one.id for name, _ in served):
                entered.append(one)
                if one.id in refused and not _could_be(one, turn):
                    refused.remove(one.id)
                else:
                    served |= {(one.id, sample) for sample in range(one.n)}
            case say.Cancel(name):
                served = {sample for sample in served if sample[0] != name}
            case say.Finish(name, sample):
                served.discard((name, sample))
            case say.Executed() | say.Failed():
                served -= stepped
    return entered


def _could_be(request: Request, turn: Turn) -> bool:
    """Whether this is the request of its id that is served after the turn."""
    after = turn.transition.state
    return any(seq.request is request for seq in (*after.waiting, *after.running.seqs))


def _served(state: EngineState) -> list[SampleId]:
    """All samples that have not ended."""
    return [*(seq.id for seq in state.waiting), *state.running.ids]


def page(name: str, config: EngineConfig, turns: Iterable[Turn]) -> bytes:
    """The page of a run that is called `name`. Raises ViewError if there are no turns."""
    run = Run()
    for turn in turns:
        run.take(turn)
    if not run.time:
        raise ViewError(f"{name} holds no turns yet: there is nothing to show")
    columns: dict[str, array[Any]] = {"turn.time": run.time}
    for table, names in _TABLES.items():
        columns |= zip(
            (f"{table}.{one}" for one in names), run.tables[table], strict=True
        )
    head = json.dumps(
        {
            "name": name,
            "first": run.first,
            "cached": run.cached,
            "prompt": run.prompt,
            "kinds": _KINDS,
            "texts": [*run.texts],
            "policy": type(config.policy).__name__,
            **{one: getattr(config, one) for one in SIZES},
            "columns": [(key, col.typecode, len(col)) for key, col in columns.items()],
        }
    ).encode()
    head += b" " * (-len(head) % 8)
    # Differences, most of which are small, deflate well.
    cells = (
        col[:1] + array(col.typecode, map(sub, col[1:], col)) for col in columns.values()
    )
    data = b"".join((len(head).to_bytes(8, "little"), head, *map(bytes, cells)))
    template = Path(__file__).with_name("view.html").read_bytes()
    allowed = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for tag in ("script", "style"):  # these very ones: what got in besides could not run
        text = template.split(f"<{tag}>".encode())[1].split(f"</{tag}>".encode())[0]
        digest = base64.b64encode(hashlib.sha256(text).digest())
        allowed += f"; {tag}-src 'sha256-{digest.decode()}'"
    template = template.replace(b"@ALLOWED@", allowed.encode())
    return template.replace(b"@DATA@", base64.b64encode(zlib.compress(data, 9)))


def write_page(path: Path, name: str, config: EngineConfig, turns: Iterable[Turn]) -> int:
    """Write a run's page, whole or not at all; returns its size in bytes. Raises
    ViewError.
    """
    data, part = page(name, config, turns), path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        if part.is_file():
            part.unlink()
        raise ViewError(
            f"{path}: {error.strerror or error}; name another place with -o"
        ) from None
    return len(data)


def view_options(parser: argparse.ArgumentParser) -> None:
    """Add what `minfer view` takes."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a journal, or a folder of them"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="default: FILE.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")


def view(options: argparse.Namespace) -> int:
    """Write the page of a journal; returns the exit code. Raises ViewError and
    JournalError.
    """
    journal = read_journal(options.file)
    name = options.file.resolve().name.removesuffix(".journal")
    path = options.output or Path(f"{name}.html")
    size = write_page(path, name, journal.config, journal.turns())
    for torn in journal.torn:
        print(f"minfer: {torn}", file=sys.stderr)
    print(f"{path}: {size / 1e6:.3g} MB; open it in a browser")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
