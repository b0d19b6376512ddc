"""The specification of beams: when a search goes on, and what each beam is then.

A round's choice is that of `minfer.beam`, which is specified on its own; here is what it
means for the samples: who knows which tokens, and who takes its seat anew.
"""

from attrs import evolve

from minfer.beam import (
    BeamSearch,
    Candidates,
    Child,
    Hypothesis,
    Round,
    Search,
    by_seat,
    choose,
)
from minfer.messages import Finished, Forked
from minfer.testing.accounts import NOT_SEEN, Account, Seat, Told
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError
from minfer.testing.lifetime import Cause


def is_beam(one: Account) -> bool:
    """Whether a sample is a beam of a search."""
    return one.request.beams is not None


def hear(books: Books, one: Account, offer: Candidates) -> None:
    """A beam has offered candidates, and waits for the others."""
    seat = _seat(one)
    name = one.request.id
    books.searches[name] = books.searches[name].with_offer(one.sample, offer)
    one.offered = True
    # As if its last input had not been computed: it has no token after it.
    seat.sched = seat.kv = len(one.known) - 1


def decide(books: Books, told: Told) -> None:
    """Searches all of whose beams have offered go on, or are over."""
    for name in [name for name, search in books.searches.items() if search.complete]:
        beams = [books.accounts[name, beam] for beam in range(books.lives[name])]
        search, this = books.searches[name], _round(beams)
        choice = choose(search, this)
        for one in beams:
            one.offered = False
        if choice.children:
            alike = this.length == 1
            children = by_seat(choice.children, alike=alike)
            logprobs = tuple(child.logprob for child in children)
            books.searches[name] = Search(logprobs, (None,) * len(beams), choice.done)
            _go_on(books, beams, children, told)
        else:
            _over(books, beams, choice.done, told)


def _round(beams: list[Account]) -> Round:
    request, prompt = beams[0].request, len(beams[0].request.prompt)
    return Round(
        how=request.beams or BeamSearch(),
        stop_ids=request.stop_ids,
        length=len(beams[0].known) + 1 - prompt,
        most=beams[0].last + 1 - prompt,
        output_of=lambda beam: beams[beam].known[prompt:],
    )


def _go_on(
    books: Books, beams: list[Account], children: tuple[Child, ...], told: Told
) -> None:
    """Each beam is its child now, in its own seat or anew."""
    were = [one.known for one in beams]
    parents = {one.parent for beam, one in enumerate(children) if one.parent != beam}
    for beam, (one, child) in enumerate(zip(beams, children, strict=True)):
        anew = child.parent != beam or (one.id in told.anew and beam in parents)
        if anew:
            _leave(books, one)
        one.known = (*were[child.parent], child.token)
        if anew:
            told.forked.append(_seated(books, one, child.parent))
            continue
        seat = _seat(one)
        seat.base += 1
        seat.sched += 1
        seat.kv += 1


def _leave(books: Books, one: Account) -> None:
    """A beam leaves its seat, with the KV of all that it knew."""
    seat, known = _seat(one), one.known
    books.seats.pop(seat.gen, None)
    books.left.append(evolve(seat, account=evolve(one, known=known), kv=len(known)))


def _seated(books: Books, one: Account, parent: int) -> Forked:
    """A beam takes its seat again, as a new generation with KV of full blocks."""
    known, size = len(one.known), books.config.block_size
    start = (known - 1) // size * size
    one.seat = Seat(
        account=one,
        gen=NOT_SEEN,
        row=_seat(one).row,
        base=known,
        sched=start,
        kv=start,
        table=(),  # its parent's full blocks, or such as have the same content
    )
    return Forked(*one.id, parent, known, start)


def _over(
    books: Books, beams: list[Account], done: tuple[Hypothesis, ...], told: Told
) -> None:
    """Beams end with the hypotheses, the best first."""
    nothing = (Hypothesis((), 0.0, 0.0, "length"),) * len(beams)
    for one, best in zip(beams, (*done, *nothing), strict=False):
        if best.tokens:
            told.tokens[one.id] = best.tokens
        length = len(best.tokens)
        end = Finished(*one.id, best.reason, length, "", one.cached, best.logprob)
        told.finished.append(end)
        books.close(one, Cause.COMPLETED)


def _seat(one: Account) -> Seat:
    if one.seat is None:
        raise InvariantError("beams", f"{one.id} has offered, but does not run")
    return one.seat
