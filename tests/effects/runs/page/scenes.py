"""Runs for the tests of the page, what a page holds, and what a browser shows of it."""

import base64
import json
import re
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.runs.page.make import write_page
from minfer.engine import step
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Event,
    Execute,
    Executed,
    Failed,
    Submit,
    Tick,
)
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import Turn, initial
from tests.effects.browser import Browser, found

seen = pytest.mark.skipif(
    found() is None, reason="no Chromium on PATH (Debian: chromium)"
)


def turns_of(
    config: EngineConfig, inbox: dict[int, list[Event]], max_turns: int = 500
) -> list[Turn]:
    """Turns in which every step succeeds at once; `inbox` says what else
    comes, by turn.
    """
    turns: list[Turn] = []
    state, plans = initial(config), list[Plan]()
    while len(turns) < max_turns and (
        state.requests or plans or len(turns) <= max(inbox)
    ):
        events: list[Event] = [Tick(len(turns) * 0.01)]
        extra = inbox.get(len(turns), [])
        failed = [event for event in extra if isinstance(event, Failed)]
        if plans and not failed:
            plan = plans.pop(0)
            events.append(
                Executed(
                    plan.step, tuple((1,) * count for count in plan.max_sampled_tokens)
                )
            )
        plans = [] if failed else plans
        events += extra
        turn = Turn(len(turns), state, tuple(events), step(config, state, tuple(events)))
        turns.append(turn)
        state = turn.transition.state
        plans += [
            command.plan
            for command in turn.transition.commands
            if isinstance(command, Execute)
        ]
    return turns


def requested(
    name: str, prompt: int, max_tokens: int, start: int = 0, **settings: Any
) -> Submit:
    tokens = tuple(range(start, start + prompt))
    return Submit(Request(id=name, prompt=tokens, max_tokens=max_tokens, **settings))


def scene() -> tuple[EngineConfig, list[Turn]]:
    """A short run in which everything has a known reason.

    The pool has 16 blocks of 4 tokens. `first` has 8 of them and grows; `urgent` needs
    12, and takes its place, to which it comes back. `huge` is refused, `gone` cancelled,
    a step fails.
    """
    config = EngineConfig(
        num_blocks=16,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        depth=1,
        policy=Priority(),
    )
    return config, turns_of(
        config,
        {
            0: [requested("first", 30, 20)],
            6: [requested("urgent", 47, 3, 100, priority=-1, client="Ann")],
            8: [requested("gone", 45, 9, 300), requested("huge", 64, 1)],
            10: [Cancel("gone")],
            12: [Failed(11, "out of memory")],
        },
    )


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The header and the columns of a page."""
    match = re.search(rb'id="data">([^<]*)<', data)
    assert match
    packed = zlib.decompress(base64.b64decode(match[1]))
    size = int.from_bytes(packed[:8], "little")
    head, columns, offset = json.loads(packed[8 : 8 + size]), {}, 8 + size
    for name, kind, length in head["columns"]:
        cells = array(kind)
        cells.frombytes(packed[offset : offset + length * cells.itemsize])
        offset += length * cells.itemsize
        total, values = 0, []
        for cell in cells:
            total += int(cell)
            values.append(total)
        columns[name] = values
    assert offset == len(packed)
    return head, columns


def entries(data: bytes) -> list[tuple[int, str, str, tuple[int, ...]]]:
    """The log of a page: turn, kind, whom it is about, cells."""
    head, columns = unpacked(data)
    kinds, texts = [*head["kinds"]], head["texts"]
    cells = zip(*(columns[f"log.{letter}"] for letter in "abc"), strict=True)
    rows = zip(
        columns["log.turn"],
        columns["log.kind"],
        columns["log.sample"],
        cells,
        strict=True,
    )
    names = [texts[place] for place in columns["sample.id"]] + [""]
    return [
        (turn, kinds[kind], names[sample], values) for turn, kind, sample, values in rows
    ]


def shown(
    chromium: Browser,
    tmp_path: Path,
    run: tuple[EngineConfig, list[Turn]],
    state: str = "",
    **size: int,
) -> Browser:
    """The browser with the page of a run, which has nothing to complain of."""
    write_page(tmp_path / "page.html", "a run", *run)
    chromium.open(tmp_path / "page.html", state, **size)
    assert chromium.value("document.documentElement.dataset.failed ?? ''") == ""
    return chromium


def words(chromium: Browser, place: str = "aside") -> str:
    drawn: str = chromium.value(f"document.querySelector('{place}').innerText")
    return re.sub(r"\s+", " ", drawn)


def spot(chromium: Browser, panel: str, turn: float, row: float) -> tuple[float, float]:
    """Where in the window a place of a panel is: in the middle of a turn, so many rows
    down.
    """
    x, y = chromium.value(f"""(() => {{ const box = $('{panel}').getBoundingClientRect();
        const x = box.x + (px({turn}) + px({turn + 1})) / 2;
        return [x, box.y + view.row * {row}]; }})()""")
    return x, y


PIXEL = """(id, x, y) => { const one = $(id), d = window.devicePixelRatio;
    const { data } = one.getContext('2d').getImageData(x * d, y * d, 1, 1)
    return '#' + [...data].slice(0, 3)
      .map((part) => part.toString(16).padStart(2, '0')).join(''); }"""
