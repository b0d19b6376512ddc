"""When requests are due in an open loop.

Gaps between requests are drawn from a gamma distribution. Of shape 1 they are those of a
Poisson process: many users who are independent of each other. Below 1 requests come in
bursts (the variance of their gaps is 1/burstiness of the squared mean), above 1 they come
more evenly, and at infinity all gaps are equal.
"""

import math
from random import Random


def due_times(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """When each request is due, in seconds from the first.

    Stretched so that the rate of the whole load is exactly `rate`.
    """
    rng = Random(seed)  # noqa: S311 - a load has no secrets
    even = math.isinf(burstiness)
    gaps = (1.0 if even else rng.gammavariate(burstiness, 1) for _ in range(count - 1))
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    stretch = (count - 1) / rate / times[-1] if times[-1] > 0 else 1.0
    return tuple([time * stretch for time in times[:count]])
