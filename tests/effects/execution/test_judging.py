"""Which drafts stand on a device: those that `minfer.speculate.accept` lets stand."""

import random
from collections.abc import Iterator

import pytest
import torch
from attrs import define, evolve
from torch import Tensor

from minfer.effects.execution.device_rows import DeviceRows, aligned
from minfer.effects.execution.inputs import Drafts, Late
from minfer.effects.execution.judging import draw_late, judge, spread
from minfer.effects.execution.kinds import Kind
from minfer.effects.execution.sampler import Sampler
from minfer.effects.execution.torch_executor import open_backend
from minfer.effects.execution.verified import Further
from minfer.effects.models.spec_reader import parse_spec
from minfer.plan import Open
from minfer.request import Request, SamplingParams
from minfer.sample import row_sampling
from minfer.speculate.accept import Target, Verdict, same_noise
from tests.effects.execution.test_runner import CONFIG
from tests.effects.execution.tiny_engine import CUDA, VOCAB
from tests.effects.tiny_model import CONFIG as SIZES

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


def opened(rng: random.Random, row: int) -> Open:
    """A row that knows some tokens, and draws in one of the ways."""
    known = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(3, 9)))
    output = rng.randrange(3)
    request = Request(
        id=str(row),
        prompt=known[: len(known) - output],
        output=known[len(known) - output :],
        max_tokens=20,
        sampling=WAYS[row % len(WAYS)],
        stop_ids=frozenset({1, 2, 3}),
        bad_words=((7, 8), (5,)) if row % 3 == 0 else (),
        seed=row,
    )
    return Open(
        index=0,
        name=(str(row), 0),
        known=known,
        prompt=len(request.prompt),
        last=40,
        sampling=row_sampling(request, 0),
        tables=((row,),),
    )


@define
class World:
    """Rows on a device that are about to draw, and what the pure rule says they draw."""

    opens: list[Open]
    logits: Tensor  # [1 + drafts, rows, vocab]
    said: list[tuple[int, ...]]
    verdicts: list[Verdict]
    rows: DeviceRows
    sampler: Sampler
    masks: list[tuple[bytes, ...]]  # of each row, place by place; or none

    @classmethod
    def make(cls, rng: random.Random, kind: str, *, masked: bool = False) -> "World":
        device = torch.device("cuda" if CUDA and kind == "cuda" else "cpu")
        backend = open_backend(SPEC, CONFIG, device, kernels=kind == "cuda")
        rows = DeviceRows(ROWS + 1, 4, VOCAB, device)
        sampler = Sampler(backend, rows, ROWS + 9, 200, DRAFTS * ROWS)
        opens = [opened(rng, row) for row in range(ROWS)]
        for row, one in enumerate(opens):
            sampler.open(row, one)
        for places, values in rows.changes:
            pairs = torch.cat((torch.from_numpy(places), torch.from_numpy(values)))
            backend.scatter(rows.arena, pairs.to(device))
        rows.next[:ROWS] = torch.tensor([len(one.known) - 1 for one in opens])
        made = torch.Generator().manual_seed(rng.getrandbits(30))
        logits = 2 * torch.randn(1 + DRAFTS, ROWS, VOCAB, generator=made)
        masks = [tuple(some_masks(rng)) if masked else () for _ in opens]
        targets = [
            Target(
                how=one.sampling,
                known=one.known,
                prompt=one.prompt,
                logits=tuple(logits[:, row].tolist()),
                masks=masks[row],
            )
            for row, one in enumerate(opens)
        ]
        said = [guess(rng, target) for target in targets]
        verdicts = [same_noise(*each) for each in zip(targets, said, strict=True)]
        return cls(opens, logits, said, verdicts, rows, sampler, masks)

    def drafts(self, order: list[int]) -> Drafts[Tensor]:
        """The drafts of these rows."""
        lines = [[*self.said[row], *[0] * DRAFTS][:DRAFTS] for row in order]
        device = self.rows.arena.device
        counts = torch.tensor([len(self.said[row]) for row in order], device=device)
        said = torch.tensor(lines, device=device).T.contiguous()
        return Drafts(counts.int(), said.int())

    def drawn(self, order: list[int], verified: int) -> dict[int, list[int]]:
        """What all rows draw in this order, the first of which have drafts."""
        rows, sampler, device = self.rows, self.sampler, self.rows.arena.device
        kind = Kind(alone=ROWS, draws=ROWS, filtered=True, shaped=True)
        kind = evolve(kind, verified=verified, drafts=DRAFTS)
        selves = torch.tensor(order, dtype=torch.int32, device=device)
        drafts = self.drafts(order[:verified])
        inputs = spread(sampler.backend, rows, selves, drafts, None)
        positions = rows.next[selves.long()] + 1
        first = self.logits[0][order].to(device)
        further = self.logits[1:][:, order[:verified]].reshape(-1, VOCAB).to(device)
        sampler.sample(first, selves, positions, kind.wants)
        judge(sampler, kind, selves, inputs, further)
        return self.found(order, kind)

    def drawn_late(
        self, order: list[int], verified: int, kept: list[int]
    ) -> dict[int, list[int]]:
        """The same, by masks and from logits that were kept; those of places behind
        drafts for the rows `kept`, in this order.
        """
        rows, sampler, device = self.rows, self.sampler, self.rows.arena.device
        kind = Kind(alone=0, draws=ROWS, filtered=True, shaped=True, late=True)
        kind = evolve(kind, verified=verified, drafts=DRAFTS)
        selves = torch.tensor(order, dtype=torch.int32, device=device)
        sampler.keep(self.logits[0][order].to(device), selves)
        sampler.keep_behind(self.logits[1:][:, kept].reshape(-1, VOCAB).to(device))
        first = torch.tensor([kept.index(row) for row in order[:verified]])
        steps = torch.arange(DRAFTS) * len(kept)
        behind = (steps[:, None] + first).int().to(device)
        for place in range(1 + DRAFTS):
            some = order[:verified] if place else order
            begin = aligned(ROWS) + (place - 1) * aligned(verified) if place else 0
            lines = b"".join([self.masks[row][place] for row in some])
            words = torch.frombuffer(bytearray(lines), dtype=torch.int32)
            there = sampler.masks.lines[begin : begin + len(some)]
            there.copy_(words.view(len(some), -1))
        positions = rows.next[selves.long()] + 1
        late = Late(selves, positions, behind)
        draw_late(sampler, kind, late, self.drafts(order[:verified]))
        return self.found(order, kind)

    def found(self, order: list[int], kind: Kind) -> dict[int, list[int]]:
        """What came of it, of the rows in this order."""
        out, verified = self.sampler.out.tolist(), kind.verified
        found = {row: [out[at]] for at, row in enumerate(order)}
        owners: list[Open | None] = [self.opens[row] for row in order[:verified]]
        told = Further.of(kind, order[:verified], owners)
        for row, owner, lines in told.standing(out):
            assert owner is self.opens[row]
            found[row] += [out[line] for line in lines]
        return found


