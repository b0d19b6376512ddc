"""Speculation: tokens are guessed cheaply, and the model judges several in one forward.

Theory. A decode step of a small batch reads all weights to make one token of each row;
for a few more inputs it takes hardly longer. So something cheap proposes `drafts` for the
next positions, the target model takes them as inputs, and what it says at each decides
how many of them stand. A row then yields the drafts that were accepted and one token
more, the target's own: at least as many as without (Leviathan et al. 2023, Chen et al.
2023).

    who proposes      proposer.py, the protocol; lookup.py, what followed the same words
                      earlier; a draft model proposes on the device
    what is accepted  accept.py, the default: what the target would draw anyway;
                      rejection.py, which keeps the distribution and not the tokens
    how many          length.py: as many as pay, by what was accepted lately and what
                      verifying costs now
    how good it was   tally.py: accepted drafts over proposed drafts
    in the engine     settings.py, what is set; proposing.py, proposals as events;
                      plan_drafts.py, who of a step has drafts; learn.py, what became of
                      them; drafting.py, the part of the state that all this is

All of it is pure functions on plain values. What a device decides is tested against them.
"""
