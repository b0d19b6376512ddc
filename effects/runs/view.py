"""`minfer view`: a recorded or simulated run as one HTML page."""

import argparse
import sys
import webbrowser
from pathlib import Path

from minfer.effects.live.journal_files import read_journal
from minfer.effects.runs.page.make import write_page


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
