"""State that a policy keeps outside of the engine's state: in its object, in its class or
in the variables of its module.

The values there are copied and compared. What cannot be copied, such as a lock, is not
looked at.
"""

import sys
from collections.abc import Iterator
from copy import deepcopy
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from attrs import define, field

_CODE: Final = (type, FunctionType, BuiltinFunctionType, ModuleType, property)
_CONSTANT: Final = (int, float, str, bytes, bool, type(None))


@define
class HiddenState:
    """The values around a policy as they were at first."""

    policy: Any
    _values: dict[tuple[int, str], tuple[Any, str, Any, str]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for owner, name, value, title in _places(self.policy):
            try:
                copy = deepcopy(value)
            except Exception:  # noqa: S112  # what cannot be copied raises errors of any kind
                continue
            if not _are_equal(copy, value):
                continue
            self._values[id(owner), name] = owner, name, copy, title

    def changed(self) -> str:
        """The title of the first value that has changed, or an empty text."""
        for owner, name, value, title in _places(self.policy):
            if (id(owner), name) not in self._values:
                if not isinstance(owner, ModuleType):  # imports add names
                    return title
            elif not _are_equal(self._values[id(owner), name][2], value):
                return title
        return ""

    def restore(self) -> None:
        """Set all values back."""
        for owner, name, value, _ in self._values.values():
            if not _are_equal(getattr(owner, name, None), value):
                _set(owner, name, deepcopy(value))


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type | ModuleType):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def _places(policy: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """Yields owner, name, value and title of each value in which a policy could keep
    state.
    """
    own = dict(getattr(policy, "__dict__", {}))
    kinds = [kind for kind in type(policy).__mro__ if not _is_known(kind.__module__)]
    for kind in type(policy).__mro__:
        for name in _slots(kind):
            if hasattr(policy, name):
                own[name] = getattr(policy, name)
    for name, value in own.items():
        yield policy, name, value, f"self.{name}"
    for kind in kinds:
        for name, value in _data(vars(kind)):
            yield kind, name, value, f"{kind.__name__}.{name}"
    for module_name in dict.fromkeys(kind.__module__ for kind in kinds):
        module = sys.modules.get(module_name)
        if module is not None:
            for name, value in _data(vars(module)):
                yield module, name, value, f"the module's {name}"


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name != "__weakref__")


def _data(variables: Any) -> Iterator[tuple[str, Any]]:
    """Variables that may be state: no code, and no constants in capitals."""
    for name, value in [*variables.items()]:
        is_constant = isinstance(value, _CONSTANT) and name.isupper()
        is_code = isinstance(value, _CODE) or name.startswith(("__", "_abc_"))
        if not (is_constant or is_code):
            yield name, value


def _is_known(module: str) -> bool:
    return module == "builtins" or module.split(".")[0] in {"minfer", "typing", "abc"}


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; values of a class without `__eq__` are compared by
    their fields, or by their `repr`.
    """
    if type(one) is not type(other):
        return False
    try:
        if "__eq__" in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
            return bool(one == other)
        if hasattr(one, "__dict__"):
            return bool(vars(one) == vars(other))
        return repr(one) == repr(other)
    except Exception:  # an equality of others
        return True
