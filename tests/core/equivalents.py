"""Mutants that no test can kill, as they decide the same: each with the argument.

Keyed by the mutant's name (file, function, rule, expression before and after), as
`python -m tests.core.mutants` prints it. An entry whose mutant is gone, or is killed, is an error.
"""

from typing import Final

EQUIVALENT: Final[dict[str, str]] = {}
