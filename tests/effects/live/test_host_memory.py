"""Unused memory is released, and only looked for when there may be some."""

import os
import subprocess
import sys

import pytest

from minfer.effects.live.engine import host_memory
from minfer.effects.live.engine.host_memory import TRIM_GROWTH_BYTES, Trim

HOLES = """
from minfer.effects.live.engine.host_memory import Trim, resident_bytes
trim = Trim(resident_bytes())
small = [bytearray(4000) for _ in range(80_000)]
full = resident_bytes()
keep = small[::500]  # so that the rest is holes, and not the end of the heap
del small
held = resident_bytes()
assert held > full - (16 << 20), "the allocator gives back by itself"
assert trim.trim_if_grown()
assert resident_bytes() < held - (200 << 20), (full, held, resident_bytes())
assert not trim.trim_if_grown()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_holes_in_the_heap_are_given_back() -> None:
    env = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", HOLES], check=True, env=env)


def test_a_process_that_does_not_grow_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = iter(
        [TRIM_GROWTH_BYTES, 10, 10 + TRIM_GROWTH_BYTES - 1, 5, 5 + TRIM_GROWTH_BYTES, 20]
    )
    requested = []
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(host_memory, "release_free_pages", lambda: requested.append(1))
    trim = Trim()
    assert trim.trim_if_grown()  # floor 10
    assert not trim.trim_if_grown()
    assert not trim.trim_if_grown()  # floor 5: what it has given back by itself counts
    assert trim.trim_if_grown()
    assert len(requested) == 2


def test_a_user_may_say_how_many_products_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(host_memory.ONEDNN_CACHE_VARIABLE, "7")
    host_memory.bound_onednn_cache()
    assert os.environ[host_memory.ONEDNN_CACHE_VARIABLE] == "7"
