"""Which drafts a device accepts: those that `minfer.speculate.accept` accepts."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, evolve
from torch import Tensor

from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.open_backend import open_backend
from minfer.effects.execution.packing.inputs import DraftWords, ForwardWords
from minfer.effects.execution.packing.verified import DraftOutputs
from minfer.effects.execution.running.batch_builder import StepRows
from minfer.effects.execution.running.rejection_sampling import DraftProposal, PlaceDrafts
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.execution.running.speculative_step import Forwarded, speculative_step
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.records.plan import NewRow
from minfer.records.request import Request, SamplingParams, row_sampling
from minfer.speculate.accept import TargetOutput, Verdict, same_noise
from tests.effects.execution.test_runner import CONFIG
from tests.effects.execution.tiny_engine import CUDA, VOCAB
from tests.effects.tiny_model import CONFIG as SIZES

Rule = Callable[[random.Random, TargetOutput], "tuple[Drafted, Verdict]"]
WAYS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=7, min_p=0.01),
    SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=1, repetition_penalty=1.7, typical_p=0.9),
    SamplingParams(temperature=0, min_tokens=4),
    SamplingParams(temperature=0, logit_bias=((5, 3.0), (8, -4.0))),
    SamplingParams(temperature=0.5, allowed_token_ids=(3, 4, 5, 6, 7, 8, 9, 10)),
)
DRAFTS = 4
ROWS = 2 * len(WAYS)
SPEC = parse_spec({**SIZES, "vocab_size": VOCAB})


def opened(rng: random.Random, row: int) -> NewRow:
    """A row that knows some tokens, and draws in one of the ways."""
    known_tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(3, 9)))
    output = rng.randrange(3)
    request = Request(
        id=str(row),
        prompt=known_tokens[: len(known_tokens) - output],
        output=known_tokens[len(known_tokens) - output :],
        max_tokens=20,
        sampling=WAYS[row % len(WAYS)],
        stop_ids=frozenset({1, 2, 3}),
        bad_words=((7, 8), (5,)) if row % 3 == 0 else (),
        seed=row,
    )
    return NewRow(
        index=0,
        name=(str(row), 0),
        known=known_tokens,
        prompt=len(request.prompt),
        last_index=40,
        sampling=row_sampling(request, 0),
        tables=((row,),),
    )


@define
class Drafted:
    """The drafts of a row."""

    tokens: tuple[int, ...]
    # [vocab], shaped: what each was drawn from; none: the host says them
    logits: tuple[list[float], ...] = ()


@define
class Draft:
    """A draft model that has made these drafts."""

    made: list[DraftProposal]

    def propose(self, *_: object) -> list[DraftProposal]:
        return self.made


@define
class Made:
    """A step's parts, with logits in place of a model."""

    rows: DeviceRows
    sampler: Sampler
    drafter: Any
    logits: Tensor

    def forward(self, _: StepShape, __: object, step: StepRows, ___: object) -> Forwarded:
        return Forwarded(self.logits, self.rows.next[step.decode_rows.long()] + 1)

    def sample_first(
        self,
        shape: StepShape,
        words: object,
        step: StepRows,
        logits: Tensor,
        positions: Tensor,
        drafts: PlaceDrafts | None = None,
    ) -> Tensor:
        del words
        rows = step.decode_rows
        self.sampler.sample(logits, rows, positions, shape.sampling_needs, drafts=drafts)
        return rows


