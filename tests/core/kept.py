"""Journals that are kept as data: how the engine decided when they were written, for
good.

Whatever is rebuilt has to decide as it did: `test_kept` replays them, digests of states
included. There are swarm worlds and storms (tests/core/recorded.py), between them with
cancels, preemptions, several samples, windows, several groups of layers, failed steps,
displaced sequences and every policy. Those of format 2 were written by the engine of that
format, and are replayed by their decisions alone. In `REFUSED` is one that has what
minfer does not support any more.

`python -m tests.core.kept` writes those of today's format anew. That is due only where
decisions are meant to change.
"""

from collections import Counter
from pathlib import Path
from typing import Final

from minfer.journal.format import FORMAT
from minfer.journal.replay import Journal, open_segments
from minfer.journal.writing import encode_journal
from minfer.records.messages import Cancel, Discarded, Preempted, QueueBlocked, Submit
from tests.core.recorded import recorded, storm

# Whose heads have a state with transfers in flight, and blocks that wait to be stored.
SNAPSHOTS: Final = sorted((Path(__file__).parent / "journals" / "snapshots").iterdir())
FOLDER: Final = Path(__file__).parent / "journals"
REFUSED: Final = FOLDER / "refused" / "format3-world-2.journal"  # its max_repeat is 2
# Seeds of those in today's format; a seed is another world than it was for older ones.
WORLDS: Final = (14, 29, 33, 36, 48, 57, 73, 76, 80, 104)
STORMS: Final = (10, 12, 15, 37)
TURNS: Final = 80


def kept() -> list[Path]:
    """The files, of every format that is replayed."""
    return sorted(FOLDER.glob("*.journal"))


def read(path: Path) -> Journal:
    """A kept journal, not yet replayed."""
    return Journal(open_segments({path.name: path.read_bytes()}))


def content() -> Counter[str]:
    """What there is in all of them together, and how often."""
    seen = Counter[str]()
    for path in kept():
        journal = read(path)
        seen[type(journal.config.policy).__name__] += 1
        seen["several groups"] += len(journal.config.groups) > 1
        seen["window"] += any(one.window for one in journal.config.groups)
        for turn in journal.turns():
            seen["turns"] += 1
            seen["cancels"] += sum(isinstance(one, Cancel) for one in turn.events)
            seen["samples"] += sum(
                isinstance(one, Submit) and one.request.n > 1 for one in turn.events
            )
            for reason in turn.transition.reasons:
                seen["preemptions"] += isinstance(reason, Preempted)
                seen["shares"] += (
                    isinstance(reason, QueueBlocked) and reason.cause == "share"
                )
                seen["failures"] += isinstance(reason, Discarded)
    return seen


def main() -> None:
    for kind, run, seeds in (("world", recorded, WORLDS), ("storm", storm, STORMS)):
        for seed in seeds:
            config, turns = run(seed, TURNS)
            about = {"run": f"{kind} {seed}"}
            path = FOLDER / f"format{FORMAT}-{kind}-{seed}.journal"
            path.write_bytes(encode_journal(config, turns, about))
    for what, count in sorted(content().items()):
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
