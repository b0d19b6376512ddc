"""Optional libraries of minfer: how to install one that is missing.

pyproject.toml lists them as extras. minfer is on no package index, so its extras are
installed from a clone.
"""


def how_to_install(extra: str) -> str:
    """The command that installs the libraries of an extra."""
    return f"pip install '.[{extra}]' in a clone of minfer"
