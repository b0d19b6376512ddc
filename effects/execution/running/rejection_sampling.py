"""Rejection sampling: how draft tokens are accepted or replaced under the rule
"rejection".

Theory. Drafts are verified place by place whatever the rule (speculative_step.py): a row
samples in a place, and its draft is accepted if it equals the sampled token. Under the
default rule sampling is as without drafts. Under this one (`minfer.speculate.rejection`)
sampling differs for rows that have a draft there: they take their draft if its coin
accepts it, else another token. Rows without a draft sample as without speculation, and so
does every row after its last draft; so the code that finds the rows to continue, counts
tokens, computes log-probabilities and reads results back is the same for both rules.
Under the default rule nothing of this is launched.

A drafter then has a noise stream of its own, and its logits are kept until its places
have been verified: [drafts, rows, vocab] in the model's own dtype, or in float32 where at
least one row's logits are shaped (`minfer.effects.models.layout.shapes` counts it).
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.execution.device.backend import DrawnTokens
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.kernels import reject


@frozen(eq=False)
class DraftProposal:
    """A drafter's tokens of a place, for each row that has drafts."""

    tokens: Tensor  # [rows] int32
    logits: Tensor | None  # [rows, vocab], shaped: what they were sampled from, if needed


@frozen(eq=False)
class PlaceDrafts:
    """The drafts of a place, for the rows that sample there."""

    tokens: Tensor  # [rows] int32
    owners: Tensor  # [rows] int32: their rows, or the scratch row
    from_host: Tensor  # [rows] bool: made by the host; or there is no draft
    logits: Tensor | None  # [rows, vocab], shaped: what the drafter sampled from


def drafts_by_place(
    device_rows: DeviceRows,
    drafts: DraftWords[Tensor],
    tokens: Tensor,
    owners: Tensor,
    proposals: Sequence[DraftProposal],
) -> list[PlaceDrafts | None]:
    """Returns the drafts of each place of a step, and None behind the last, for rows
    that have coins; without coins, None for all. `tokens` and `owners` [places,
    verified] are those of the inputs, `proposals` those of a drafter.
    """
    places = len(tokens)
    if device_rows.coins is None:
        return [None] * (places + 1)
    logits = [proposal.logits for proposal in proposals] or [None] * places
    columns = zip(tokens, owners, drafts.tokens >= 0, logits, strict=True)
    return [*(PlaceDrafts(*place) for place in columns), None]


def rejection_sample(
    drawn: DrawnTokens,
    drafts: PlaceDrafts,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    device_rows: DeviceRows,
    *,
    filtered: bool,
) -> DrawnTokens:
    """Returns the tokens of device rows `rows` [draws], the first of which have drafts;
    `drawn` is what they sample without drafts, from `logits` [draws, vocab], shaped.
    """
    if device_rows.coins is None:
        raise AssertionError("these rows have no coins")
    count = len(drafts.tokens)
    draft_logits, owner = logits[:count], rows[:count].long()
    verified_tokens = reject.reject(
        draft_logits,
        device_rows.sampling.of_rows(owner),
        reject.RejectionNoise(
            picks=device_rows.stream[owner, None],
            coins=device_rows.coins[owner, None],
            positions=positions[:count, None].long(),
        ),
        reject.RowDrafts(
            drafts.tokens[:, None], drafts.from_host[:, None], drafts.logits
        ),
        filtered=filtered,
    )
    is_draft = (drafts.owners == rows[:count]) & (drawn.broken[:count] == 0)
    first = verified_tokens[:, 0].where(is_draft, drawn.tokens[:count])
    return DrawnTokens(torch.cat((first, drawn.tokens[count:])), drawn.broken)
