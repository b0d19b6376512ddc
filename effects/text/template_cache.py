"""The cache of chat templates: their compiled form, and the results of probes.

A model has one template or two. Where requests bring templates of their own, each tenant
has a part of the cache: templates of others do not evict a tenant's, and only few of each
are kept.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

from attrs import define, field

MAX_TEMPLATES: Final = 8  # of a tenant
MAX_TENANTS: Final = 8
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
# Whose request brings the template; None: it is the server's own.
_tenant: Final[ContextVar[str | None]] = ContextVar("tenant", default=None)


@define(eq=False)
class TemplateCache:
    """Results by tenant, template and key; the least recently used go."""

    _tenants: OrderedDict[str | None, OrderedDict[str, dict[Any, Any]]] = field(
        factory=OrderedDict
    )
    _lock: threading.Lock = field(factory=threading.Lock)

    def results(self, template: str) -> dict[Any, Any]:
        """The cached results of a template of the present tenant."""
        with self._lock:
            templates = _touch(self._tenants, _tenant.get(), MAX_TENANTS, OrderedDict)
            results: dict[Any, Any] = _touch(templates, template, MAX_TEMPLATES, dict)
        return results

    def get(self, template: str, key: object, make: Callable[[], Result]) -> Result:
        """The result under a key, which is made if it is not kept."""
        results = self.results(template)
        if key not in results:
            results[key] = make()
        result: Result = results[key]
        return result


def _touch(
    cache: OrderedDict[Any, Any], key: object, max_size: int, make: Callable[[], Any]
) -> Any:
    """The value of a key, which becomes the latest; the oldest of too many is removed."""
    value = cache.setdefault(key, make())
    cache.move_to_end(key)
    if len(cache) > max_size:
        cache.popitem(last=False)
    return value


TEMPLATES: Final = TemplateCache()


def cached_by_template(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """A function whose results are kept with the template of its first argument, a
    `TemplateProbe`.
    """

    @wraps(function)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        probe: Any = args[0]
        make = partial(function, *args, **kwargs)
        key = (function, args, *kwargs.items())
        return TEMPLATES.get(probe.template, key, make)

    return cached


@contextlib.contextmanager
def templates_of(tenant: str) -> Iterator[None]:
    """Meanwhile, in this thread, templates come with requests of a tenant."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def are_of_requests() -> bool:
    """Whether templates come with requests now: the log has nothing about these."""
    return _tenant.get() is not None
