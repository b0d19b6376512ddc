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
    by_sample, reasons = state.drafting.proposals.mutate(), list[Reason]()
    running, drafting = frozenset(state.running.ids), state.drafting
    spec_config = config.speculation
    host_drafts = spec_config is not None and spec_config.drafter == HOST
    for proposal in proposals:
        cause = "the host drafts nothing here"
        if host_drafts:
            cause = _unusable_cause(config, running, proposal)
        if cause:
            sample = f"sample {proposal.sample} of {clip(repr(proposal.id))}"
            reasons.append(Ignored("propose", f"{sample}: {cause}"))
        else:
            by_sample[proposal.id, proposal.sample] = Proposed(
                proposal.known, proposal.tokens
            )
    if len(reasons) < len(proposals):
        state = evolve(state, drafting=evolve(drafting, proposals=by_sample.finish()))
    return Transition(state, (), tuple(reasons))


def _unusable_cause(
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
