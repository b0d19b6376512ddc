"""Log-probabilities of prompts: logits at all positions of a chunk, a few at a time.

    a plan's chunks of scored rows ---> Targets: which inputs, and the tokens behind them
    the model ---> logits of some of the inputs ---> Scorer: ranks, likeliest ids, values
    the end of the step ---> bytes for each row, to the host beside the step's tokens

A token's log-probability does not depend on the chunks of its prompt, so nothing is kept
from chunk to chunk. Logits of a whole chunk may not fit in memory: so
`MIN_SCORED_POSITIONS` are scored together, or as many as sequences can be sampled, for
which there is memory. Steps with scored rows are launched without a graph, as those with
pooled rows are.
"""

from typing import Final

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.execution.contract import LogitsError, names_of
from minfer.effects.execution.device.backend import Backend
from minfer.effects.execution.device.device_rows import DeviceRows, aligned
from minfer.effects.execution.device.streams import is_gpu
from minfer.effects.models.architecture.batch import ChunkedLogits
from minfer.records.plan import NewRow, Plan, Pooled
from minfer.records.token_logprobs import pack_part
from minfer.sampling.params import MAX_LOGPROBS

MIN_SCORED_POSITIONS: Final = 64  # scored together, at least


@frozen(eq=False)
class ScoredChunk:
    """Inputs of one scored row, in one chunk."""

    entry: int  # of the plan
    owner: NewRow
    first: int  # the index in the prompt of the token behind the first of them
    offset: int  # of the first, among all that are scored
    count: int
    width: int  # reported entries of each: its own, and likeliest ones


@frozen(eq=False)
class ScoredTokens:
    """The tokens that a step's scored rows need scores of."""

    inputs: NDArray[np.int32]  # among the packed tokens
    tokens: NDArray[np.int32]  # that follow them
    widths: NDArray[np.int32]  # reported entries of each
    chunks: tuple[ScoredChunk, ...]

    @classmethod
    def of(
        cls, plan: Plan, rows: DeviceRows, counts: list[int], decode_rows: int
    ) -> "ScoredTokens | None":
        """Returns the tokens to score in a plan's chunks, which have `counts` tokens and
        are packed behind `decode_rows` rows; None if no row's prompt is scored.
        """
        chunks = list[ScoredChunk]()
        inputs = list[NDArray[np.int32]]()
        total, end = 0, decode_rows
        for fill, count in zip(plan.fills, counts, strict=True):
            begin, end = end, end + count
            owner = rows.owners[plan.rows[fill.index]]
            if owner is None or owner.sampling.prompt_logprobs is None:
                continue
            start = plan.starts[fill.index]
            # the last token's is the output's
            followed = min(count, owner.prompt - 1 - start)
            if followed > 0:
                width = 1 + min(owner.sampling.prompt_logprobs, rows.vocab)
                chunk = ScoredChunk(fill.index, owner, start + 1, total, followed, width)
                chunks.append(chunk)
                inputs.append(np.arange(begin, begin + followed, dtype=np.int32))
                total += followed
        return cls._from_chunks(inputs, chunks) if chunks else None

    @classmethod
    def _from_chunks(
        cls, inputs: list[NDArray[np.int32]], chunks: list[ScoredChunk]
    ) -> "ScoredTokens":
        tokens = [
            chunk.owner.known[chunk.first : chunk.first + chunk.count] for chunk in chunks
        ]
        widths = np.array([chunk.width for chunk in chunks], np.int32)
        return cls(
            np.concatenate(inputs),
            np.concatenate([np.array(ids, np.int32) for ids in tokens]),
            np.repeat(widths, [chunk.count for chunk in chunks]),
            tuple(chunks),
        )


@frozen(eq=False)
class ChunkScores:
    """A step's results: log-probabilities of prompt tokens."""

    chunks: tuple[ScoredChunk, ...]
    words: Tensor  # on the host once the step is done, as `kernels.logprobs` writes them

    def read(self, rows: int) -> Pooled:
        """Returns one entry for each row, as results have them. Raises LogitsError."""
        words = self.words.numpy()
        out = [b""] * rows
        for chunk in self.chunks:
            lines = words[chunk.offset : chunk.offset + chunk.count, :, : chunk.width]
            if np.isnan(lines[:, 1].view(np.float32)).any():
                bad = names_of([chunk.owner])
                raise LogitsError(f"the model's logits are not finite for request {bad}")
            packed_lines = lines.astype("<i4").tobytes()
            out[chunk.entry] = pack_part(chunk.first, chunk.count, packed_lines)
        return tuple(out)


class Scorer:
    """Computes the log-probabilities of a step's targets."""

    def __init__(self, backend: Backend, seqs: int) -> None:
        """`seqs` is how many sequences can be sampled at once."""
        self.backend = backend
        self.max_positions = aligned(
            max(MIN_SCORED_POSITIONS, seqs)
        )  # as kernels are compiled for

    def scored(self, targets: ScoredTokens) -> tuple[ChunkedLogits, Tensor]:
        """Returns what the model has to output, and the buffer for the scores, as
        `kernels.logprobs` writes them.
        """
        count = len(targets.inputs)
        inputs, tokens, widths = map(
            self._to_device, (targets.inputs, targets.tokens, targets.widths)
        )
        rows = torch.arange(count, dtype=torch.int32, device=tokens.device)
        # The same width for all: kernels are compiled for each width.
        out = torch.zeros(
            count, 2, 1 + MAX_LOGPROBS, dtype=torch.int32, device=tokens.device
        )

        def take(first: int, logits: Tensor) -> None:
            span = slice(first, first + len(logits))
            self.backend.logprobs(logits, tokens[span], rows[span], widths, out[span])

        return ChunkedLogits(inputs, self.max_positions, take), out

    def fetched(self, targets: ScoredTokens, out: Tensor) -> ChunkScores:
        """Start copying the scores to the host; returns them."""
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=is_gpu(out.device))
        host.copy_(out, non_blocking=True)
        return ChunkScores(targets.chunks, host)

    def _to_device(self, values: NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(values)
        if not is_gpu(self.backend.device):
            return tensor
        return tensor.pin_memory().to(self.backend.device, non_blocking=True)
