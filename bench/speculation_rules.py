"""Drafts under rejection sampling, by its pure functions: `bench/speculation` beside it.

What modified rejection sampling accepts is found here without an engine: a row at a time,
each forward from the text's first token, draws and verdicts in pure Python
(`minfer.speculate.rejection`). So there are fewer rows. Greedily the two rules are one.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from attrs import frozen

from minfer.effects.setup.speculation_settings import (
    DRAFT_MODEL,
    WITHOUT_HEADS,
    SpeculativeConfig,
)
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling
from minfer.speculate.accept import TargetOutput, Verdict
from minfer.speculate.proposer import Proposer
from minfer.speculate.rejection import Chances, Streams, rejection, sample_draft
from minfer.speculate.tally import DraftTally, of_row

SCOPE: Final = b""  # who shares what others wrote: all


class Drafter(Protocol):
    """Who proposes for one row after the other."""

    def began(self, number: int, prompt: list[int]) -> None:
        """A row begins."""

    def grew(self, tokens: tuple[int, ...]) -> None:
        """It goes on."""

    def drafts(
        self, context: list[int], max_drafts: int
    ) -> tuple[list[int], list[Chances]]:
        """What may follow, and what each was drawn from, if they were drawn."""


class ByModel:
    """A draft model."""

    def __init__(self, model: Any, sampling: RowSampling) -> None:
        self.model, self.how = model, sampling
        self.prompt = 0

    def began(self, number: int, prompt: list[int]) -> None:
        self.streams, self.prompt = Streams.of(number, 0), len(prompt)

    def grew(self, tokens: tuple[int, ...]) -> None:
        """It reads all of the text each time."""

    def drafts(
        self, context: list[int], max_drafts: int
    ) -> tuple[list[int], list[Chances]]:
        tokens, proposed = list[int](), list[Chances]()
        for _ in range(max_drafts):
            text = context + tokens
            [logits] = logits_of(self.model, text, 1)
            sample = sample_draft(logits, self.how, text, self.prompt, self.streams)
            tokens.append(sample.token)
            proposed.append(sample.chances)
        return tokens, proposed


class ByLookup:
    """A proposer of the host, which reads the rows that went before, too."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer, self.library, self.sample_id = proposer, proposer.start(), ("", 0)

    def began(self, number: int, prompt: list[int]) -> None:
        self.library = self.proposer.ended(self.library, self.sample_id)
        self.sample_id = (str(number), 0)
        self.library = self.proposer.began(
            self.library, self.sample_id, SCOPE, len(prompt)
        )
        self.grew(tuple(prompt))

    def grew(self, tokens: tuple[int, ...]) -> None:
        self.library = self.proposer.grew(self.library, self.sample_id, tokens)

    def drafts(
        self, context: list[int], max_drafts: int
    ) -> tuple[list[int], list[Chances]]:
        del context
        return [
            *self.proposer.propose(self.library, self.sample_id, max_drafts).tokens
        ], []


@torch.inference_mode()
def logits_of(model: Any, text: list[int], last: int) -> list[list[float]]:
    """What a model says after each of the last tokens of a text."""
    rows: list[list[float]] = model(torch.tensor([text])).logits[0, -last:].tolist()
    return rows


@frozen
class Row:
    """What came of a row."""

    tally: DraftTally
    steps: int


def one_row(
    model: Any, drafter: Drafter, prompt: list[int], number: int, args: Any
) -> Row:
    """Write some tokens behind a prompt."""
    sampling = RowSampling.of(SamplingParams(), number, 0)
    tokens, tally, steps = [*prompt], DraftTally(), 0
    drafter.began(number, prompt)
    end = len(prompt) + args.tokens
    while len(tokens) < end:
        max_drafts = min(args.drafts, end - len(tokens) - 1)
        drafts, proposed = drafter.drafts(tokens, max_drafts) if max_drafts else ([], [])
        rows = logits_of(model, tokens + drafts, len(drafts) + 1)
        target = TargetOutput(
            sampling=sampling,
            tokens=tuple(tokens),
            num_prompt_tokens=len(prompt),
            logits=tuple(rows),
        )
        verdict: Verdict = rejection(target, drafts, proposed)
        if drafts:
            tally = tally.plus(of_row(len(drafts), verdict.accepted))
        steps += 1
        tokens += verdict.tokens
        drafter.grew(verdict.tokens)
    return Row(tally, steps)


def by_rejection(
    models: Sequence[Any], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """All proposers at temperature 1."""
    target, draft = models
    results: dict[str, Any] = {}
    for method in WITHOUT_HEADS:
        drafter: Drafter
        if method == DRAFT_MODEL:
            drafter = ByModel(draft, RowSampling.of(SamplingParams(), 0, 0))
        else:
            proposer = SpeculativeConfig(method=method).proposer
            if proposer is None:
                raise AssertionError(method)
            drafter = ByLookup(proposer)
        rows = [
            one_row(target, drafter, *numbered, args) for numbered in _numbered(prompts)
        ]
        tally = DraftTally()
        for row in rows:
            tally = tally.plus(row.tally)
        steps = sum(row.steps for row in rows)
        results[method] = {
            "prompts": len(prompts),
            "proposed": sum(tally.proposed),
            "accepted": sum(tally.accepted),
            "acceptance": round(tally.rate, 4),
            "by place": [round(share, 4) for share in tally.by_place],
            "accepted by place": [*tally.accepted],
            "mean length": round(tally.mean_length, 3),
            "tokens per target step": round(len(prompts) * args.tokens / steps, 3),
        }
    return results


def _numbered(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    return [(prompt, number) for number, prompt in enumerate(prompts)]
