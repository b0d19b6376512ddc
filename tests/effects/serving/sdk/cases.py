"""A case: what a client is used for, in one line, and the code that does
it.
"""

import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from attrs import define, field, frozen

from tests.effects.optional import lacking
from tests.effects.serving.sdk.servers import Servers

# Else litellm asks a server of its makers for prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

Run = Callable[[Servers], None]


@frozen
class Case:
    """One use of a client; `run` raises if it goes wrong."""

    client: str
    says: str
    needs: tuple[str, ...]  # modules
    run: Run

    @property
    def name(self) -> str:
        """As a test is called."""
        return f"{self.client}: {self.says}"

    def lacks(self) -> str:
        """Why it cannot be tried here; nothing if it can."""
        return lacking(self.needs)


@define
class Table:
    """The cases of one client, in the order in which they are written."""

    client: str  # its package, as pip calls it
    needs: tuple[str, ...]  # modules that all of its cases need
    cases: list[Case] = field(factory=list)

    def __call__(self, says: str, *needs: str) -> Callable[[Run], Run]:
        """Make a case of the function below."""

        def add(run: Run) -> Run:
            self.cases.append(Case(self.client, says, (*self.needs, *needs), run))
            return run

        return add

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    @property
    def version(self) -> str:
        """Of the package, if it is installed."""
        try:
            return version(self.client)
        except PackageNotFoundError:
            return "not installed"
