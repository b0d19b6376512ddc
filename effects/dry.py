"""The dry executor: plausible text at once, without weights, for trying the interfaces.

Every sample reads out a built-in passage, from its beginning if it is greedy and else from a
sentence that seed and sample choose; a request that may stop does so at the end of the passage. The
token at a position depends on the request and the position alone, so preemption, chunking and
neighbours change nothing, as with a model.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import define

from minfer.messages import Executed, Failed
from minfer.plan import Plan
from minfer.request import Request

PASSAGE: Final = (
    " This text was not written by a model.",
    " The engine planned every step of it, gave it blocks of the cache, and took them back.",
    " Only the forward pass was left out, so that you can try the interfaces without weights.",
    " Requests come and go, share their prefixes, and wait in line as they would in earnest.",
    " When you have seen enough, start again with a model.\n",
)


def encoded_passage(encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The built-in passage as token ids, a tuple for each sentence; sentences without any go."""
    sentences = (tuple(encode(sentence)) for sentence in PASSAGE)
    return tuple(sentence for sentence in sentences if sentence)


@define
class _Row:
    request: Request
    sample: int
    next: int  # position of the next input


class Dry:
    """An executor that computes nothing. `sentences` are token ids, at least one in all."""

    def __init__(self, sentences: Sequence[Sequence[int]]) -> None:
        if not any(sentences):
            raise ValueError("a dry executor needs a passage of at least one token")
        self.sentences = [tuple(sentence) for sentence in sentences if sentence]
        self.rows: dict[int, _Row] = {}
        self.plans: deque[Plan] = deque()

    def launch(self, plan: Plan) -> None:
        """Queue the plan."""
        self.plans.append(plan)

    def collect(self) -> Executed | Failed:
        """Yield for the next plan all that it may."""
        plan = self.plans.popleft()
        return Executed(plan.step, tuple(self._run(plan)))

    def close(self) -> None:
        """Forget everything."""
        self.rows.clear()
        self.plans.clear()

    def token(self, request: Request, sample: int, position: int) -> int:
        """The token of a sample at a position, which must lie behind the prompt."""
        greedy = request.sampling.temperature == 0
        first = 0 if greedy else (request.seed + sample) % len(self.sentences)
        passage = [t for s in (*self.sentences[first:], *self.sentences[:first]) for t in s]
        at = position - len(request.prompt)
        if request.stop_ids and at >= len(passage):
            return min(request.stop_ids)
        return passage[at % len(passage)]

    def _run(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        for opened in plan.opens:
            row = _Row(opened.request, opened.sample, plan.starts[opened.index])
            self.rows[plan.rows[opened.index]] = row
        filled = {fill.index for fill in plan.fills}
        for i, index in enumerate(plan.rows):
            row = self.rows[index]
            # A row that feeds itself knows its position; a filled one is told.
            row.next = (plan.starts[i] if i in filled else row.next) + plan.counts[i]
            most = plan.most[i]
            yield tuple(
                self.token(row.request, row.sample, row.next + more) for more in range(most)
            )
            row.next += max(0, most - 1)
