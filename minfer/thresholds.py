"""Sizes from which on the core takes another path to the same result.

They are for speed: no decision depends on them, nor what is said of a state in a journal.
Tests patch them, since small tests never take a path that begins at 64 entries.
"""

from typing import Final

LINE_BUCKET: Final = 128  # entries of a bucket of the waiting queue, which then is split
RECENT_ENTRIES: Final = 64  # of a log; then they join the old ones
ALIGNED_WINDOW: Final = 64  # generations compared at once, plan with running
SAT_OUT: Final = 16  # rows more than a plan had; then its results are looked up by row
FRESH_STEPS: Final = 8  # after which fresh tokens join the tails
STOP_IDS: Final = 256  # known, before those of sequences that left are sorted out
LONG_PREFIX: Final = 32  # blocks of a hit that a neighbour's table may give whole
NEIGHBOURS: Final = 8  # running sequences whose tables are looked at for that
