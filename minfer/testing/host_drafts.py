"""What a host drafts while a policy is on trial: what comes next, and sometimes not.

Theory. Proposals that are always wrong would try nothing but their rejection, so they
have to be right now and then; and what is right, the oracle alone knows. It is asked what
a row would draw, as if it drafted for itself, and what that wrote is taken back. How much
is proposed depends on how many tokens are known: nothing, all, and what is between, so
that steps are planned with and without.
"""

from collections.abc import Iterator

from attrs import evolve

from minfer.config import EngineConfig
from minfer.messages import Executed, Propose
from minfer.runs.guesses import Guesses, proposals
from minfer.runs.oracle import Oracle
from minfer.state import EngineState

_ALL = Guesses(1.0)  # as many as there may be


def proposed(
    config: EngineConfig, state: EngineState, done: Executed, oracle: Oracle
) -> Iterator[Propose]:
    """What the host drafts behind the results of the first step in flight, if it is the
    one who drafts; the oracle has just run that.
    """
    rows = dict(zip(state.running.ids, state.running.rows, strict=True))
    for one in proposals(config, state, (done,), _ALL):
        count = one.known % (len(one.tokens) + 1)
        tokens = oracle.foretold(rows[one.id, one.sample], count)
        if tokens:
            yield evolve(one, tokens=tokens)
