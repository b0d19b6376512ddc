"""A scheduling policy of your own: who asks for little goes first, and none starves.

The kit tries it on stories that Hypothesis makes up (`pip install '.[testing]'`), and
says which promise it breaks, with the shortest story that shows it.
"""

from typing import Any

from minfer import LLM, Request, SamplingParams
from minfer.policy import FirstCome, Rank
from minfer.testing import check_policy


class LittleFirst(FirstCome):
    """A request overtakes those that came shortly before it and ask for more."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        """Lower goes first: a token that is asked for counts as 10 ms of arrival."""
        return (time + 0.01 * (len(request.prompt) + request.max_tokens),), state


check_policy(LittleFirst(), max_examples=10, seed=1)
print("no law is broken")

with LLM(scheduling_policy=LittleFirst(), max_num_seqs=1) as llm:
    wanted = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (60, 40, 5)]
    ended = [
        news.request_id
        for news in llm.stream(["import os\n"] * 3, wanted)
        if news.finished
    ]
    print("ended in this order:", ended)
