"""`minfer view`: a recorded or simulated run, or two side by side, as one HTML page."""

import argparse
import webbrowser
from pathlib import Path
from typing import Final

from minfer.effects.live.journal.journal_files import SUFFIX
from minfer.effects.runs.page.make import ViewError, page, write_whole
from minfer.effects.runs.page.side_by_side import side_by_side
from minfer.effects.runs.policy_overrides import warn_of_overrides
from minfer.effects.runs.recorded import latest, note_torn

MAX_FILES: Final = 2  # side by side


def view_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer view`."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a journal, or a folder: its latest run; two are shown side by side",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE", help="default: FILE.html"
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")


def view(options: argparse.Namespace) -> int:
    """Write the page of a journal, or of two; returns the exit code. Raises ViewError and
    JournalError.
    """
    if len(options.files) > MAX_FILES:
        raise ViewError(f"{len(options.files)} runs: at most {MAX_FILES} have room")
    output = options.output
    if output is not None and output.suffix == SUFFIX:
        raise ViewError(f"-o {output}: that is the name of a journal; end it in .html")
    pages = [_page_of(file) for file in options.files]
    (name, data), *others = pages
    if others:
        name = "-and-".join(run_name for run_name, _ in pages)
        data = side_by_side(pages)
    path = output or Path(f"{name}.html")
    size = write_whole(path, data)
    print(f"{path}: {size / 1e6:.3g} MB; open it in a browser")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _page_of(file: Path) -> tuple[str, bytes]:
    """The name and the page of a run, with messages about it on standard error."""
    journal = latest(file).open()
    name = file.resolve().name.removesuffix(SUFFIX)
    data = page(name, journal.config, journal.turns())
    warn_of_overrides(name, journal.config.policy, journal.overrides)
    note_torn(journal)
    return name, data
