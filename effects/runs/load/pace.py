"""When requests are due in an open loop.

Gaps between requests are drawn from a gamma distribution: of shape 1, exponential, they
are those of a Poisson process, of many users who do not know each other; below 1 requests
come in bursts (their gaps' variance is 1/burstiness of the squared mean), above 1 they
come more evenly, and at infinity like the ticks of a clock.
"""

import math
from random import Random

from minfer.effects.runs.load.record import LoadError


def due_times(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """When each of so many requests is due, in seconds from the first.

    Stretched so that the rate is exactly `rate`: what a server does under another load
    is no answer to the question. Raises LoadError for a rate or burstiness not above 0.
    """
    if not 0 < rate < math.inf:
        raise LoadError(f"--request-rate must be above 0, not {rate:g}")
    if not burstiness > 0:
        raise LoadError(f"--burstiness must be above 0, not {burstiness:g}")
    rng = Random(seed)  # noqa: S311 - a load keeps no secrets
    even = math.isinf(burstiness)
    gaps = (1.0 if even else rng.gammavariate(burstiness, 1) for _ in range(count - 1))
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    stretch = (count - 1) / rate / times[-1] if times[-1] > 0 else 1.0
    return tuple([time * stretch for time in times[:count]])
