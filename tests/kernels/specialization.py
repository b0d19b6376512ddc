"""What Triton compiles: a kernel, specialized for a kind of arguments; noted, not
launched.

Triton compiles a kernel once for each combination of its arguments' types and constants,
of what is known of the rest (a pointer or an integer that 16 divides, an integer that is
1), and of options (warps, stages, early launch). In `recorded` launches are noted instead
of made, for a GPU that need not be there; tensors are the CPU's.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer.kernels import target
from minfer.kernels.target import Capability

LANES: Final = 32  # of a warp


class Specialization(NamedTuple):
    """A kernel as it is compiled once."""

    kernel: str  # module.name
    data: str  # Triton's own JSON of all below, and of the key in memory

    def _part(self, name: str) -> Any:
        return json.loads(self.data)[name]

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument."""
        return dict(self._part("signature"))

    @property
    def constants(self) -> dict[str, Any]:
        """What is known of arguments when the kernel is compiled."""
        names = [*self.signature]
        keys, values = self._part("constant_keys"), self._part("constant_vals")
        return {
            names[index]: value for (index, *_), value in zip(keys, values, strict=True)
        }

    @property
    def divisible(self) -> frozenset[str]:
        """Arguments that 16 divides."""
        names = [*self.signature]
        constants = self.constants
        divisible = {names[index] for index, *_ in self._part("attrs_keys")}
        return frozenset(divisible.difference(constants))

    @property
    def options(self) -> dict[str, Any]:
        """Warps, stages, early launch and the like."""
        return dict(self._part("options"))

    @property
    def key(self) -> str:
        """Under which a process finds what was compiled."""
        return str(self._part("key"))


class Elsewhere:
    """What Triton asks of a driver while it compiles, for a GPU that is not there."""

    def __init__(self, capability: Capability) -> None:
        major, minor = capability
        self.target = GPUTarget("cuda", 10 * major + minor, LANES)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return -int(self.target.arch)  # a number that no device has

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


@contextmanager
def elsewhere(capability: Capability) -> Iterator[None]:
    """What Triton does in here is for a GPU of this compute capability."""
    real = None
    with suppress(RuntimeError):  # there is no GPU at all
        real = driver.active
    driver.set_active(Elsewhere(capability))
    try:
        with patch.object(target, "default_capability", capability):
            yield
    finally:
        driver.set_active(real)


@contextmanager
def recorded(capability: Capability) -> Iterator[list[Specialization]]:
    """What is launched in here is noted instead: each specialization once, in the order
    in which they are first needed.
    """
    specializations = dict[Specialization, None]()
    run = JITFunction.run

    def note(**event: Any) -> Any:
        """Instead of compiling."""
        kernel = event["fn"].jit_function
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        specializations[Specialization(name, event["compile"]["specialization_data"])] = (
            None
        )
        return True

    def noted(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return run(kernel, *arguments, warmup=True, **options)

    noticed = list[Specialization]()
    with (
        elsewhere(capability),
        patch.object(JITFunction, "run", noted),
        patch.object(knobs.runtime, "jit_cache_hook", note),
    ):
        yield noticed
    noticed += specializations
