"""The names of all records and fields in journals, as `wire_names.txt` has them.

`python -m tests.core.journal.wire_names` writes the file anew: for records and fields
that are new, or removed. A name that was in a journal must not change.
"""

from pathlib import Path
from textwrap import wrap
from typing import Final

from minfer.journal.codec import RECORDS
from minfer.journal.differences import REASONS
from minfer.journal.wire_names import fields_of

FILE: Final = Path(__file__).with_suffix(".txt")


def found() -> str:
    """A paragraph per record: its name, and those of its fields in their order."""
    kinds = sorted({**RECORDS, **REASONS}.items())
    own = [(name, kind) for name, kind in kinds if kind.__module__.startswith("minfer.")]
    reported = [
        " ".join([f"{name}:", *(f.wire_name for f in fields_of(kind) if f.init)])
        for name, kind in own
    ]
    return "".join(
        "\n".join(wrap(one, 90, subsequent_indent="  ")) + "\n" for one in reported
    )


if __name__ == "__main__":
    FILE.write_text(found())
