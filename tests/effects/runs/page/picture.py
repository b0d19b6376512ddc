"""The picture of the viewer in the README: `python -m tests.effects.runs.page.picture`.

A made-up afternoon: requests with ids as servers give them, some urgent, some cancelled,
more than fit at once, and four minutes without requests.
"""

import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

from minfer.effects.runs.page.make import write_page
from minfer.engine import step
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Event, Execute, Executed, Submit, Tick
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.state import Turn, initial
from tests.effects.browser import browser

PICTURE: Final = Path("bench/results/viewer.png")
SEED: Final = 4
CONFIG: Final = EngineConfig(
    num_blocks=200,
    block_size=16,
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    depth=1,
    policy=Priority(),
)
SYSTEM: Final = tuple(range(96))  # what half of the prompts begin with
PAUSE: Final = 245.0  # seconds
STEP: Final = 0.012  # seconds, and for each token of a prompt:
TOKEN: Final = 0.0001


def arrivals(rng: Random) -> list[tuple[float, Event]]:
    """What comes, and when, in seconds."""
    events: list[tuple[float, Event]] = []
    for n in range(30):
        begin = PAUSE if n >= 22 else 0.0
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(40, 420)))
        request = Request(
            id=f"chatcmpl-{rng.getrandbits(128):032x}",
            prompt=SYSTEM * rng.randrange(2) + prompt,
            max_tokens=rng.randrange(40, 180),
            priority=-(n % 7 == 6),
            client=("ann", "bo")[n % 2],
        )
        time = begin + rng.random() * (1.2 if begin else 2.6)
        events.append((time, Submit(request)))
        if n in (9, 17):
            events.append((time + 0.7, Cancel(request.id)))
    return sorted(events, key=lambda arrival: arrival[0])


def turns() -> list[Turn]:
    """A run of these on a virtual clock."""
    pending = arrivals(Random(SEED))
    history: list[Turn] = []
    state = initial(CONFIG)
    plans: list[Plan] = []
    now = 0.0
    while pending or state.requests or plans:
        if not state.requests and not plans:
            now = max(now, pending[0][0])
        events: list[Event] = [Tick(now)]
        if plans:
            executed = plans.pop(0)
            events.append(
                Executed(
                    executed.step,
                    tuple((1,) * count for count in executed.max_sampled_tokens),
                )
            )
        while pending and pending[0][0] <= now:
            events.append(pending.pop(0)[1])
        transition = step(CONFIG, state, tuple(events))
        history.append(Turn(len(history), state, tuple(events), transition))
        state = transition.state
        plans += [
            command.plan
            for command in transition.commands
            if isinstance(command, Execute)
        ]
        now += STEP + TOKEN * sum(
            len(fill.tokens) for plan in plans for fill in plan.fills
        )
    return history


def main(picture: Path = PICTURE) -> int:
    """Write the picture, with the story of a sequence that was preempted."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_page(page, "afternoon", CONFIG, turns())
        with browser(Path(folder) / "profile") as window:
            window.open(page)
            window.value("choose(log.sample[marks[0]]); go(log.turn[marks[0]])")
            window.value("new Promise((done) => setTimeout(done, 200))")
            picture.write_bytes(window.picture())
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
