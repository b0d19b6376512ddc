"""Proposals of the host arrive as events, and are kept until a step can use them.

Theory. A draft can only follow known tokens, and a proposal is valid only as long as its
sample has no more known tokens. So it has the number of tokens known when it was made;
the next step that is planned while the sample has nothing in flight uses it, if that
number is unchanged; then all older proposals are dropped.

The engine does not know the proposer: its proposals are in the journal.
"""

from collections.abc import Sequence

from minfer.records.config import EngineConfig
from minfer.records.drafting import Proposed
from minfer.records.messages import Ignored, Propose, Reason, clip
from minfer.records.sequence import SampleId
from minfer.records.speculation import HOST
from minfer.records.state import EngineState, Transition
from minfer.values.record import evolve


def keep_proposals(
    config: EngineConfig, state: EngineState, proposals: Sequence[Propose]
) -> Transition:
    """Keep the proposals of samples that may have drafts."""
    kept, reasons = state.drafting.proposals.mutate(), list[Reason]()
    running, drafting = frozenset(state.running.ids), state.drafting
    how = config.speculation
    hosted = how is not None and how.drafter == HOST
    for one in proposals:
        why = _useless(config, running, one) if hosted else "the host drafts nothing here"
        if why:
            who = f"sample {one.sample} of {clip(repr(one.id))}"
            reasons.append(Ignored("propose", f"{who}: {why}"))
        else:
            kept[one.id, one.sample] = Proposed(one.known, one.tokens)
    if len(reasons) < len(proposals):
        state = evolve(state, drafting=evolve(drafting, proposals=kept.finish()))
    return Transition(state, (), tuple(reasons))


def _useless(
    config: EngineConfig, running: frozenset[SampleId], proposal: Propose
) -> str:
    """Why a proposal cannot be used, or nothing."""
    if (proposal.id, proposal.sample) not in running:
        return "it does not run"
    if not proposal.tokens:
        return "no token is proposed"
    if max(proposal.tokens) >= config.vocab_size:
        return "a token id is not in the vocabulary"
    return ""
