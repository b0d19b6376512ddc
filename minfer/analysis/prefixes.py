"""The prefix hit of a request, and the hit that it could have had.

Theory. What could have been cached follows from the tokens that others had when the
request was admitted, and from those of sequences that left before: four bytes each. So
those are kept, with how far their KV was computed and how far it ever was in the cache,
until the request is admitted; then the longest prefix that it shares with one of them is
found.
"""

from array import array
from collections.abc import Iterator
from itertools import compress, count
from operator import ne

from attrs import define, evolve, field, frozen

from minfer.analysis.lives import Seen
from minfer.journal.redact import redacted_config
from minfer.lifecycle.committed import committed
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Ended, Preempted, WindowMissed
from minfer.records.sequence import SampleId, Sequence
from minfer.records.state import EngineState


@frozen
class Prefix:
    """The hit of sample 0 at its first admission, and the possible one, in tokens.

    Only of sample 0: later ones hit what it has computed itself.
    """

    known: int
    hit: int  # the first block that missed begins here
    earlier: int = 0  # sequences before it with its cache salt
    shared: int = 0  # longest prefix shared with one of them
    shared_with: SampleId | None = None
    computed: int = 0  # the same, of tokens with KV by then
    # the same, of tokens that ever were in the cache, whole blocks or not
    cached: int = 0
    # the group of layers whose window lacked the block that missed, if others had it
    missed: int | None = None


@frozen(eq=False)
class _Known:
    """The tokens of one sequence that others could have shared."""

    seq: Sequence
    tokens: "array[int]"
    computed: int = 0  # leading tokens with KV
    cached: int = 0  # that are in the cache, or were


@define(eq=False)
class Prefixes:
    """Keeps the tokens of sequences that leave, until request `name` is admitted: then
    compares.
    """

    config: EngineConfig
    name: str
    found: Prefix | None = None
    past: dict[tuple[int, ...], _Known] = field(factory=dict)  # by arrival and sample

    def turn(self, seen: Seen) -> None:
        """Read a turn; after the admission of the request there is nothing to do."""
        if self.found is not None:
            return
        self._remember(seen)
        for reason in seen.turn.transition.reasons:
            if not isinstance(reason, Admitted) or reason.id != self.name:
                continue
            if reason.sample == 0 and reason.prompt:
                found = self._compare(seen.turn.transition.state, reason)
                self.found = evolve(found, missed=_missed_group(seen, reason))
                self.past.clear()
                return

    def _remember(self, seen: Seen) -> None:
        """Keep the tokens of the sequences that leave in a turn."""
        run = seen.turn.before.running
        # A failed step has computed nothing.
        done = 0 if seen.discarded else len(seen.over)
        left = seen.turn.before.inflight[done:]
        state = evolve(seen.turn.before, inflight=left)
        gone = {
            (reason.id, reason.sample)
            for reason in seen.turn.transition.reasons
            if isinstance(reason, Ended | Preempted)
        }
        for i, name in enumerate(run.ids) if gone else ():
            if name in gone:
                self.past[run.seqs[i].place[1:]] = self._left(state, i, seen)

    def _left(self, state: EngineState, i: int, seen: Seen) -> _Known:
        """The tokens of the sequence at `i` when it leaves: with those of this turn, and
        with all computed blocks published.
        """
        run, size = state.running, self.config.block_size
        new = seen.came.get(run.ids[i], ())
        tokens = array("I", run.tokens(i, size) + new)
        done = self._computed(state, i, len(tokens))
        return _Known(run.seqs[i], tokens, done, done)

    def _runs(self, state: EngineState, i: int) -> _Known:
        """The tokens of the sequence at `i` while it runs."""
        run, size = state.running, self.config.block_size
        tokens = array("I", run.tokens(i, size))
        done = self._computed(state, i, len(tokens))
        return _Known(run.seqs[i], tokens, done, run.chains[i].sealed[0] * size)

    def _computed(self, state: EngineState, i: int, known: int) -> int:
        """How many of the `known` tokens of the sequence at `i` have KV: all but the
        last, once it has sampled.
        """
        if known > state.running.num_known_at_admission[i]:
            return known - 1
        return committed(self.config, state, i)

    def _compare(self, state: EngineState, got: Admitted) -> Prefix:
        """The prefix of a sample just admitted that was cached, or could have been."""
        seqs = (*state.running.seqs, *state.waiting)
        me = next(seq for seq in seqs if seq.id == (got.id, got.sample))
        # Without token ids, prefixes are known by whole blocks only.
        blind = self.config == redacted_config(self.config)
        grain = self.config.block_size if blind else 1
        best = Prefix(got.known, got.hit)
        for other in (*self.past.values(), *self._before(state, me)):
            request = other.seq.request
            if request.root != me.request.root or request.id == got.id:
                continue
            same = _common(me.history, other.tokens)
            same -= same % grain
            if same > best.shared:
                best = evolve(best, shared=same, shared_with=other.seq.id)
            best = evolve(
                best,
                earlier=best.earlier + 1,
                computed=max(best.computed, min(same, other.computed)),
                cached=max(best.cached, min(same, other.cached)),
            )
        return best

    def _before(self, state: EngineState, me: Sequence) -> Iterator[_Known]:
        """The sequences that run since before `me`, and waiting ones that arrived before
        it.
        """
        run = state.running
        gen = dict(zip(run.ids, run.run_ids, strict=True)).get(me.id, state.next_run_id)
        for i, its in enumerate(run.run_ids):
            if its < gen:
                yield self._runs(state, i)
        for seq in state.waiting:
            if seq.place[1] < me.place[1]:
                yield _Known(seq, array("I", seq.history))


def _missed_group(seen: Seen, got: Admitted) -> int | None:
    """The group whose window shortened the hit of a sample admitted in this turn."""
    for reason in seen.turn.transition.reasons:
        if isinstance(reason, WindowMissed) and reason.id == got.id and not reason.sample:
            return reason.group
    return None


def _common(mine: tuple[int, ...], tokens: "array[int]") -> int:
    """How many leading tokens are the same."""
    shorter = min(len(mine), len(tokens))
    return next(compress(count(), map(ne, mine, tokens)), shorter)
