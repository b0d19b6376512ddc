"""A draft head on the CPU, with a cache of its own."""

from collections.abc import Callable, Sequence

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import KVCache, make_cache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.draft_heads.head_step import (
    embed_for_head,
    head_logits,
    project_states,
    run_head,
    store_head,
)
from minfer.effects.models.draft_heads.head_weights import DraftHeadWeights
from minfer.effects.models.ranks import SINGLE_RANK, Communicator
from tests.effects.tiny_heads import Drafted

BLOCK = 8
BLOCKS = 8


def _cache(run: "HeadRun") -> KVCache:
    spec = evolve(run.spec, draft_head=run.head).with_head_layer()
    only_head = evolve(spec, layers=spec.layers[-1:])
    return make_cache(only_head, BLOCKS, BLOCK)


@frozen(eq=False)
class HeadRun:
    """A head that drafts behind one sequence. `h` of a token is that of the token
    before: pair i is at position i.
    """

    spec: ModelSpec
    target: Weights
    head: HeadSpec
    weights: DraftHeadWeights
    communicator: Communicator = SINGLE_RANK
    cache: KVCache = Factory(_cache, takes_self=True)

    def step(self, tokens: Sequence[int], start: int) -> ModelStep:
        batch = make_batch([BatchRow(tokens, start, range(BLOCKS))], BLOCK)
        products = ProductContext(on_gpu=False)
        return ModelStep(batch, self.cache, self.communicator, products)

    def project(self, streams: Tensor) -> Tensor:
        """The state of each token."""
        step = self.step([0], 0)
        with torch.inference_mode():
            return project_states(self.head, self.weights, self.target, streams, step)

    def store(self, states: Tensor, tokens: Sequence[int], start: int = 0) -> None:
        """Keys of tokens, nothing else."""
        step = self.step(tokens, start)
        with torch.inference_mode():
            embeddings = self._embed(step)
            store_head(self.head, self.weights, embeddings, states, 0, step)

    def draft(self, states: Tensor, tokens: Sequence[int], start: int = 0) -> Drafted:
        """What follows behind the tokens."""
        step = self.step(tokens, start)
        with torch.inference_mode():
            embeddings, given = self._embed(step), states.clone()
            hidden = run_head(self.head, self.weights, embeddings, given, 0, step)
            assert given.equal(states)
            logits = head_logits(
                self.spec, self.head, self.weights, self.target, hidden, step
            )
        return Drafted(hidden, logits)

    def _embed(self, step: ModelStep) -> Tensor:
        tokens = step.batch.tokens
        return embed_for_head(self.spec, self.weights, self.target, tokens, step)


def assert_same_drafts(
    run: HeadRun,
    theirs: Callable[[Tensor, Sequence[int]], Drafted],
    states: Tensor,
    tokens: Sequence[int],
    drafts: int = 3,
) -> None:
    """The head drafts what `theirs` does behind each of the tokens, whose `states`
    [tokens, hidden] the target gave; and behind the last one, a chain of tokens.
    """
    pairs, following = states[:-1], tokens[1:]
    expected = theirs(pairs, following)
    close(run.draft(pairs, following), expected)
    run.store(pairs[:-1], following[:-1])
    given, all_tokens = pairs, list(following)
    for place in range(drafts):
        start = len(all_tokens) - 1
        found = run.draft(given[-1:], all_tokens[-1:], start)
        expected = theirs(given, all_tokens)
        close(found, Drafted(expected.hidden[-1:], expected.logits[-1:]))
        given = torch.cat((given, expected.hidden[-1:]))
        all_tokens.append((7 * place + int(expected.logits[-1].argmax())) % 160)


def close(found: Drafted, expected: Drafted) -> None:
    """They differ by float32's roundings alone."""
    for ours, theirs in (
        (found.hidden, expected.hidden),
        (found.logits, expected.logits),
    ):
        largest = float(theirs[theirs.isfinite()].abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * largest)
