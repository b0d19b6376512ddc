"""What the host proposes comes as events, and is kept until a step can use it.

Theory. A draft behind tokens that are not known yet cannot be said, and a proposal is
true to its sample only as long as no more is known of it. So it names how many tokens
were known when it was made; the next step that is planned while nothing of the sample is
in flight uses it, if that is still so, and whatever is then older is forgotten.

What proposes is not the engine's business: what it said is in the journal.
"""

from collections.abc import Sequence

from minfer.config import EngineConfig
from minfer.messages import Ignored, Propose, Reason, clip
from minfer.record import evolve
from minfer.sequence import SampleId
from minfer.speculate.drafting import Proposed
from minfer.speculate.settings import HOST
from minfer.state import EngineState, Transition


def told_of_proposals(
    config: EngineConfig, state: EngineState, proposals: Sequence[Propose]
) -> Transition:
    """Keep what may follow, of samples that may have drafts."""
    kept, reasons = state.drafting.proposals.mutate(), list[Reason]()
    running, drafting = frozenset(state.running.ids), state.drafting
    for one in proposals:
        why = _useless(config, running, one)
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
    """Why nothing can become of a proposal, or nothing."""
    if config.speculation is None or config.speculation.drafter != HOST:
        return "the host drafts nothing here"
    if (proposal.id, proposal.sample) not in running:
        return "it does not run"
    if not proposal.tokens:
        return "no token is proposed"
    if max(proposal.tokens) >= config.vocab_size:
        return "a token id is not in the vocabulary"
    return ""
