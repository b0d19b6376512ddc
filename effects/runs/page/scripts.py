"""The scripts of the page, joined into one.

Theory. Each script is a module of JavaScript with explicit imports. A browser opens no
modules from a file, so they are joined: every script after those that it imports from,
without its import lines, and without the word `export`. The result shares one scope: a
name is declared once in all of them.
"""

import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).with_name("script")

IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT: Final = re.compile(
    r"^export (?=(?:async )?(?:function|const|let) )", re.MULTILINE
)


def joined_scripts(folder: Path = SCRIPTS) -> str:
    """The scripts of a folder as one. Raises CycleError if they import in a circle, and
    KeyError if one imports from a script that is not there.
    """
    sources = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.js"))}
    needs = {
        name: [imported for _, imported in IMPORT.findall(source)]
        for name, source in sources.items()
    }
    order = TopologicalSorter(needs).static_order()
    bodies = [EXPORT.sub("", IMPORT.sub("", sources[name])).strip() for name in order]
    return '"use strict";\n\n' + "\n\n".join(bodies) + "\n"
