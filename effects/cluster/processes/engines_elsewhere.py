"""The engines of a server that has none of them on its own machine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.setup.engine_args import EngineArgs


@frozen(kw_only=True)
class EnginesElsewhere:
    """The engines of a server that has none of them on its own machine."""

    args: EngineArgs
    deployment: Deployment
    paths: Sequence[Path]  # beside which fronts read their addresses
    fronts: int
    timeout: float  # seconds in which an engine must send a heartbeat; 0: any number


# Keeps these engines, with callbacks as above.
Keep: TypeAlias = Callable[
    [EnginesElsewhere, Callable[[], None], Callable[[], None]], int
]
