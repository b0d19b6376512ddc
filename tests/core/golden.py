"""The golden journal: how the engine decided when it was written, for good.

Every later engine has to replay it without a divergence, digests of states included. It
is of a swarm world with a host tier and an external one, and begins with a snapshot, with
transfers in flight; `contents` counts what else is in it.

`python -m tests.core.golden` writes it anew. That is due only where decisions are meant
to change, and with another `minfer.journal.format.FORMAT`.
"""

from collections import Counter
from pathlib import Path
from typing import Final

from minfer.journal.format import FORMAT
from minfer.journal.replay import Journal, open_segments
from minfer.journal.writing import encode_journal
from minfer.records.messages import (
    Cancel,
    Discarded,
    Execute,
    Loading,
    Preempted,
    Submit,
)
from tests.core.recorded import recorded

FILE: Final = Path(__file__).parent / "journal" / f"format{FORMAT}.journal"
SEED: Final = 28  # of the world: shared seats, drafts, two groups of layers
FIRST_TURN: Final = 100
LAST_TURN: Final = 300


def golden() -> Journal:
    """The golden journal, not yet replayed."""
    return Journal(open_segments({FILE.name: FILE.read_bytes()}))


def contents() -> Counter[str]:
    """What there is in it, and how often."""
    journal = golden()
    counts = Counter(
        {
            "groups": len(journal.config.groups),
            "windows": sum(group.window > 0 for group in journal.config.groups),
        }
    )
    for turn in journal.turns():
        requests = [event.request for event in turn.events if isinstance(event, Submit)]
        reasons = Counter(type(reason) for reason in turn.transition.reasons)
        counts["turns"] += 1
        counts["several samples"] += sum(request.n > 1 for request in requests)
        counts["cancels"] += sum(isinstance(event, Cancel) for event in turn.events)
        counts["preemptions"] += reasons[Preempted]
        counts["failed steps"] += reasons[Discarded]
        counts["loads"] += reasons[Loading]
        plans = (c.plan for c in turn.transition.commands if isinstance(c, Execute))
        counts["drafts"] += sum(len(plan.drafts) for plan in plans)
    return counts


def main() -> None:
    config, turns = recorded(SEED, LAST_TURN)
    about = {"run": f"world {SEED}"}
    FILE.write_bytes(encode_journal(config, turns[FIRST_TURN:LAST_TURN], about))
    for name, count in sorted(contents().items()):
        print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
