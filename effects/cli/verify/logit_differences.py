"""Logits, and the engine's greedy tokens, compared with transformers'."""

import math
import random
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.cli.verify.findings import Check, judge
from minfer.effects.cli.verify.reference import Logits
from minfer.effects.live.llm import LLM
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.records.request import SamplingParams

# Largest difference of a float32 logit, as a share of the logits' spread: sums in another
# order make 1e-5, in deep models 1e-4; the smallest real mistakes make 1e-2. Tokens whose
# logits are closer than twice this may come out either way, which is a tie.
FLOAT32: Final = 1e-3
# The same beside recurrent layers: transformers computes these in chunks, whose rounding
# norms amplify. In tiny models its float32 is off from its float64 by up to 6e-3 of the
# spread, minfer's by less, and they differ by 1.2e-3.
RECURRENT_FLOAT32: Final = 4e-3
# Times transformers' own divergence from float32, in half precision.
MAX_HALF_RATIO: Final = 3
BLOCK_TOKENS: Final = 16
MIN_GAIN_NATS: Final = 1.0  # nats a token by which text must be more probable
# Of its cost, at most, that text has when it is repeated: in the bundled models 0.25 to
# 0.4, and 0.75 to 1 where positions turn a hundred times faster than they learnt.
MAX_REPEATED_RATIO: Final = 0.7


