"""Rejection sampling: how draft tokens are accepted or replaced under the rule
"rejection".

Theory. Drafts are verified place by place whatever the rule (verify_drafts.py): a row
samples in a place, and its draft is accepted if it equals the sampled token. Under the
default rule sampling is as without drafts. Under this one (`minfer.speculate.rejection`)
sampling differs for rows that have a draft there: they take their draft if its coin
accepts it, else another token. Rows without a draft sample as without speculation, and so
does every row after its last draft; so the code that finds the rows to continue, counts
tokens, computes log-probabilities and reads results back is the same for both rules.
Under the default rule nothing of this is launched.

A draft model then has a noise stream of its own, and its logits are kept until its places
have been verified: [drafts, rows, vocab] in the model's own dtype, or in float32 where at
least one row's logits are shaped (`minfer.effects.models.shapes` counts it).
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.backend import Drawn
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.packing.inputs import Drafts
from minfer.kernels import reject
from minfer.kernels.sample_reference import Ways


@frozen(eq=False)
class Guess:
    """A draft model's tokens of a place, for each row that has drafts."""

    tokens: Tensor  # [rows] int32
    logits: Tensor | None  # [rows, vocab], shaped: what they were sampled from, if needed


@frozen(eq=False)
class Contest:
    """The drafts of a place, for the rows that sample there."""

    tokens: Tensor  # [rows] int32
    owners: Tensor  # [rows] int32: their rows, or the scratch row
    said: Tensor  # [rows] bool: made by the host; or there is no draft
    logits: Tensor | None  # [rows, vocab], shaped: what the draft model sampled from


def contests(
    rows: DeviceRows,
    drafts: Drafts[Tensor],
    inputs: Tensor,
    guesses: Sequence[Guess],
) -> tuple[Contest, ...]:
    """Returns the places of a step's drafts, if these rows have coins; `inputs` [3,
    drafts * verified] are the drafts as inputs, `guesses` those of a draft model.
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
    """Returns the tokens of device rows `who` [draws], the first of which have drafts;
    `drawn` is what they sample without drafts, from `logits` [draws, vocab], shaped.
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
