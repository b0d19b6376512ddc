"""Plans with drafts: the tokens are those that there are without."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import define, evolve, field

from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed
from minfer.records.plan import Draft, Plan, PrefillTokens
from minfer.records.request import Request, SamplingParams
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.token_logprobs import TokenLogprobs
from minfer.values.checks import ConfigError
from tests.core.executing import opened
from tests.effects.execution.drafting import guessing, speculation
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    asking,
    check_scores,
    device_kinds,
    draft_on_device,
    make_executor,
    on_device,
    requests,
)

pytestmark = pytest.mark.usefixtures("device_kind")


# --- in an engine whose host drafts -----------------------------------------------------


@pytest.mark.long
def test_log_probabilities_of_drafts_are_those_of_the_model(
    model: Model, reference: Tokens
) -> None:
    wanted_requests = asking(requests(0))
    run, tally = guessing(model, reference, 0.8, 5)
    assert run.serve(wanted_requests, arrival_gap=1) == reference
    check_scores(model, run, wanted_requests)
    assert tally.accepted > 20


# --- plans that no engine made ----------------------------------------------------------

CONFIG = EngineConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=64,
    max_num_seqs=6,
    max_num_batched_tokens=40,
    vocab_size=VOCAB,
    speculation=speculation(HOST, 6),
)
TABLE = 8  # blocks of a row


@define
class Hand:
    """Plans for an executor, made by hand."""

    executor: TorchExecutor
    wanted: list[Request]
    latest: list[int] = field(factory=list)  # where rows are at the latest
    tokens: list[list[int]] = field(factory=list)
    scores: list[list[TokenLogprobs]] = field(factory=list)
    step: int = 0

    @classmethod
    def start(
        cls,
        model: Model,
        wanted_requests: list[Request],
        config: EngineConfig = CONFIG,
        draft: LoadedDraft | LoadedHead | None = None,
    ) -> "Hand":
        """With all prompts but the last token of each computed, and a token of each."""
        weights = on_device(model.weights)
        draft = draft_on_device(draft)
        hand = cls(make_executor(config, model.spec, weights, draft), wanted_requests)
        rows = tuple(range(len(wanted_requests)))
        tables = [tuple(range(TABLE * row, TABLE * row + TABLE)) for row in rows]
        opens = [
            evolve(opened(r, tables[i]), index=i) for i, r in enumerate(wanted_requests)
        ]
        counts = tuple(len(request.prompt) for request in wanted_requests)
        fills = tuple(
            PrefillTokens(i, request.prompt) for i, request in enumerate(wanted_requests)
        )
        hand.latest = list(counts)
        hand.tokens = [[] for _ in wanted_requests]
        hand.scores = [[] for _ in wanted_requests]
        all_ones = (1,) * len(rows)
        zeros = (0,) * len(rows)
        hand.launch(Plan(0, rows, rows, zeros, counts, all_ones, fills, tuple(opens)))
        hand.collect()
        return hand

    def go_on(self, drafts: Mapping[int, Sequence[int] | int]) -> None:
        """A step of all rows; those with drafts have these, or so many that are not
        said.
        """
        rows = tuple(range(len(self.wanted)))
        sizes = {
            i: row_draft if isinstance(row_draft, int) else len(row_draft)
            for i, row_draft in drafts.items()
        }
        counts = tuple(1 + sizes.get(i, 0) for i in rows)
        proposals = tuple(
            Draft(i, () if isinstance(row_draft, int) else tuple(row_draft))
            for i, row_draft in drafts.items()
        )
        starts = tuple(self.latest)
        self.launch(Plan(self.step, rows, rows, starts, counts, counts, drafts=proposals))
        for row, count in enumerate(counts):
            self.latest[row] += count

    def launch(self, plan: Plan) -> None:
        self.executor.launch(plan)
        self.step += 1

    def collect(self) -> Executed:
        """Take note of what a step yielded."""
        result = self.executor.collect()
        assert isinstance(result, Executed), result
        beside = result.logprobs or ((),) * len(result.yields)
        for row, (tokens, scores) in enumerate(zip(result.yields, beside, strict=True)):
            self.tokens[row] += tokens
            self.scores[row] += scores
        return result

    def settle(self) -> None:
        """All that was launched has been collected: where rows are is known."""
        self.latest = [
            len(request.prompt) + len(tokens) - 1
            for request, tokens in zip(self.wanted, self.tokens, strict=True)
        ]


WANTED = [
    Request(id="g", prompt=(3, 4, 5), max_tokens=24, sampling=GREEDY),
    Request(id="s", prompt=tuple(range(9)), max_tokens=20, seed=5),
    Request(
        id="p",
        prompt=(7,) * 5,
        max_tokens=20,
        sampling=SamplingParams(temperature=0.6, top_p=0.9, presence_penalty=1),
        seed=6,
    ),
    Request(id="q", prompt=(17, 2), max_tokens=20, sampling=GREEDY),
]


@pytest.fixture(scope="module")
def answers(model: Model) -> list[list[int]]:
    return [model.expected(request) for request in WANTED]


def check(hand: Hand, answers: list[list[int]]) -> None:
    """What rows yielded is how their answers begin."""
    for tokens, answer in zip(hand.tokens, answers, strict=True):
        assert tokens == answer[: len(tokens)]


def test_a_row_yields_accepted_drafts_and_one_more(
    model: Model, answers: list[list[int]]
) -> None:
    hand = Hand.start(model, WANTED)
    wrong = [(answer[3] + 1) % VOCAB for answer in answers]
    hand.go_on(
        {
            0: answers[0][1:5],
            1: [*answers[1][1:3], wrong[1], answers[1][4]],
            3: [(answers[3][1] + 1) % VOCAB],
        }
    )
    result = hand.collect()
    assert list(map(len, result.yields)) == [5, 3, 1, 1]
    hand.settle()
    hand.go_on({2: answers[2][2:8]})
    assert list(map(len, hand.collect().yields)) == [1, 1, 7, 1]
    check(hand, answers)


@pytest.mark.parametrize("seed", range(3))
def test_steps_ahead_of_results_begin_where_rows_are(
    model: Model, answers: list[list[int]], seed: int
) -> None:
    """Drafts are guessed, so they may be for another place than they come to."""
    rng = random.Random(seed)
    hand = Hand.start(model, WANTED)
    max_length = TABLE * CONFIG.block_size
    while max(hand.latest) < max_length - 14:
        for _ in range(2):  # in flight
            drafts = {}
            for row in rng.sample(range(len(WANTED)), rng.randrange(5)):
                begin = len(hand.tokens[row])
                drafts[row] = answers[row][begin:][: rng.randrange(1, 7)] or [0]
            hand.go_on(drafts)
        hand.collect()
        hand.collect()
        hand.settle()
    check(hand, answers)
    assert max(map(len, hand.tokens)) > 12


def test_up_to_the_end_of_a_table(model: Model) -> None:
    request = WANTED[0]
    count = TABLE * CONFIG.block_size - len(request.prompt)
    [answer] = [model.expected(evolve(request, max_tokens=count + 1))]
    hand = Hand.start(model, [request])
    while hand.latest[0] < TABLE * CONFIG.block_size:
        room = TABLE * CONFIG.block_size - hand.latest[0] - 1
        begin = len(hand.tokens[0])
        hand.go_on({0: answer[begin:][: min(6, room)]} if room else {})
        hand.collect()
        hand.settle()
    assert hand.tokens[0] == answer


def test_a_row_with_many_drafts_beside_rows_with_few(
    model: Model, answers: list[list[int]]
) -> None:
    """What there is no room for is refused: if it were cut, it would count as wrong."""
    hand = Hand.start(model, WANTED)
    hand.executor.launcher.packer.drafts = 8  # two for each row
    hand.go_on({row: answers[row][1:][: 2 if row == 1 else 1] for row in range(4)})
    assert list(map(len, hand.collect().yields)) == [2, 3, 2, 2]
    check(hand, answers)
    hand.go_on({row: answers[row][5:][: 3 if row == 1 else 1] for row in range(4)})
    failed = hand.executor.collect()
    assert isinstance(failed, Failed)
    assert "room for 8 drafts, not for 4 rows with up to 3 drafts" in failed.error


def test_a_wrong_draft_that_the_model_cannot_read_leaves_nothing_behind(
    model: Model, answers: list[list[int]]
) -> None:
    unread = VOCAB - 1
    assert all(unread not in answer for answer in answers)
    hand = Hand.start(unreadable(model, unread), WANTED)
    while min(map(len, hand.tokens)) < 12:
        hand.go_on({row: [unread] * (1 + row) for row in range(3)})
        hand.collect()
        hand.settle()
    check(hand, answers)


def test_a_right_draft_that_the_model_cannot_read_fails_its_request(model: Model) -> None:
    unread = VOCAB - 1
    drawn = SamplingParams(temperature=0, logit_bias=((unread, 100.0),))
    bad = Request(id="bad", prompt=(3, 4), max_tokens=9, sampling=drawn)
    hand = Hand.start(unreadable(model, unread), [WANTED[0], bad])
    hand.go_on({1: [5, unread]})
    failed = hand.executor.collect()
    assert isinstance(failed, Failed)
    assert "not finite for request 'bad' (sample 0)" in failed.error
    assert "'g'" not in failed.error


def unreadable(model: Model, token: int) -> Model:
    """The model, but for a token whose embedding is not finite."""
    embed = model.weights.embed.clone()
    embed[token] = torch.nan
    return Model(model.theirs, model.spec, evolve(model.weights, embed=embed))


# --- what is refused --------------------------------------------------------------------

ROW: dict[str, Any] = {
    "step": 1,
    "run_ids": (0,),
    "rows": (0,),
    "starts": (3,),
    "num_scheduled_tokens": (2,),
    "max_sampled_tokens": (2,),
    "drafts": (Draft(0, (5,)),),
}
REFUSED: dict[str, dict[str, Any]] = {
    "are decode rows": {"fills": (PrefillTokens(0, (3, 4)),)},
    "with deferred sampling have no drafts": {"deferred": (0,)},
    "1 to 6 drafts, not 7": {
        "num_scheduled_tokens": (8,),
        "drafts": (Draft(0, (5,) * 7),),
    },
    "not 0": {"num_scheduled_tokens": (1,)},
    "1 drafts are given of 2": {"num_scheduled_tokens": (3,)},
    "no drafter": {"drafts": (Draft(0),)},
}


@pytest.mark.parametrize("error_text", REFUSED)
def test_plans_that_cannot_be(model: Model, error_text: str) -> None:
    hand = Hand.start(model, WANTED[:1])
    hand.launch(Plan(**{**ROW, **REFUSED[error_text]}))
    failed = hand.executor.collect()
    assert isinstance(failed, Failed)
    assert failed.error.startswith("step 1: ")
    assert error_text in failed.error


def test_drafts_where_none_are_expected(model: Model) -> None:
    hand = Hand.start(model, WANTED[:1], evolve(CONFIG, speculation=None))
    hand.launch(Plan(**ROW))
    failed = hand.executor.collect()
    assert isinstance(failed, Failed)
    assert "drafts are not expected" in failed.error


def test_speculation_that_cannot_be(model: Model) -> None:
    spec_config = Speculation(drafter=HOST, drafts=2, adaptive=False)
    with pytest.raises(ConfigError, match="draft model"):
        Run.start(model, speculation=evolve(spec_config, drafter=DEVICE))


def test_padded_steps_were_tested(model: Model) -> None:
    """On a GPU's executor, as for graphs."""
    hand = Hand.start(model, WANTED, evolve(CONFIG, depth=1))
    runner: Any = hand.executor.runner
    assert runner.shortcuts.graphs == (device_kinds[-1] == "cuda")
