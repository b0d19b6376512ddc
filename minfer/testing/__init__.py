"""The specification, and a kit that tests scheduling policies against it.

`check_policy(MyPolicy())` in a test is all, and `check_router(MyRouting())` for a routing
policy; `PolicyMachine`, `requests`, `traces`, `configs`, `states` and `routing_requests`
are for custom tests. They need hypothesis, which is imported on
first use; the specification does not need it: `minfer.testing.invariants.check` checks a
state, `minfer.testing.ledger.check_turn` a turn. README.md lists the laws by file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minfer.extras import how_to_install

if TYPE_CHECKING:
    from minfer.testing.kit import PolicyMachine as PolicyMachine
    from minfer.testing.kit import check_policy as check_policy
    from minfer.testing.kit import configs as configs
    from minfer.testing.kit import requests as requests
    from minfer.testing.kit import states as states
    from minfer.testing.kit import traces as traces
    from minfer.testing.router_kit import check_router as check_router
    from minfer.testing.router_kit import routing_requests as routing_requests
    from minfer.testing.router_trial import RouterError as RouterError
    from minfer.testing.trial import PolicyError as PolicyError

_LAZY = {
    "PolicyError": "trial",
    "PolicyMachine": "kit",
    "RouterError": "router_trial",
    "check_policy": "kit",
    "check_router": "router_kit",
    "configs": "kit",
    "requests": "kit",
    "routing_requests": "router_kit",
    "states": "kit",
    "traces": "kit",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'minfer.testing' has no attribute {name!r}")
    try:
        return getattr(import_module(f"minfer.testing.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        what = f"minfer.testing.{name} needs hypothesis: {how_to_install('testing')}"
        raise ModuleNotFoundError(what, name="hypothesis") from None
