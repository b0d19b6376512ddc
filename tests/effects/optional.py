"""What some tests need and not every machine has: packages of the extra `examples`, and
endpoints that a build of minfer may be without.
"""

from collections.abc import Iterable
from importlib.util import find_spec


def lacking(modules: Iterable[str]) -> str:
    """Why a test that needs some modules cannot run; nothing if it can."""
    for name in modules:
        if find_spec(name.split(".")[0]) is None:
            return f"{name} is not installed: pip install '.[examples]'"
        if find_spec(name) is None:
            return f"there is no {name} yet"
    return ""
