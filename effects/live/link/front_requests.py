"""What a front keeps of its requests, so that they outlive an engine.

Of each request: its prompt and parameters, every token that came, and all commands to the
engine since. From these follow how it is resubmitted, and how to read outputs of an
engine in which it, or a part of it, has another name.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from attrs import define, evolve, field

from minfer.effects.live.client import RequestReason, TurnOutputs
from minfer.effects.live.link import link_messages as wire
from minfer.effects.live.link.quarantine import (
    CLEARING_TOKENS,
    GIVEN_UP,
    GUILTY_DEATHS,
    TOKEN_TOLERANCE,
)
from minfer.effects.live.live_requests import LiveRequests, Stage
from minfer.effects.live.request_names import again_name, request_of
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request
from minfer.records.sequence import SampleId


@define(eq=False)
class CrashHistory:
    """A sample's history with the engines that served it: see `quarantine`."""

    admitted: bool = False  # by the current engine
    tokens_received: int = 0  # tokens from this engine
    deaths: int = 0  # engines in a row that did not clear it and died
    solo_deaths: int = 0  # of these, while they served nothing else
    solo_tokens: int = 0  # tokens from the last of those

    def end(self, *, solo: bool) -> None:
        """Note that its engine has died."""
        cleared = self.tokens_received > CLEARING_TOKENS
        self.deaths = 1 if cleared else self.deaths + 1
        if cleared:
            self.solo_deaths = 0
        elif solo:
            alike = abs(self.tokens_received - self.solo_tokens) <= TOKEN_TOLERANCE
            self.solo_deaths = self.solo_deaths + 1 if alike else 1
            self.solo_tokens = self.tokens_received

    @property
    def guilty(self) -> bool:
        """Whether it is proven that engines died of it."""
        return self.solo_deaths >= GUILTY_DEATHS + (self.solo_tokens > 0)


@define(eq=False)
class FrontRequest:
    """A request, and its results so far."""

    request: Request
    tokens: list[list[int]]  # new ones, by sample
    histories: list[CrashHistory]  # likewise
    # Of it, or of its parts, on the link: with the sample, or None for all.
    names: dict[str, int | None] = field(factory=dict)
    ended: set[int] = field(factory=set)  # samples that have ended
    ends: dict[int, Finish] = field(factory=dict)  # ends that were sent to the engine
    cancelled: bool = False
    # the engine may be compiling its grammar: until it enters the queue
    compiling: bool = False

    def left(self) -> list[int]:
        """Returns the samples that have not ended."""
        return [i for i in range(self.request.n) if i not in self.ended]

    def length(self, sample: int) -> int:
        """Returns a sample's output tokens so far, including those that it began with."""
        return len(self.request.output) + len(self.tokens[sample])

    def samples_named(self, name: str) -> list[int]:
        """Returns the samples that have a name on the link."""
        if name not in self.names:
            return []
        sample = self.names[name]
        return self.left() if sample is None else [sample]

    def go(self, name: str, sample: int | None) -> None:
        """Note that it, or one of its samples, is sent to the engine under a name."""
        self.names[name] = sample
        self.compiling = self.request.sampling.structured_outputs is not None

    def note_death(self, solo: Sequence[int], *, probing: bool) -> bool:
        """Note that its engine has died; returns whether a sample is proven to kill
        engines.

        `solo`: its samples that the engine served alone; `probing`: whether the engine
        served one request alone, this or another one.
        """
        for sample in self.left():
            history = self.histories[sample]
            if sample in solo or (not probing and (history.admitted or self.compiling)):
                history.end(solo=sample in solo)
        self.leave_engine()
        return any(self.histories[sample].guilty for sample in solo)

    def leave_engine(self) -> None:
        """Note that no engine has it any more."""
        self.compiling = False
        for history in self.histories:
            history.admitted, history.tokens_received = False, 0
        self.names.clear()


