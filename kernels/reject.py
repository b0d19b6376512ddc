"""The token at a draft's place under modified rejection sampling:
`minfer.speculate.rejection` for a batch, in plain torch on any device.

Theory. With p the target's distribution in a place and q the one that its draft was
sampled from, the draft is accepted if its p is at least coin times its q. Else a token is
sampled from max(0, p - q), by the target's own noise: the largest log(p - q) - log(E), as
in sample.py. Both distributions are dense, over the whole vocabulary: the tokens left of
the target's can be anywhere. For a draft that was not sampled, q is 1 at the draft. So it
is for one that was sampled from logits that are not finite: it is token 0, as such
samples are.

If nothing is left, p and q are equal but for rounding, and the token is sampled from p.

Control flow does not depend on the contents of tensors: calls can be captured in a graph.
Rows are processed a few at a time, so that temporary memory does not grow with them.

Arithmetic, for 152k logits (estimated): a row and place moves some 0.7 kB for each logit,
half of it for noise in int64, which is 0.1 GB, or 30 us at 3.3 TB/s; with filters, six
sorts and their temporaries make that five times as much. The default rule costs a launch
instead. The gain is in accepted drafts: 1 - TV instead of at least (1 - TV) / (1 + TV).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minfer.kernels.sample_reference import (
    SamplingValues,
    comparable,
    first_largest,
    kept_tokens,
    uniform,
    waiting,
)

ROWS_AT_ONCE = 16  # rows
# Of one of these for each token of the vocabulary, at most: p and q, and while filters
# are applied to one of them, a dozen numbers of 8 bytes.
BYTES_PER_TOKEN = 128


class RejectionNoise(NamedTuple):
    """The noise of the samples, [rows, 1] int64 each."""

    picks: Tensor  # streams: the rows' own
    coins: Tensor
    positions: Tensor  # of the sampled tokens


class RowDrafts(NamedTuple):
    """A draft of each row."""

    tokens: Tensor  # [rows, 1]
    given: Tensor  # [rows, 1] bool: given, not sampled
    # [rows, vocab], shaped: the distributions of the others; None: there are no others
    logits: Tensor | None


def reject(
    logits: Tensor,
    values: SamplingValues,
    noise: RejectionNoise,
    drafts: RowDrafts,
    *,
    filtered: bool,
) -> Tensor:
    """The tokens [rows, 1] at the places of drafts, one a row; any token for rows whose
    logits are not finite.

    `logits` [rows, vocab] are the target's, shaped. Draft and target are sampled with the
    same `values`; `filtered` False promises that these filter nothing.
    """
    token_chunks = [torch.empty_like(drafts.tokens[:0])]
    for first in range(0, len(logits), ROWS_AT_ONCE):
        chunk = slice(first, first + ROWS_AT_ONCE)
        proposed = None if drafts.logits is None else drafts.logits[chunk]
        tokens = _reject(
            logits[chunk],
            SamplingValues(*(column[chunk] for column in values)),
            RejectionNoise(*(column[chunk] for column in noise)),
            RowDrafts(drafts.tokens[chunk], drafts.given[chunk], proposed),
            filtered=filtered,
        )
        token_chunks.append(tokens)
    return torch.cat(token_chunks)


def _reject(
    logits: Tensor,
    values: SamplingValues,
    noise: RejectionNoise,
    drafts: RowDrafts,
    *,
    filtered: bool,
) -> Tensor:
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    is_draft = ids == drafts.tokens
    p, q = probabilities(logits, values, filtered=filtered), is_draft.float()
    if drafts.logits is not None:
        certain = drafts.given | comparable(drafts.logits).amax(1, True).isinf()
        q = q.where(certain, probabilities(drafts.logits, values, filtered=filtered))
    coin = uniform(noise.coins, noise.positions, torch.zeros_like(noise.positions))
    p_draft, q_draft = ((chances * is_draft).sum(1, True) for chances in (p, q))
    accepted = (p_draft > 0) & (coin * q_draft <= p_draft)
    left = p - q
    left = left.where((left > 0).any(1, True), p).clamp(min=0)
    score = left.log() - waiting(noise.picks, noise.positions, ids).log()
    return drafts.tokens.where(accepted, first_largest(score, ids))


def probabilities(logits: Tensor, values: SamplingValues, *, filtered: bool) -> Tensor:
    """Probabilities [rows, vocab] float32 of tokens; NaN for logits that are not
    finite.
    """
    x = comparable(logits)
    largest = x.amax(1, True)
    depth = (largest - x) / values.divisor
    mass = (-depth).double().exp()
    if filtered:
        rising, order = depth.sort(stable=True)
        is_kept = kept_tokens(rising, order, values)
        mass *= torch.zeros_like(is_kept).scatter(1, order, is_kept)
    mass /= mass.sum(1, True)
    ids = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)[None]
    greedy = ids == first_largest(x, ids)
    return mass.where(~values.greedy, greedy.double()).float()
