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

from minfer.analysis.lives import ParsedTurn
from minfer.analysis.near_prefix import (
    OneTokenEdit,
    is_costlier,
    one_token_edit,
    packed,
)
from minfer.journal.redact import redacted_config
from minfer.lifecycle.committed import committed
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Admitted,
    Ended,
    Preempted,
    StateMissed,
    WindowMissed,
)
from minfer.records.sequence import SampleId, Sequence
from minfer.records.state import EngineState


@frozen
class PrefixComparison:
    """The hit of sample 0 at its first admission, and the possible one, in tokens.

    Only of sample 0: later ones hit what it has computed itself.
    """

    known: int
    hit: int  # the first block that missed begins here
    earlier: int = 0  # other requests before it with its cache salt
    shared: int = 0  # longest prefix shared with one of them
    shared_with: SampleId | None = None
    computed: int = 0  # the same, of tokens with KV by then
    # the same, of tokens that ever were in the cache, whole blocks or not
    cached: int = 0
    # the group of layers whose window lacked the block that missed, if others had it
    missed: int | None = None
    # whether other layers had it, and no state of recurrent layers was kept after it
    lacked_state: bool = False
    # The one of them whose tokens are alike but for one token, if that costs a block; its
    # token at that place, and the request's own (None: there is none, or it is redacted).
    edit: OneTokenEdit | None = None
    edit_with: SampleId | None = None
    edit_tokens: tuple[int | None, int | None] = (None, None)


@frozen(eq=False)
class _KnownTokens:
    """The tokens of one sequence that others could have shared."""

    seq: Sequence
    tokens: "array[int]"
    computed: int = 0  # leading tokens with KV
    cached: int = 0  # that are in the cache, or were


