"""Whatever drafts, answers are those without: the bundled models, on the CPU."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest

from minfer import LLM, SamplingParams
from minfer.analysis.drafts import sample_drafts, tally_of
from minfer.effects.execution.packing.pack_plan import Forward, Packer
from minfer.effects.execution.running.runner import ModelRunner
from minfer.records.plan import Plan
from minfer.speculate.tally import NO_DRAFTS, DraftTally
from tests.circles import claimed
from tests.core.recorded import Seen

PROMPTS = (
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\ndef main(",
    "for line in lines:\n    if line.startswith('#'):\n        continue\n    if line.",
)
# Functions that the model knows by heart, begun once more: for who looks up what came
# before. (A text that only goes round in circles it ends.)
GCD = '''def gcd(a, b):
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a
'''
IS_PRIME = '''def is_prime(n):
    """Return whether n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True
'''
AVERAGE = '''def average(numbers):
    """Return the average of a list of numbers."""
    if not numbers:
        return 0
    return sum(numbers) / len(numbers)
'''
AGAIN = tuple(
    f"{prompt}\n\n{prompt[: prompt.index('(') + 1]}"
    for prompt in (GCD, IS_PRIME, AVERAGE)
)
# Ways to ask, for each prompt.
GREEDY = [SamplingParams(temperature=0, max_tokens=40)] * 3
SAMPLED = [SamplingParams(temperature=1, max_tokens=40, seed=3)] * 3
MIXED = [
    SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=1, max_tokens=30, seed=1),
    SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=2, max_tokens=40),
    SamplingParams(temperature=0.6, top_k=20, n=2, stop=["\n\n"], max_tokens=50, seed=2),
]
REQUESTED = {"greedy": GREEDY, "sampled": SAMPLED, "mixed": MIXED}
Config = Mapping[str, Any] | None


def answers(
    config: Config, requested: str, prompts: Sequence[str] = PROMPTS, **settings: Any
) -> tuple[list[Any], DraftTally]:
    """What is answered in float32, and what became of drafts."""
    sizes = {"dtype": "float32", "num_gpu_blocks_override": 199, "max_num_seqs": 4}
    fixed = None if config is None else {**config, "adaptive": False}
    with LLM(speculative_config=fixed, **{**sizes, **settings}) as llm:
        turns = llm.worker.driver.record = Seen()
        outputs = llm.generate(list(prompts), REQUESTED[requested])
    reported = [
        (completion.token_ids, completion.text, completion.finish_reason)
        for output in outputs
        for completion in output.outputs
    ]
    judgements = (
        sample_drafts(turn.before, turn.events, turn.transition) for turn in turns
    )
    return reported, tally_of(chain.from_iterable(judgements))


@cache
def plain(requested: str, prompts: Sequence[str] = PROMPTS) -> list[Any]:
    """What is answered without drafts."""
    reported, tally = answers(None, requested, prompts)
    assert tally == NO_DRAFTS
    return reported


@pytest.mark.long
@pytest.mark.parametrize(
    ("requested", "min_rate"),
    [("greedy", 0.5), ("mixed", 0.3), *claimed([("sampled", 0.3)])],
)
@pytest.mark.parametrize("drafts", [3, *claimed([(1,), (8,)])])
def test_with_the_bundled_draft_model(
    requested: str, min_rate: float, drafts: int
) -> None:
    config = {
        "method": "draft_model",
        "num_speculative_tokens": drafts,
        "adaptive": False,
    }
    reported, tally = answers(config, requested)
    assert reported == plain(requested)
    assert tally.by_place[0] > min_rate
    assert len(tally.by_place) == drafts


@pytest.mark.parametrize("method", ["ngram", *claimed([("suffix",)])])
@pytest.mark.parametrize("requested", ["greedy", *claimed([("mixed",), ("sampled",)])])
def test_with_what_the_host_looks_up(method: str, requested: str) -> None:
    config = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    reported, tally = answers(config, requested, AGAIN)
    assert reported == plain(requested, AGAIN)
    assert tally.rows > 2
    assert sum(tally.accepted) > 0


@pytest.mark.long
@pytest.mark.parametrize("requested", ["greedy", "mixed"])
def test_beside_prompts_as_a_forward_of_their_own(
    requested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where steps have graphs."""
    in_parts = list[bool]()
    forwards = Packer.forwards

    def counted(packer: Packer, plan: Plan) -> Iterator[Forward]:
        kinds = []
        for forward in forwards(packer, plan):
            kinds.append(forward.shape)
            yield forward
        in_parts.append(bool(plan.drafts and plan.fills) and len(kinds) == 2)

    monkeypatch.setattr(ModelRunner, "separates_drafts", True)
    monkeypatch.setattr(Packer, "forwards", counted)
    config = {"method": "draft_model", "num_speculative_tokens": 3}
    reported, tally = answers(config, requested, max_num_batched_tokens=12)
    assert reported == plain(requested)
    assert any(in_parts)
    assert sum(tally.accepted) > 0


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 3])
def test_however_many_steps_are_in_flight(depth: int) -> None:
    config = {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    reported, _ = answers(config, "greedy", steps_in_flight=depth, block_size=16)
    assert reported == plain("greedy")
