"""A sample's position in its grammar, and the tokens that it allows next."""

from concurrent.futures import Future, wait

from attrs import define, field, frozen

from minfer.effects.text.grammars.grammar_library import GrammarError, Matcher
from minfer.records.request import Request
from minfer.records.sequence import Running, SampleId


@frozen(eq=False)
class AllowedTokens:
    """The allowed tokens after `length` output tokens, or why the sample cannot
    continue.
    """

    length: int
    bits: bytes | GrammarError


@define(eq=False)
class SampleGrammar:
    """A sample's matcher, and how many of its output tokens that has read."""

    name: SampleId
    request: Request
    consumed: int = 0
    matcher: Matcher | None = None  # made by the thread that needs it
    failed: GrammarError | None = None  # why there can be no matcher
    allowed: AllowedTokens | None = None  # its last mask, if a thread made it
    # For slow samples:
    paused: bool = False  # as the engine knows
    job: "Future[None] | None" = None  # of the thread that makes its next mask
    is_slow: bool = False  # a step waited too long for a mask of its request
    forbidden_tokens: frozenset[int] = frozenset()  # tokens that it must never sample
    discarded: bool = False  # whether a matcher of it was discarded
    # Cached, as each token needs them:
    prompt: int = field(init=False)  # its length
    min_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prompt = len(self.request.prompt)
        self.min_tokens = self.request.sampling.min_tokens

    @property
    def busy(self) -> bool:
        """Whether a thread uses its matcher."""
        return self.job is not None and not self.job.done()

    @property
    def is_new(self) -> bool:
        """Whether its matcher was never used."""
        unused = self.job is None and self.matcher is None and not self.discarded
        return unused and self.failed is None

    def discard_matcher(self) -> None:
        """Discard its matcher: the next one starts from the beginning."""
        self.matcher, self.allowed, self.consumed = None, None, 0
        self.discarded = True

    def wait_for_job(self) -> None:
        """Wait until no thread uses its matcher."""
        if self.job is not None:
            wait((self.job,))
            self.job = None


@frozen(eq=False)
class DueMask:
    """A mask that is to be made."""

    grammar: SampleGrammar
    back: int  # tokens that the matcher has to roll back first
    tokens: tuple[int, ...]  # tokens that it has to read then
    length: int  # of the output after them
    # all output tokens, if its matcher has served others before
    output: tuple[int, ...] = ()

    @property
    def is_made(self) -> bool:
        """Whether the mask is ready, or impossible."""
        allowed = self.grammar.allowed
        is_ready = allowed is not None and allowed.length == self.length and not self.back
        return is_ready or self.grammar.failed is not None


def due_mask(
    grammar: SampleGrammar, running: Running, i: int, block_size: int
) -> DueMask:
    """Returns what a walk's matcher has to read of the sample that is the `i`th to
    run.
    """
    length = running.known[i] - grammar.prompt
    num_rolled_back = max(0, grammar.consumed - length)
    start = grammar.prompt + grammar.consumed - num_rolled_back
    new_tokens = running.inputs(i, start, running.known[i], block_size)
    grammar.consumed = length
    output: tuple[int, ...] = ()
    if grammar.matcher is not None and grammar.matcher.served:
        output = running.inputs(i, grammar.prompt, running.known[i], block_size)
    return DueMask(grammar, num_rolled_back, new_tokens, length, output)


def barred_tokens(grammar: SampleGrammar) -> frozenset[int]:
    """Returns the tokens that must not come in an output that is too short to end."""
    return grammar.forbidden_tokens | grammar.request.stop_ids