@define
class World:
    """Rows on a device that are about to draw, and what the pure rule says they draw."""

    opens: list[NewRow]
    logits: Tensor  # [1 + drafts, rows, vocab]
    drafted: list[Drafted]
    verdicts: list[Verdict]
    plain: list[int]  # what is drawn without drafts
    rows: DeviceRows
    sampler: Sampler

    @classmethod
    def make(
        cls, rng: random.Random, device_kind: str, rule: Rule | None = None
    ) -> "World":
        """`rule` drafts and judges; without it, drafts are what is drawn."""
        device = torch.device("cuda" if CUDA and device_kind == "cuda" else "cpu")
        backend = open_backend(SPEC, CONFIG, device, kernels=device_kind == "cuda")
        rows = DeviceRows(ROWS + 1, 4, VOCAB, device, rejects=rule is not None)
        sampler = Sampler(backend, rows, ROWS + 9, 200)
        opens = [opened(rng, row) for row in range(ROWS)]
        for row, new_row in enumerate(opens):
            sampler.open(row, new_row)
        for places, values in rows.changes:
            pairs = torch.cat((torch.from_numpy(places), torch.from_numpy(values)))
            backend.scatter(rows.arena, pairs.to(device))
        rows.next[:ROWS] = torch.tensor([len(new_row.known) - 1 for new_row in opens])
        generator = torch.Generator().manual_seed(rng.getrandbits(30))
        logits = 2 * torch.randn(1 + DRAFTS, ROWS, VOCAB, generator=generator)
        targets = [
            TargetOutput(
                sampling=new_row.sampling,
                tokens=new_row.known,
                num_prompt_tokens=new_row.prompt,
                logits=tuple(logits[:, row].tolist()),
            )
            for row, new_row in enumerate(opens)
        ]
        drafts_and_verdicts = [(rule or guessed)(rng, target) for target in targets]
        drafted, verdicts = zip(*drafts_and_verdicts, strict=True)
        plain = [same_noise(target, ()).tokens[0] for target in targets]
        reported = [*drafted], [*verdicts], plain
        return cls(opens, logits, *reported, rows, sampler)

    def drafts(self, order: list[int]) -> DraftWords[Tensor]:
        """The drafts of these rows."""
        row_drafts = [self.drafted[row] for row in order]
        host_tokens = [
            [-1] * len(row_draft.tokens) if row_draft.logits else row_draft.tokens
            for row_draft in row_drafts
        ]
        lines = [[*tokens, *[0] * DRAFTS][:DRAFTS] for tokens in host_tokens]
        device = self.rows.arena.device
        counts = torch.tensor(
            [len(row_draft.tokens) for row_draft in row_drafts], device=device
        )
        words = torch.tensor(lines, device=device).T.contiguous()
        return DraftWords(counts.int(), words.int())

    def guesses(self, order: list[int]) -> list[DraftProposal]:
        """What a draft model has drawn for these rows, if it has for any."""
        row_drafts = [self.drafted[row] for row in order]
        if not any(row_draft.logits for row_draft in row_drafts):
            return []
        device = self.rows.arena.device
        tokens = torch.zeros(DRAFTS, len(order), dtype=torch.int32)
        logits = torch.zeros(DRAFTS, len(order), VOCAB)
        for v, row_draft in enumerate(row_drafts):
            for place, line in enumerate(row_draft.logits):
                tokens[place, v] = row_draft.tokens[place]
                logits[place, v] = torch.tensor(line)
        pairs = zip(tokens.to(device), logits.to(device), strict=True)
        return [DraftProposal(*pair) for pair in pairs]

    def drawn(self, order: list[int], verified: int) -> dict[int, list[int]]:
        """What all rows draw in this order, the first of which have drafts."""
        device = self.rows.arena.device
        shape = StepShape(decode_rows=ROWS, draws=ROWS, filtered=True, shaped=True)
        shape = evolve(shape, verified=verified, drafts=DRAFTS, proposes=True)
        first, drafted = self.logits[0][order], self.logits[1:][:, order[:verified]]
        logits = torch.cat((first, drafted.reshape(-1, VOCAB))).to(device)
        drafts = self.drafts(order[:verified])
        model = Made(
            self.rows, self.sampler, Draft(self.guesses(order[:verified])), logits
        )
        step = StepRows(torch.tensor(order, dtype=torch.int32, device=device))
        speculative_step(model, shape, ForwardWords(None, None), step, drafts)
        return self.read_tokens(order, shape)

    def read_tokens(self, order: list[int], shape: StepShape) -> dict[int, list[int]]:
        """What came of it, of the rows in this order."""
        out, verified = self.sampler.out.tolist(), shape.verified
        row_tokens = {row: [out[place]] for place, row in enumerate(order)}
        owners: list[NewRow | None] = [self.opens[row] for row in order[:verified]]
        behind = DraftOutputs.of(shape, order[:verified], owners)
        for row, owner, lines in behind.accepted_lines(out):
            assert owner is self.opens[row]
            row_tokens[row] += [out[line] for line in lines]
        return row_tokens


@pytest.mark.parametrize("seed", range(4))
def test_as_the_pure_rule_says(device_kind: str, seed: int) -> None:
    check(random.Random(seed), World.make(random.Random(seed), device_kind), 9)


def check(rng: random.Random, world: World, min_accepted: int) -> None:
    """Rows draw what the rule says; of their drafts more than `min_accepted` stand."""
    order = rng.sample(range(ROWS), ROWS)
    verified, accepted = ROWS - 2, 0
    row_tokens = world.drawn(order, verified)
    for place, row in enumerate(order):
        expected = [world.plain[row]]
        if place < verified:
            expected = [*world.verdicts[row].tokens]
        accepted += len(expected) - 1
        assert row_tokens[row] == expected
        assert world.rows.last[row] == expected[-1]
        assert world.rows.next[row] == len(world.opens[row].known) + len(expected) - 1
    assert accepted > min_accepted
    assert world.rows.next[world.rows.scratch] == 0


def guessed(rng: random.Random, target: TargetOutput) -> tuple[Drafted, Verdict]:
    """Up to `DRAFTS` drafts of a row, often right, and which stand by default."""
    tokens = list[int]()
    for _ in range(rng.randrange(DRAFTS + 1)):
        before = evolve(target, logits=target.logits[: len(tokens) + 1])
        [*_, right] = same_noise(before, tokens).tokens
        tokens.append(right if rng.random() < 0.8 else rng.randrange(VOCAB))
        if tokens[-1] != right:
            break
    num_more = rng.randrange(DRAFTS + 1 - len(tokens))
    drafts = (*tokens, *(rng.randrange(VOCAB) for _ in range(num_more)))
    return Drafted(drafts), same_noise(target, drafts)
