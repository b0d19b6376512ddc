"""Speculative decoding: cheap drafts, several of which the model verifies in one forward.

Theory. A decode step of a small batch reads all weights to make one token of each row; a
few more inputs cost hardly more time. So a cheap proposer makes `drafts` for the next
positions, the target model takes them as inputs, and its output at each decides how many
are accepted. A row then yields the accepted drafts and one token more, the target's own:
at least as many as without drafts (Leviathan et al. 2023, Chen et al. 2023).

    proposing         proposer.py, the protocol; lookup.py, the continuation of an earlier
                      match (n-gram lookup); draft models and heads propose on the
                      device (effects/execution/running/drafter.py)
    acceptance        accept.py, the default: the tokens that the target samples anyway;
                      rejection.py, which keeps the distribution and not the tokens
    number of drafts  length.py: the most profitable, from recent acceptance and the
                      present cost of verifying
    metrics           tally.py: accepted drafts over proposed drafts
    in the engine     proposing.py, proposals as events; learn.py, their acceptance; the
                      drafts of a step are chosen in minfer/planning/plan_drafts.py; in
                      minfer/records: speculation.py, the configuration, drafting.py, the
                      part of the state for it

All of it is pure functions on plain values. Device code is tested against them.
"""
