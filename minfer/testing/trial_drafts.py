"""The host's drafts while a policy is on trial: mostly the next tokens.

Theory. Proposals that are always wrong would only test their rejection, so some must be
right; and only the oracle knows what is right. It samples a row as a decode row, and its
writes are undone. How much is proposed depends on how many tokens are known: nothing,
all, and in between, so that steps are planned with and without.
"""

from collections.abc import Iterator

from attrs import evolve

from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Propose
from minfer.records.state import EngineState
from minfer.simulation.guesses import Guesses, proposals
from minfer.simulation.oracle import Oracle

_ALL = Guesses(1.0)  # as many as possible


def proposed(
    config: EngineConfig, state: EngineState, results: Executed, oracle: Oracle
) -> Iterator[Propose]:
    """The host's drafts after the results of the first step in flight, if the host
    drafts; the oracle has just run that step.
    """
    rows = dict(zip(state.running.ids, state.running.rows, strict=True))
    for proposal in proposals(config, state, (results,), _ALL):
        count = proposal.known % (len(proposal.tokens) + 1)
        tokens = oracle.preview_drafts(rows[proposal.id, proposal.sample], count)
        if tokens:
            yield evolve(proposal, tokens=tokens)