def some_masks(rng: random.Random) -> Iterator[bytes]:
    """Half of the tokens may come, at each place others."""
    words = -(-VOCAB // 32)
    for _ in range(1 + DRAFTS):
        bits = rng.getrandbits(VOCAB) | 1 << rng.randrange(VOCAB)
        yield bits.to_bytes(4 * words, "little")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_as_the_pure_rule_says(kind: str, seed: int, late: bool) -> None:
    rng = random.Random(seed)
    world = World.make(rng, kind, masked=late)
    order = rng.sample(range(ROWS), ROWS)
    verified, accepted = ROWS - 2, 0
    if late:
        kept = rng.sample(order[:verified], verified)
        found = world.drawn_late(order, verified, kept)
    else:
        found = world.drawn(order, verified)
    for at, row in enumerate(order):
        expected = list(world.verdicts[row].tokens)[: None if at < verified else 1]
        accepted += len(expected) - 1
        assert found[row] == expected
        assert world.rows.last[row] == expected[-1]
        assert world.rows.next[row] == len(world.opens[row].known) + len(expected) - 1
    assert accepted > 9
    assert world.rows.next[world.rows.scratch] == 0


def guess(rng: random.Random, target: Target) -> tuple[int, ...]:
    """Up to `DRAFTS` drafts of a row, often right."""
    tokens = list[int]()
    for _ in range(rng.randrange(DRAFTS + 1)):
        before = evolve(target, logits=target.logits[: len(tokens) + 1])
        [*_, right] = same_noise(before, tokens).tokens
        tokens.append(right if rng.random() < 0.8 else rng.randrange(VOCAB))
        if tokens[-1] != right:
            break
    more = rng.randrange(DRAFTS + 1 - len(tokens))
    return (*tokens, *(rng.randrange(VOCAB) for _ in range(more)))
