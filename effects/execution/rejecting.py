"""Drafts under the rule "rejection": what is told of a place, and what rows draw there.

Theory. Places are judged one after the other whatever the rule (judging.py): a row draws
in a place, and its draft stands if it is what was drawn. Under the default rule it draws
as ever. Under this one (`minfer.speculate.rejection`) only the draw differs, for rows
that have a draft there: they draw their draft if its coin says so, else something that it
is not. Rows without a draft draw what they would without speculation, as do all behind
their last draft; so who goes on, counts, log-probabilities and what comes back are one
code for both rules. Under the default rule nothing of this is launched.

A draft model draws by a stream of its own then, and what it drew from is kept until its
places have been judged: [drafts, rows, vocab] in the model's own type, or in float32
where somebody's logits are shaped (`minfer.effects.models.shapes` counts it).
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.backend import Drawn
from minfer.effects.execution.device_rows import DeviceRows
from minfer.effects.execution.inputs import Drafts
from minfer.kernels import reject
from minfer.kernels.sample_reference import Ways


@frozen(eq=False)
class Guess:
    """What a draft model drew, for a place of each row that has drafts."""

    tokens: Tensor  # [rows] int32
    logits: Tensor | None  # [rows, vocab], shaped: from these, if anybody will ask


@frozen(eq=False)
class Contest:
    """The drafts of a place, for the rows that draw there."""

    tokens: Tensor  # [rows] int32
    owners: Tensor  # [rows] int32: whose they are, or the scratch row's
    said: Tensor  # [rows] bool: by the host, or by nobody
    logits: Tensor | None  # [rows, vocab], shaped: what the others were drawn from


def contests(
    rows: DeviceRows,
    drafts: Drafts[Tensor],
    inputs: Tensor,
    guesses: Sequence[Guess],
) -> tuple[Contest, ...]:
    """The places of a step's drafts, if these rows have coins; `inputs` [3, drafts *
    verified] are the drafts as inputs, `guesses` those of a draft model.
    """
    if rows.coins is None:
        return ()
    tokens, _, owners = inputs.view(3, *drafts.said.shape).unbind(0)
    said = drafts.said >= 0
    drawn = [guess.logits for guess in guesses] or [None] * len(said)
    each = zip(tokens, owners, said, drawn, strict=True)
    return tuple(Contest(*place) for place in each)


def contested(
    drawn: Drawn,
    contest: Contest,
    logits: Tensor,
    who: Tensor,
    positions: Tensor,
    rows: DeviceRows,
    *,
    filtered: bool,
) -> Drawn:
    """What device rows `who` [draws] draw, of whom the first have drafts; `drawn` is
    what they draw without, from `logits` [draws, vocab], shaped.
    """
    if rows.coins is None:
        raise AssertionError("these rows have no coins")
    count = len(contest.tokens)
    here, owner = logits[:count], who[:count].long()
    columns = rows.temperature, rows.top_k, rows.top_p, rows.deepest, rows.typical_p
    found = reject.reject(
        here,
        Ways(*(column[owner, None] for column in columns)),
        reject.Noise(
            picks=rows.stream[owner, None],
            coins=rows.coins[owner, None],
            positions=positions[:count, None].long(),
        ),
        reject.Drafts(contest.tokens[:, None], contest.said[:, None], contest.logits),
        filtered=filtered,
    )
    theirs = (contest.owners == who[:count]) & (drawn.broken[:count] == 0)
    first = found[:, 0].where(theirs, drawn.tokens[:count])
    return Drawn(torch.cat((first, drawn.tokens[count:])), drawn.broken)
