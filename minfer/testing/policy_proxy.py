"""A policy that stands before another one: its methods are called by one function."""

from typing import Any

from attrs import define

from minfer.policies.mistakes import METHODS


@define
class PolicyProxy:
    """Calls the methods of `policy` by `_call`; all else, as settings, is the policy's
    own.
    """

    policy: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in METHODS:  # a setting
            return getattr(self.policy, name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        """The answer of the policy's method `name`."""
        raise NotImplementedError