@define(eq=False)
class PrefixTracker:
    """Keeps the tokens of sequences that leave, until request `name` is admitted: then
    compares.
    """

    config: EngineConfig
    name: str
    comparison: PrefixComparison | None = None
    # by arrival and sample
    past: dict[tuple[int, ...], _KnownTokens] = field(factory=dict)

    def turn(self, parsed: ParsedTurn) -> None:
        """Read a turn; after the admission of the request there is nothing to do."""
        if self.comparison is not None:
            return
        self._remember(parsed)
        for reason in parsed.turn.transition.reasons:
            if not isinstance(reason, Admitted) or reason.id != self.name:
                continue
            if reason.sample == 0 and reason.prompt:
                comparison = self._compare(parsed.turn.transition.state, reason)
                self.comparison = evolve(
                    comparison,
                    missed=_missed_group(parsed, reason),
                    lacked_state=_lacked_state(parsed, reason),
                )
                self.past.clear()
                return

    def _remember(self, parsed: ParsedTurn) -> None:
        """Keep the tokens of the sequences that leave in a turn."""
        run = parsed.turn.before.running
        # A failed step has computed nothing.
        num_ended = 0 if parsed.discarded else len(parsed.ended_plans)
        remaining = parsed.turn.before.inflight[num_ended:]
        state = evolve(parsed.turn.before, inflight=remaining)
        left_ids = {
            (reason.id, reason.sample)
            for reason in parsed.turn.transition.reasons
            if isinstance(reason, Ended | Preempted)
        }
        for i, name in enumerate(run.ids) if left_ids else ():
            if name in left_ids:
                self.past[run.seqs[i].place[1:]] = self._tokens_at_exit(state, i, parsed)

    def _tokens_at_exit(
        self, state: EngineState, i: int, parsed: ParsedTurn
    ) -> _KnownTokens:
        """The tokens of the sequence at `i` when it leaves: with those of this turn, and
        with all computed blocks published.
        """
        run, size = state.running, self.config.block_size
        new_tokens = parsed.tokens.get(run.ids[i], ())
        tokens = array("I", run.tokens(i, size) + new_tokens)
        num_computed = self._num_computed(state, i, len(tokens))
        return _KnownTokens(run.seqs[i], tokens, num_computed, num_computed)

    def _tokens_so_far(self, state: EngineState, i: int) -> _KnownTokens:
        """The tokens of the sequence at `i` while it runs."""
        run, size = state.running, self.config.block_size
        tokens = array("I", run.tokens(i, size))
        num_computed = self._num_computed(state, i, len(tokens))
        return _KnownTokens(
            run.seqs[i], tokens, num_computed, run.chains[i].sealed[0] * size
        )

    def _num_computed(self, state: EngineState, i: int, num_known: int) -> int:
        """How many of a sequence's `num_known` tokens have KV: all but the last, once it
        has sampled.
        """
        if num_known > state.running.num_known_at_admission[i]:
            return num_known - 1
        return committed(self.config, state, i)

    def _compare(self, state: EngineState, admitted: Admitted) -> PrefixComparison:
        """The prefix of a sample just admitted that was cached, or could have been."""
        seqs = (*state.running.seqs, *state.waiting)
        target = next(seq for seq in seqs if seq.id == (admitted.id, admitted.sample))
        # Without token ids, prefixes are known by whole blocks only.
        is_redacted = self.config == redacted_config(self.config)
        grain = self.config.block_size if is_redacted else 1
        best = PrefixComparison(admitted.known, admitted.hit)
        history = packed(target.history)
        earlier = set[tuple[int, str]]()  # one that was preempted is there twice
        for candidate in (*self.past.values(), *self._earlier(state, target)):
            request = candidate.seq.request
            if request.root != target.request.root or request.id == admitted.id:
                continue
            earlier.add((candidate.seq.place[1], request.id))
            num_common = _num_common(target.history, candidate.tokens)
            if grain == 1:
                best = self._with_edit(best, history, target, candidate)
            num_common -= num_common % grain
            if num_common > best.shared:
                best = evolve(best, shared=num_common, shared_with=candidate.seq.id)
            best = evolve(
                best,
                computed=max(best.computed, min(num_common, candidate.computed)),
                cached=max(best.cached, min(num_common, candidate.cached)),
            )
        return evolve(best, earlier=len(earlier))

    def _with_edit(
        self,
        best: PrefixComparison,
        history: bytes,
        target: Sequence,
        candidate: _KnownTokens,
    ) -> PrefixComparison:
        """The comparison with the edit that a candidate needs to be `target`, if no other
        leaves as many tokens alike.
        """
        tokens = candidate.tokens
        edit = one_token_edit(history, tokens.tobytes())
        size = self.config.block_size
        if not is_costlier(edit, best.edit, known=best.known, hit=best.hit, size=size):
            return best
        pair = (
            tokens[edit.at] if edit.at < len(tokens) else None,
            target.history[edit.at] if edit.at < len(target.history) else None,
        )
        return evolve(best, edit=edit, edit_with=candidate.seq.id, edit_tokens=pair)

    def _earlier(self, state: EngineState, target: Sequence) -> Iterator[_KnownTokens]:
        """The sequences that run since before `target`, and waiting ones that arrived
        before it.
        """
        run = state.running
        run_ids = dict(zip(run.ids, run.run_ids, strict=True))
        target_run_id = run_ids.get(target.id, state.next_run_id)
        for i, run_id in enumerate(run.run_ids):
            if run_id < target_run_id:
                yield self._tokens_so_far(state, i)
        for seq in state.waiting:
            if seq.place[1] < target.place[1]:
                yield _KnownTokens(seq, array("I", seq.history))


def _missed_group(parsed: ParsedTurn, admitted: Admitted) -> int | None:
    """The group whose window shortened the hit of a sample admitted in this turn."""
    for reason in parsed.turn.transition.reasons:
        if (
            isinstance(reason, WindowMissed)
            and reason.id == admitted.id
            and not reason.sample
        ):
            return reason.group
    return None


def _lacked_state(parsed: ParsedTurn, admitted: Admitted) -> bool:
    """Whether the hit of a sample admitted in this turn ended where its last state was
    kept.
    """
    name = admitted.id, admitted.sample
    reasons = parsed.turn.transition.reasons
    return any(isinstance(r, StateMissed) and (r.id, r.sample) == name for r in reasons)


def _num_common(history: tuple[int, ...], tokens: "array[int]") -> int:
    """The number of equal leading tokens."""
    shorter = min(len(history), len(tokens))
    return next(compress(count(), map(ne, history, tokens)), shorter)
