"""A language of four words: models whose every outcome can be written down.

`outcomes` finds what a rule of acceptance may come to and with which probability, without
chance: a coin is bisected for the value at which the verdict turns, and a pick is asked
for the scores it picks from. `share_of` says what a sequence's probability must be.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from attrs import define, field, frozen

from minfer.sampling.logits import shape_logits
from minfer.sampling.reference_sampler import RowSampling, scores
from minfer.speculate.accept import TargetOutput, Verdict
from minfer.speculate.rejection import Chances, Noise, chances

VOCAB = 4
PROMPT: tuple[int, ...] = (2, 0)
LARGEST_COIN = 1 - 2**-24
Rule = Callable[[TargetOutput, Sequence[int], Sequence[Chances], Noise], Verdict]
Outcomes = dict[tuple[int, ...], float]


@frozen
class Model:
    """Logits that depend on the last two tokens."""

    salt: int
    sharpness: float = 2.5

    def __call__(self, known: Sequence[int]) -> list[float]:
        seen = [hash((self.salt, *known[-2:], t)) % 1009 / 1009 for t in range(VOCAB)]
        return [self.sharpness * x for x in seen]


def mask_after(known: Sequence[int]) -> bytes:
    """What a grammar might allow: never the last token again."""
    return bytes([0b1111 & ~(1 << known[-1])])


@frozen
class Setting:
    """Two models, and how tokens are chosen from what they say."""

    target: Callable[[Sequence[int]], list[float]]
    draft: Callable[[Sequence[int]], list[float]]
    how: RowSampling
    grammar: bool = False

    def at(self, drafts: Sequence[int], known: tuple[int, ...] = PROMPT) -> TargetOutput:
        """What the target says of drafts behind what is known."""
        ways = [(*known, *drafts[:place]) for place in range(len(drafts) + 1)]
        return TargetOutput(
            sampling=self.how,
            tokens=known,
            num_prompt_tokens=len(PROMPT),
            logits=tuple(self.target(way) for way in ways),
            masks=tuple(map(mask_after, ways)) if self.grammar else (),
        )

    def proposals(self, drafts: Sequence[int]) -> list[Chances]:
        """What each draft would be drawn from."""
        ways = [(*PROMPT, *drafts[:place]) for place in range(len(drafts))]
        return [self._chances(self.draft(way), way) for way in ways]

    def share_of(self, tokens: Sequence[int]) -> float:
        """The probability of tokens behind the prompt, by the target alone."""
        share = 1.0
        for place, token in enumerate(tokens):
            emitted = self.at(tokens[:place]).shape_logits(tokens[:place])
            share *= chances(scores(emitted, self.how)).get(token, 0.0)
        return share

    def _chances(self, logits: list[float], known: tuple[int, ...]) -> Chances:
        made = shape_logits(logits, self.how, known[: len(PROMPT)], known[len(PROMPT) :])
        return chances(scores(made, self.how))


@define
class Scripted:
    """Noise that does as it is told, and notes what it was asked."""

    coins: list[float]  # in turn
    requested: list[dict[int, float]] = field(factory=list)  # scores of picks
    places: list[int] = field(factory=list)  # positions of coins and picks

    def coin(self, position: int) -> float:
        self.places.append(position)
        return self.coins.pop(0)

    def pick(self, scored: Mapping[int, float], position: int) -> int:
        self.places.append(position)
        self.requested.append(dict(scored))
        return next(iter(scored))


def outcomes(rule: Rule, setting: Setting, drafts: tuple[int, ...], qs: Any) -> Outcomes:
    """What drafts may come to: tokens -> probability."""
    target, found, reached = setting.at(drafts), Outcomes(), 1.0
    low = 2.0**-33

    def tried(coins: list[float]) -> tuple[Verdict, Scripted]:
        noise = Scripted([*coins, *[LARGEST_COIN] * len(drafts)])
        return rule(target, drafts, qs, noise), noise

    def lost(coins: list[float], share: float) -> None:
        verdict, noise = tried(coins)
        kept = verdict.tokens[:-1]
        for token, chance in softmax(noise.requested[-1]).items():
            found[*kept, token] = found.get((*kept, token), 0.0) + share * chance

    for place in range(len(drafts)):
        before = [low] * place
        turn = turning_point(lambda coin: tried([*before, coin])[0].accepted > place)  # noqa: B023 - called at once
        if turn < 1:
            lost([*before, LARGEST_COIN], reached * (1 - turn))
        reached *= turn
    if reached:
        lost([low] * len(drafts), reached)
    return found


def turning_point(accepted: Callable[[float], bool]) -> float:
    """The share of coins by which a draft is accepted."""
    if accepted(LARGEST_COIN):
        return 1.0
    low, high = 0.0, LARGEST_COIN
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low if low > 2**-28 else 0.0


def softmax(scored: Mapping[int, float]) -> dict[int, float]:
    shares = {t: math.exp(score) for t, score in scored.items()}
    return {t: share / math.fsum(shares.values()) for t, share in shares.items()}


def largest_error(rule: Rule, setting: Setting, count: int, *, certain: bool) -> float:
    """How far the distribution of the next `count` + 1 tokens is from the target's, with
    `count` drafts: drawn from the draft model, or each sequence of drafts by itself,
    if they are `certain`.
    """
    worst, whole = 0.0, Outcomes()
    for drafts in product(range(VOCAB), repeat=count):
        qs = [] if certain else setting.proposals(drafts)
        each = zip(drafts, qs, strict=False)
        weight = math.prod(q.get(draft, 0.0) for draft, q in each)
        if not weight:
            continue
        some = outcomes(rule, setting, drafts, qs)
        if certain:
            worst = max(worst, _error(setting, some, count + 1))
        for tokens, share in some.items():
            whole[tokens] = whole.get(tokens, 0.0) + weight * share
    return worst if certain else _error(setting, whole, count + 1)


def _error(setting: Setting, found: Outcomes, length: int) -> float:
    """How far any sequence is from its due, what ended early going on by the target."""
    worst = 0.0
    for tokens in product(range(VOCAB), repeat=length):
        due = setting.share_of(tokens)
        got = 0.0
        for end in range(1, length + 1):
            share = found.get(tokens[:end], 0.0)
            if share:
                rest = setting.share_of(tokens) / max(
                    setting.share_of(tokens[:end]), 1e-9
                )
                got += share * rest
        worst = max(worst, abs(got - due))
    return worst