class FrontRequests:
    """The requests of a front that have not ended."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._batch: tuple[SampleId, ...] = ()  # of the last outputs that had one
        self._rows: tuple[
            tuple[FrontRequest, int] | None, ...
        ] = ()  # their requests and samples
        self._again = count(1)

    def all(self) -> list[FrontRequest]:
        """Returns all of them."""
        return self._live.all_kept(FrontRequest)

    def get(self, name: str) -> FrontRequest | None:
        """Returns the request with an id, if there is one."""
        return self._live.kept(name, FrontRequest)

    @property
    def samples(self) -> int:
        """The number of samples that have not ended."""
        return sum(len(kept.left()) for kept in self.all())

    def add(self, request: Request) -> None:
        """Add a request, under an id that no other one has."""
        tokens: list[list[int]] = [[] for _ in range(request.n)]
        histories = [CrashHistory() for _ in range(request.n)]
        kept = FrontRequest(request, tokens, histories)
        kept.go(request.id, None)
        record = self._live.add(request)
        record.kept, record.stage = kept, Stage.SUBMITTED

    def cancel(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Note that requests have to end; returns their names on the link."""
        names: list[str] = []
        for name in ids:
            if (kept := self.get(name)) is not None:
                kept.cancelled = True
                names += kept.names
        return tuple(names)

    def finish(self, ends: Iterable[Finish]) -> tuple[Finish, ...]:
        """Note that samples have to end at a length; returns that with their names on the
        link.
        """
        outputs = []
        for end in ends:
            kept = self.get(end.id)
            if kept is not None and end.sample not in kept.ended:
                kept.ends[end.sample] = end
                outputs += self._as_named(kept, end)
        return tuple(outputs)

    # --- when the link is over ----------------------------------------------------------

    def lose(self, probing: str, *, served: bool = True) -> tuple[Finished, ...]:
        """Note that the link is over, on which `probing` ran alone, if it is set; returns
        the ends of requests that are given up. If the engine had not `served` yet, no
        request is blamed.
        """
        guilty = []
        for kept in self.all():
            if not served:
                kept.leave_engine()
            elif kept.note_death(kept.samples_named(probing), probing=bool(probing)):
                guilty.append(kept)
        self._batch = ()
        self._rows = ()
        why = f"{GIVEN_UP}: the request itself is the cause, and is not tried again"
        return tuple(
            Finished(kept.request.id, sample, "error", kept.length(sample), why)
            for kept in guilty
            for sample in kept.left()
        )

    def pending_ends(self) -> tuple[Finished, ...]:
        """Returns the ends of requests and samples that have to end, without an
        engine.
        """
        return tuple(done for kept in self.all() for done in _ends_without_engine(kept))

    def resumed(self) -> tuple[wire.Resumed, ...]:
        """Returns the unfinished parts of all requests, to resubmit."""
        return tuple(part for kept in self.all() for part in self._parts(kept))

    def _parts(self, kept: FrontRequest) -> list[wire.Resumed]:
        """Returns a request as a whole; or, if its samples have begun, each of them."""
        request = kept.request
        parts: list[tuple[Request, int | None]] = []
        if request.n == 1:
            output = request.output + tuple(kept.tokens[0])
            # Queue places are not valid in another engine.
            parts.append((evolve(request, output=output, place=None), None))
        elif not kept.ended and not any(kept.tokens):
            parts.append((request, None))
        else:
            for sample in kept.left():
                number = request.first_sample + sample
                output = tuple(kept.tokens[sample])
                part = evolve(request, n=1, first_sample=number, output=output)
                parts.append((part, sample))
        return [self._named(kept, part, sample) for part, sample in parts]

    def _named(
        self, kept: FrontRequest, part: Request, sample: int | None
    ) -> wire.Resumed:
        name = again_name(kept.request.id, next(self._again))
        kept.go(name, sample)
        histories = kept.histories if sample is None else [kept.histories[sample]]
        deaths = max(history.deaths for history in histories)
        solo = max(history.solo_deaths for history in histories)
        return wire.Resumed(evolve(part, id=name), deaths, solo)

    # --- outputs ------------------------------------------------------------------------

    def take(self, outputs: wire.FrontOutputs) -> TurnOutputs:
        """Keep the engine's outputs, and return them with the requests' own ids."""
        if outputs.ids:
            self._set_batch(outputs.ids)
        has_batch = outputs.ids is None or len(outputs.ids) > 0
        if has_batch:
            for row, tokens in zip(self._rows, outputs.tokens, strict=True):
                if tokens and row is not None:
                    kept, sample = row
                    kept.tokens[sample] += tokens
                    kept.histories[sample].tokens_received += len(tokens)
        known = [part for part in outputs.reasons if self._named_by(part.reason.id)]
        places = {
            one.request.id: at
            for part, at in outputs.places.items()
            if (one := self._named_by(part)) is not None
        }
        arrived = [one for name in outputs.arrived if (one := self._named_by(name))]
        for one in arrived:
            one.compiling = False
        return TurnOutputs(
            time=outputs.time,
            ids=self._batch if has_batch else (),
            tokens=outputs.tokens,
            logprobs=outputs.logprobs,
            pooled=outputs.pooled,
            drafts=outputs.drafts,
            finished=tuple([self._finished(done) for done in outputs.finished]),
            arrived=tuple([one.request.id for one in arrived]),
            places=places,
            reasons=tuple([self._reason(part) for part in known]),
            waits=outputs.waits,
        )

    def end(self, finished: Sequence[Finished]) -> None:
        """Note that samples have ended, by the requests' own ids."""
        for done in finished:
            if (kept := self.get(done.id)) is not None:
                kept.ended.add(done.sample)
                if not kept.left():
                    self._live.end(done.id)

    def _set_batch(self, ids: tuple[SampleId, ...]) -> None:
        """Find the requests of a new batch's rows."""
        batch: list[SampleId] = []
        rows: list[tuple[FrontRequest, int] | None] = []
        for name, number in ids:
            own, sample = self._own(name, number)
            kept = self.get(own)
            batch.append((own, sample))
            rows.append(None if kept is None else (kept, sample))
        self._batch = tuple(batch)
        self._rows = tuple(rows)

    def _own(self, name: str, number: int) -> SampleId:
        """Returns the own id and sample of a name and number on the link."""
        if (kept := self._named_by(name)) is None:
            return "", number
        sample = kept.names[name]
        return kept.request.id, number if sample is None else sample

    def _named_by(self, name: str) -> FrontRequest | None:
        """Returns the request that a name on the link is of: its own id, or a new one if
        it was resubmitted.
        """
        for own in (name, request_of(name)):
            if (kept := self.get(own)) is not None and name in kept.names:
                return kept
        return None

    def _finished(self, done: Finished) -> Finished:
        if self._named_by(done.id) is None:
            return done
        own, sample = self._own(done.id, done.sample)
        return evolve(done, id=own, sample=sample)

    def _reason(self, part: wire.WireReason) -> RequestReason:
        own, sample = self._own(part.reason.id, part.reason.sample)
        kept = self.get(own)
        if isinstance(part, wire.AdmittedReason) and kept is not None:
            kept.histories[sample].admitted = True
        return evolve(part.reason, id=own, sample=sample)

    def _as_named(self, kept: FrontRequest, end: Finish) -> list[Finish]:
        """Returns an end with the sample's name on the link, if there is one."""
        for name, sample in kept.names.items():
            if sample is None:
                return [evolve(end, id=name)]
            if sample == end.sample:
                return [evolve(end, id=name, sample=0)]
        return []


def _ends_without_engine(kept: FrontRequest) -> list[Finished]:
    found = []
    for sample in kept.left():
        length, end = kept.length(sample), kept.ends.get(sample)
        name = kept.request.id
        if end is not None:
            found.append(Finished(name, sample, end.reason, min(length, end.length)))
        elif kept.cancelled:
            found.append(Finished(name, sample, "cancelled", length))
    return found
