"""`evolve` for frozen records, fast enough for the hot path.

`attrs.evolve` walks the fields in Python (4 us for the engine's state). Reading all
fields with one `attrgetter` and calling the constructor by position takes a third of
that. A record without slots can be copied without its constructor, in a sixth: that is
used for the state, which changes ten times a turn. Type checkers see `attrs.evolve`,
whose arguments they know: they report a misspelt field.
"""

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

if TYPE_CHECKING:
    from attrs import evolve as evolve
else:
    T = TypeVar("T", bound=attrs.AttrsInstance)

    @cache
    def _reader(cls: type[attrs.AttrsInstance]) -> tuple[dict[str, int], Any]:
        names = [a.name for a in attrs.fields(cls)]
        return {name: place for place, name in enumerate(names)}, attrgetter(*names)

    @cache
    def _is_bare(cls: type[attrs.AttrsInstance]) -> bool:
        """Whether the records of a class are their `__dict__`, and making one neither
        checks nor converts anything.
        """
        has_checks = any(a.validator or a.converter for a in attrs.fields(cls))
        has_post_init = hasattr(cls, "__attrs_post_init__")
        return "__slots__" not in vars(cls) and not has_checks and not has_post_init

    def evolve(record: T, **changes: Any) -> T:
        """`record` with some fields changed; its class must take its fields, at least
        two, by position. Raises KeyError for a field that it does not have.
        """
        cls = type(record)
        if _is_bare(cls):
            before = record.__dict__
            fields = before | changes
            if len(fields) != len(before):
                raise KeyError(*(changes.keys() - before.keys()))
            copy = object.__new__(cls)
            object.__setattr__(copy, "__dict__", fields)  # frozen, but not yet in use
            return copy
        places, read = _reader(cls)
        values = [*read(record)]
        for name, value in changes.items():
            values[places[name]] = value
        return cls(*values)
