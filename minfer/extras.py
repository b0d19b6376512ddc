"""Libraries that only a part of minfer needs: what to type where one is missing.

pyproject.toml has them as extras. minfer is on no package index, so that its extras are
installed from a clone.
"""


def how_to_install(extra: str) -> str:
    """What to type for the libraries of an extra."""
    return f"pip install '.[{extra}]' in a clone of minfer"
