"""What a body may take of the machine in a worker; beyond it, the worker ends."""

from typing import Final

from attrs import frozen


@frozen(kw_only=True)
class WorkerLimits:
    """The limits of a worker: plain data, to be sent to it."""

    memory: int = 2**31  # bytes beyond its first size, meanwhile
    cpu: float = 0.0  # seconds of a processor; 0: any
    nice: int = 5  # by which its priority is lower than that of processes with streams
    # The same of its session: Linux may schedule sessions as groups, and then compares
    # priorities within a group alone.
    session_nice: int = 0


DEFAULT_LIMITS: Final = WorkerLimits()
# Of bodies that bring a chat template.
TEMPLATE_LIMITS: Final = WorkerLimits(memory=2**29, cpu=4.0, nice=10, session_nice=10)