def packed_logits(llm: LLM, texts: list[list[int]]) -> list[Tensor]:
    """minfer's logits of every position: texts packed, each as two chunks and a single
    token.
    """
    executor: Any = llm.worker.driver.executor
    config = llm.setup.config
    size = config.block_size if config.state_pages else BLOCK_TOKENS
    blocks = -(-max(map(len, texts)) // size) * len(texts)
    state_pages = executor.state_pages(size)
    cache = executor.make_cache(blocks + len(texts) * state_pages, size, blocks * size)
    chunks: list[list[Tensor]] = [[] for _ in texts]
    for turn in range(3):
        rows = {}
        for i, ids in enumerate(texts):
            ends = (0, len(ids) // 2, len(ids) - 1, len(ids))
            begin, end = ends[turn], ends[turn + 1]
            if begin < end:
                table = range(i, blocks, len(texts))
                state = range(blocks + i, blocks + len(texts) * state_pages, len(texts))
                rows[i] = BatchRow(ids[begin:end], begin, table, end - begin, state)
        batch = make_batch([*rows.values()], size, executor.device)
        logits = executor.model(batch, cache).float().cpu()
        logits = logits.split([row.sample for row in rows.values()])
        for i, chunk in zip(rows, logits, strict=True):
            chunks[i].append(chunk)
    return [torch.cat(text_chunks) for text_chunks in chunks]


def _rounding(llm: LLM) -> float:
    """Returns the largest difference of a float32 logit, as a share of their spread."""
    return RECURRENT_FLOAT32 if llm.setup.spec.has_states else FLOAT32


def check_float32(llm: LLM, texts: list[list[int]], exact: list[Tensor]) -> Check:
    """minfer's float32 logits against transformers', which are `exact`."""
    expected = torch.cat(exact)
    actual = torch.cat(packed_logits(llm, texts))
    gap = float((actual - expected).abs().max())
    allowed = _rounding(llm) * float(expected.std())
    figures = f"{len(expected)} positions of {len(texts)} prompts off by {gap:.2g}"
    bad = [] if gap <= allowed else [f"allowed is {allowed:.2g}"]
    return judge("logits float32", bad, figures)


def check_rounded(
    llm: LLM, texts: list[list[int]], exact: list[Tensor], reference_logits: list[Tensor]
) -> Check:
    """minfer's float32 logits where activations are rounded to 8 bits, against those of
    transformers' model that rounds them, `reference_logits`, and that does not, `exact`.

    The order of a sum decides now and then to which of two numbers an activation is
    rounded, and each such difference causes more of them in the next layer. So logits
    cannot be equal; their divergence from those without rounding is compared.
    """
    check = check_half(exact, packed_logits(llm, texts), reference_logits)
    return evolve(check, name="logits float32")


def check_greedy(
    llm: LLM,
    reference: Logits,
    texts: list[list[int]],
    tokens: int,
    off: float = 0.0,
) -> Check:
    """Check the engine's greedy tokens, twice, the second time from its prefix cache.

    Each token must have transformers' largest logit after the same tokens, which makes it
    the one that greedy generation writes there; `off` is by how much logits may differ,
    if by more than sums in another order do.
    """
    bad = []
    count = ties = hits = 0
    params = SamplingParams(temperature=0, max_tokens=tokens)
    for _ in range(2):
        outputs = llm.generate([list(ids) for ids in texts], params, use_tqdm=False)
        hits = sum(output.num_cached_tokens for output in outputs)
        for i, (ids, output) in enumerate(zip(texts, outputs, strict=True)):
            generated = list(output.outputs[0].token_ids)
            logits = reference([*ids, *generated[:-1]])[len(ids) - 1 :]
            gaps = logits.max(-1).values - logits[range(len(generated)), generated]
            allowed = 2 * max(off, _rounding(llm) * float(logits.std()))
            wrong = int((~(gaps <= allowed)).sum())
            count += len(generated)
            ties += int(gaps.count_nonzero()) - wrong
            bad += [f"prompt {i}: {wrong} tokens are not the likeliest"] if wrong else []
            ends = [
                position
                for position, token in enumerate(generated)
                if token in llm.setup.stop_ids
            ]
            if (ends or [tokens - 1]) != [len(generated) - 1]:
                error = output.outputs[0].error
                bad.append(f"prompt {i} ends after {len(generated)} tokens: {error}")
    figures = f"{count} tokens, {ties} ties, {hits} prompt tokens cached"
    return judge("greedy text", bad, figures)


def check_sanity(llm: LLM, passages: list[list[int]]) -> Check:
    """Text must be likelier than its tokens shuffled or a uniform guess; one of the
    passages must be likelier when it is repeated.

    The last takes attention that finds its way back over positions. One is enough, as
    what a model knows by heart gains nothing by it.
    """

    def cost(ids: list[int], begin: int = 0) -> float:  # nats a token
        logp = packed_logits(llm, [ids])[0][:-1].log_softmax(-1)
        return float(-logp.gather(1, torch.tensor(ids[1:])[:, None])[begin:].mean())

    costs = [cost(ids) for ids in passages]
    repeated_costs = [cost([*ids, *ids], len(ids)) for ids in passages]
    # The passage that the model knows better, and the one that gains more.
    text, ids = min(zip(costs, passages, strict=True))
    pairs = zip(costs, repeated_costs, strict=True)
    first, repeated = max(pairs, key=lambda pair: MAX_REPEATED_RATIO * pair[0] - pair[1])
    shuffled = cost(random.Random(0).sample(ids, len(ids)))  # noqa: S311 - no secrets
    uniform = math.log(llm.setup.spec.vocab_size)
    figures = (
        f"nats a token: text {text:.2f}, shuffled {shuffled:.2f}, uniform {uniform:.2f}; "
        f"{first:.2f}, and {repeated:.2f} when it is said again"
    )
    bad = []
    if text >= min(uniform, shuffled) - MIN_GAIN_NATS:
        bad.append("text is not clearly more probable")
    if repeated >= MAX_REPEATED_RATIO * first:
        bad.append("repeated text is not clearly more probable")
    return judge("sanity", bad, figures)


def check_half(
    exact: list[Tensor], logits: list[Tensor], reference_logits: list[Tensor]
) -> Check:
    """Divergence from float32 (Kullback-Leibler, nats a token), minfer's and
    transformers'.
    """
    expected = torch.cat(exact).log_softmax(-1)
    divergence = _divergence(expected, logits)
    reference_divergence = _divergence(expected, reference_logits)
    bad = (
        []
        if divergence[0] <= MAX_HALF_RATIO * reference_divergence[0] + 1e-4
        else ["too far from float32"]
    )
    figures = (
        f"divergence {divergence[0]:.2g} nats, likeliest token the same at "
        f"{divergence[1]:.1%}; "
        f"transformers {reference_divergence[0]:.2g}, {reference_divergence[1]:.1%}"
    )
    return judge("logits half", bad, figures)


def _divergence(expected: Tensor, logits: list[Tensor]) -> tuple[float, float]:
    """Mean divergence in nats from log-probabilities that are `expected`, and the share
    of positions whose likeliest token is the same.
    """
    logp = torch.cat(logits).log_softmax(-1)
    divergence = (expected.exp() * (expected - logp)).sum(-1).mean()
    same = (expected.argmax(-1) == logp.argmax(-1)).float().mean()
    return float(divergence), float(same)
