"""Sizes from which on the core takes another path to the same result.

They are for speed: no decision depends on them, nor does the journal of a state. Tests
patch them, since small tests never take a path that begins at 64 entries.
"""

from typing import Final

QUEUE_BUCKET: Final = 128  # entries of a bucket of the waiting queue, which then is split
RECENT_ENTRIES: Final = 64  # of a log; then they join the old ones
# generations compared at once, of the plan with the running ones
ALIGNED_WINDOW: Final = 64
SKIPPED_ROWS: Final = 16  # rows more than a plan had; then results are looked up by row
FRESH_STEPS: Final = 8  # after which fresh tokens join the tails
STOP_IDS: Final = 256  # known ones, before those of sequences that left are removed
LONG_PREFIX: Final = 32  # blocks of a hit that may be copied from another running table
NEIGHBOURS: Final = 8  # running sequences whose tables are searched for that
