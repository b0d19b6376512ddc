"""A sample's way through its grammar: how far its matcher is, and what it allows next."""

from concurrent.futures import Future, wait

from attrs import define, frozen

from minfer.effects.text.grammars.protocol import GrammarError, Matcher
from minfer.request import Request
from minfer.sequence import Running, SampleId


@frozen(eq=False)
class Allowed:
    """What a sample may draw after so many output tokens, or why it cannot go on."""

    length: int
    bits: bytes | GrammarError


@define(eq=False)
class Walk:
    """A sample's matcher, and how many of its output tokens that was given."""

    name: SampleId
    request: Request
    given: int = 0
    matcher: Matcher | None = None  # made by the thread that needs it
    failed: GrammarError | None = None  # why there can be none
    allowed: Allowed | None = None  # its last mask
    # Of one that is slow:
    paused: bool = False  # as the engine was told
    job: "Future[None] | None" = None  # of a thread, that makes its next mask
    quick_left: int = 1  # masks in a row that have to be quick until it is slow no more

    @property
    def busy(self) -> bool:
        """Whether a thread is at its matcher."""
        return self.job is not None and not self.job.done()

    @property
    def is_new(self) -> bool:
        """Whether nobody has been at its matcher yet."""
        return self.job is None and self.matcher is None and self.failed is None

    def settle(self) -> None:
        """Wait until no thread is at its matcher."""
        if self.job is not None:
            wait((self.job,))


@frozen(eq=False)
class Due:
    """A mask that is to be made."""

    walk: Walk
    back: int  # tokens that the matcher has to take back first
    tokens: tuple[int, ...]  # that it has to take then
    length: int  # of the output by then
    index: int = -1  # of its row, in the columns of the plan that needs it

    @property
    def is_made(self) -> bool:
        """Whether the mask is there already, or there can be none."""
        last = self.walk.allowed
        there = last is not None and last.length == self.length and not self.back
        return there or self.walk.failed is not None


def due_at(walk: Walk, running: Running, i: int, block_size: int, index: int = -1) -> Due:
    """What a walk's matcher is to be told of the sample that is the `i`th to run."""
    prompt = len(walk.request.prompt)
    length = running.known[i] - prompt
    back = max(0, walk.given - length)
    new = running.inputs(i, prompt + walk.given - back, running.known[i], block_size)
    walk.given = length
    return Due(walk, back, new, length, index)


def without_barred(walk: Walk, length: int, bits: bytes, ends: frozenset[int]) -> bytes:
    """A mask without the tokens that may not end the output yet, or never; `ends`: the
    model's own ends of sequence.
    """
    sampling = walk.request.sampling
    barred = set[int]()
    if sampling.ignore_eos:
        barred |= ends
    if length < sampling.min_tokens:
        barred |= walk.request.stop_ids
    there = [
        token
        for token in barred
        if token < 8 * len(bits) and bits[token // 8] >> token % 8 & 1
    ]
    if not there:  # as nearly always: masks are not copied for nothing
        return bits
    allowed = bytearray(bits)
    for token in there:
        allowed[token // 8] &= ~(1 << token % 8)
    return bytes(allowed)
