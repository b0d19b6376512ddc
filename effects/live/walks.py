"""A sample's way through its grammar: how far its matcher is, and what it allows next."""

from concurrent.futures import Future, wait

from attrs import define, field, frozen

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
    allowed: Allowed | None = None  # its last mask, if a thread made it
    # Of one that is slow:
    paused: bool = False  # as the engine was told
    job: "Future[None] | None" = None  # of a thread, that makes its next mask
    late: bool = False  # a step waited too long for a mask of its request
    never: frozenset[int] = frozenset()  # tokens that it may not draw, whatever is said
    spoilt: bool = False  # whether it has lost a matcher
    # Asked for each token, so at hand:
    prompt: int = field(init=False)  # its length
    min_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prompt = len(self.request.prompt)
        self.min_tokens = self.request.sampling.min_tokens

    @property
    def busy(self) -> bool:
        """Whether a thread is at its matcher."""
        return self.job is not None and not self.job.done()

    @property
    def is_new(self) -> bool:
        """Whether nobody has been at its matcher yet."""
        never = self.job is None and self.matcher is None and not self.spoilt
        return never and self.failed is None

    def spoil(self) -> None:
        """Its matcher cannot be used any more: the next one begins anew."""
        self.matcher, self.allowed, self.given = None, None, 0
        self.spoilt = True

    def settle(self) -> None:
        """Wait until no thread is at its matcher."""
        if self.job is not None:
            wait((self.job,))
            self.job = None


@frozen(eq=False)
class Due:
    """A mask that is to be made."""

    walk: Walk
    back: int  # tokens that the matcher has to take back first
    tokens: tuple[int, ...]  # that it has to take then
    length: int  # of the output by then
    whole: tuple[int, ...] = ()  # all of it, if its matcher has served others before

    @property
    def is_made(self) -> bool:
        """Whether the mask is there already, or there can be none."""
        last = self.walk.allowed
        there = last is not None and last.length == self.length and not self.back
        return there or self.walk.failed is not None


def due_at(walk: Walk, running: Running, i: int, block_size: int) -> Due:
    """What a walk's matcher is to be told of the sample that is the `i`th to run."""
    length = running.known[i] - walk.prompt
    back = max(0, walk.given - length)
    start = walk.prompt + walk.given - back
    new = running.inputs(i, start, running.known[i], block_size)
    walk.given = length
    whole: tuple[int, ...] = ()
    if walk.matcher is not None and walk.matcher.served:
        whole = running.inputs(i, walk.prompt, running.known[i], block_size)
    return Due(walk, back, new, length, whole)


def barred(walk: Walk) -> frozenset[int]:
    """The tokens that may not come in an output that is too short to end."""
    return walk.never | walk.request.stop_ids
