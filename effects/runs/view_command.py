"""`minfer view`: a recorded or simulated run as one HTML page."""

import argparse
import sys
import webbrowser
from pathlib import Path

from minfer.effects.runs.page.make import write_page
from minfer.effects.runs.policy_overrides import warn_of_overrides
from minfer.effects.runs.recorded import latest


def view_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer view`."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a journal, or a folder: its latest run"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="default: FILE.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")


def view(options: argparse.Namespace) -> int:
    """Write the page of a journal; returns the exit code. Raises ViewError and
    JournalError.
    """
    journal = latest(options.file).open()
    name = options.file.resolve().name.removesuffix(".journal")
    path = options.output or Path(f"{name}.html")
    size = write_page(path, name, journal.config, journal.turns())
    warn_of_overrides(name, journal.config.policy, journal.overrides)
    for torn in journal.torn:
        print(f"minfer: {torn}", file=sys.stderr)
    print(f"{path}: {size / 1e6:.3g} MB; open it in a browser")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
