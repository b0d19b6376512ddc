"""What Triton compiles: a kernel, specialized for a kind of arguments; noted, not
launched.

Theory. Triton compiles a kernel once for each combination of its arguments' types and
constants, of what is known of the rest (a pointer or an integer that 16 divides, an
integer that is 1), and of options (warps, stages, early launch). Which combination a
launch needs is decided by what launches it: sizes, tunes, the GPU. So the only list that
cannot drift from that is one that the launching functions make themselves. In `recorded`
their launches are noted instead of made, by Triton's own reckoning, for a GPU that need
not be there; tensors are nowhere as well (torch's meta device), so that a step of a model
of any size takes milliseconds and no memory.

What is noted is Triton's own form of it (`JITFunction.preload` takes it back), so the key
under which the compiled kernel is kept, in memory and on disk, is that of the launch.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minfer.kernels.target import Capability, aim_here, aimed_at

LANES: Final = 32  # of a warp
ALIGNED: Final = 512  # bytes: every allocation of a GPU begins at a multiple of it
one_at_a_time: Final = threading.RLock()  # who changes what Triton does for a thread


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
        return {names[at]: value for (at, *_), value in zip(keys, values, strict=True)}

    @property
    def divisible(self) -> frozenset[str]:
        """Arguments that 16 divides."""
        names = [*self.signature]
        known = self.constants
        found = {names[at] for at, *_ in self._part("attrs_keys")}
        return frozenset(found.difference(known))

    @property
    def options(self) -> dict[str, Any]:
        """Warps, stages, early launch and the like."""
        return dict(self._part("options"))

    @property
    def key(self) -> str:
        """Under which a process finds what was compiled."""
        return str(self._part("key"))


class Nowhere:
    """A tensor that is not there, as Triton sees one: its type, and where it begins."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        offset = int(tensor.storage_offset()) * tensor.element_size()
        self.begins = ALIGNED + offset if tensor.numel() else 0

    def data_ptr(self) -> int:
        """Where it would begin, less what allocations begin at."""
        return self.begins


class Elsewhere:
    """The active driver, if there is one; but who works for another GPU is told of that.

    Who compiles is asked too: a kernel may be written otherwise for another GPU.
    """

    def __init__(self, real: Any) -> None:
        self.real = real

    def get_current_target(self) -> Any:
        """As Triton's drivers have it."""
        return target_of(aim) if (aim := aim_here()) else self.real.get_current_target()

    def get_current_device(self) -> Any:
        """As Triton's drivers have it: a number that no device has."""
        if aim := aim_here():
            return -target_of(aim).arch
        return self.real.get_current_device()

    def get_current_stream(self, device: int) -> Any:
        """As Triton's drivers have it."""
        return 0 if aim_here() else self.real.get_current_stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def target_of(capability: Capability) -> GPUTarget:
    """A GPU of this compute capability, as Triton names it."""
    major, minor = capability
    return GPUTarget("cuda", 10 * major + minor, LANES)


@contextmanager
def elsewhere(capability: Capability) -> Iterator[None]:
    """What this thread has Triton do in here is for a GPU of this compute capability,
    which need not be there; so it is for threads that `aim` at it meanwhile.
    """
    real = None
    with suppress(RuntimeError):  # there is no GPU at all
        real = driver.active
    driver.set_active(Elsewhere(real))
    try:
        with aimed_at(capability):
            yield
    finally:
        driver.set_active(real)


@contextmanager
def recorded(capability: Capability) -> Iterator[list[Specialization]]:
    """What this thread launches in here is noted instead: each specialization once, in
    the order in which they are first needed. Other threads' launches go on.
    """
    found = dict[Specialization, None]()
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    mine = threading.get_ident()

    def note(**told: Any) -> Any:
        """Instead of compiling."""
        if threading.get_ident() != mine:
            return hook(**told) if hook else None
        kernel = told["fn"].jit_function
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        found[Specialization(name, told["compile"]["specialization_data"])] = None
        return True

    def noted(kernel: Any, *of: Any, warmup: bool, **how: Any) -> Any:
        if threading.get_ident() != mine:
            return run(kernel, *of, warmup=warmup, **how)
        of = tuple(map(_seen, of))
        how = {name: _seen(value) for name, value in how.items()}
        return run(kernel, *of, warmup=True, **how)

    noticed = list[Specialization]()
    with (
        one_at_a_time,
        elsewhere(capability),
        patch.object(JITFunction, "run", noted),
        patch.object(knobs.runtime, "jit_cache_hook", note),
    ):
        yield noticed
    noticed += found


def _seen(argument: Any) -> Any:
    there = isinstance(argument, torch.Tensor)
    return Nowhere(argument) if there and argument.is_meta else argument
