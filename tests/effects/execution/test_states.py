"""What an executor does with states of recurrent layers: plan by plan, the tokens are
those of a model that computes all tokens of a sequence at once.
"""

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from attrs import define, evolve, field, frozen

from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.layout.cache_layout import plain_layout
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed, Failed
from minfer.records.plan import (
    Copy,
    Draft,
    Grow,
    NewRow,
    Plan,
    PrefillTokens,
    SaveState,
)
from minfer.records.request import Request
from minfer.records.speculation import HOST, Speculation
from tests.core.executing import opened
from tests.effects.execution.hybrid import Hybrid, spec_of
from tests.effects.execution.tiny_engine import (
    CUDA,
    GREEDY,
    VOCAB,
    device_kinds,
    make_executor,
)

BLOCK: Final = 8
PROMPTS: Final = [
    tuple((7 * i + 3 * j * j) % VOCAB for j in range(length))
    for i, length in enumerate((21, 1, 40, 5))
]
BLOCKS: Final = 8  # of each row
WORKING: Final = len(PROMPTS) * BLOCKS  # the first page behind them


@pytest.fixture(scope="module")
def hybrid() -> Hybrid:
    return Hybrid(spec_of())


@frozen
class Input:
    """Inputs of a row in a plan: tokens, or its last one."""

    row: int
    start: int
    tokens: tuple[int, ...] = ()
    samples: bool = True
    new: NewRow | None = None
    drafts: tuple[int, ...] = ()


@define
class Steps:
    """An executor of the model, and its plans."""

    executor: TorchExecutor
    pages: int  # of a state
    step: int = 0
    made: dict[int, list[int]] = field(factory=dict)  # tokens of each row

    @classmethod
    def start(cls, model: Any, **changes: Any) -> "Steps":
        layout = plain_layout(model.spec, BLOCK)
        config = EngineConfig(
            num_blocks=100,
            block_size=BLOCK,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            vocab_size=VOCAB,
            groups=layout.groups,
            **changes,
        )
        if CUDA and device_kinds[-1] != "cpu":
            pytest.skip("the model is on the CPU")
        executor = make_executor(config, model.spec, model)
        executor.runner.cache.data.fill_(255)  # NaN, wherever nothing was written
        if device_kinds[-1] == "cpu":  # whose attention reads behind contexts
            executor.runner.cache.clear(range(WORKING))
        return cls(executor, layout.state_pages)

    def state(self, number: int) -> tuple[int, ...]:
        """The pages of a state; the first are the rows' working states."""
        first = WORKING + number * self.pages
        return tuple(range(first, first + self.pages))

    def new_row(self, row: int, prompt: tuple[int, ...], index: int) -> NewRow:
        request = Request(id=f"r{row}", prompt=prompt, max_tokens=20, sampling=GREEDY)
        blocks = tuple(range(BLOCKS * row, BLOCKS * (row + 1)))
        new = evolve(opened(request), index=index)
        return evolve(new, tables=(blocks, self.state(row)))

    def plan(self, inputs: Sequence[Input], **further: Any) -> Plan:
        """A plan with these rows, in this order."""
        indexed = [*enumerate(inputs)]
        fills = [PrefillTokens(i, each.tokens) for i, each in indexed if each.tokens]
        opens = [evolve(each.new, index=i) for i, each in indexed if each.new]
        drafts = [Draft(i, each.drafts) for i, each in indexed if each.drafts]
        return Plan(
            self.step,
            tuple(each.row for each in inputs),
            tuple(each.row for each in inputs),
            tuple(each.start for each in inputs),
            tuple(max(1, len(each.tokens), 1 + len(each.drafts)) for each in inputs),
            tuple(each.samples + len(each.drafts) for each in inputs),
            tuple(fills),
            tuple(opens),
            drafts=tuple(drafts),
            **further,
        )

    def run(self, *inputs: Input, **further: Any) -> None:
        """Run a plan, and note its tokens."""
        self.executor.launch(self.plan(inputs, **further))
        result = self.executor.collect()
        assert isinstance(result, Executed), result
        self.step += 1
        for each, tokens in zip(inputs, result.yields, strict=True):
            assert each.samples <= len(tokens) <= each.samples + len(each.drafts)
            self.made.setdefault(each.row, []).extend(tokens)

    def prefill(self, row: int, start: int, end: int, new: bool = True) -> Input:
        """A chunk of a row's prompt, which is sampled at its end."""
        prompt = PROMPTS[row]
        opens = self.new_row(row, prompt, 0) if new else None
        return Input(row, start, prompt[start:end], end == len(prompt), opens)

    def decode(self, row: int) -> Input:
        return Input(row, len(PROMPTS[row]) + len(self.made[row]) - 1)


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest) -> Any:
    device_kinds.append(request.param)
    yield request.param
    device_kinds.pop()


pytestmark = pytest.mark.usefixtures("kind")


@pytest.mark.parametrize("depth", [1, 2])  # on a GPU steps are padded with 1
def test_chunks_and_decode_rows_go_on_where_they_were(hybrid: Hybrid, depth: int) -> None:
    steps = Steps.start(hybrid, depth=depth)
    steps.run(steps.prefill(0, 0, 10), steps.prefill(1, 0, 1))
    steps.run(
        steps.decode(1), steps.prefill(0, 10, 21, new=False), steps.prefill(2, 0, 33)
    )
    steps.run(
        steps.decode(0),
        steps.decode(1),
        steps.prefill(2, 33, 40, new=False),
        steps.prefill(3, 0, 5),
    )
    for _ in range(6):
        steps.run(*(steps.decode(row) for row in (2, 0, 3, 1)))
    lengths = {row: len(tokens) for row, tokens in steps.made.items()}
    assert lengths == {0: 8, 1: 9, 2: 7, 3: 7}
    for row, tokens in steps.made.items():
        assert tokens == hybrid.tokens(PROMPTS[row], len(tokens))


@pytest.mark.parametrize("first", [None, 0, 9])
def test_a_row_starts_from_a_kept_state(hybrid: Hybrid, first: int | None) -> None:
    """One that was saved behind a chunk, or inside one that starts at `first`, beside
    other chunks; and one saved in decode. Those that they were saved from go on, and a
    state is started from twice.
    """
    steps = Steps.start(hybrid)
    others = [steps.prefill(row, 0, len(PROMPTS[row])) for row in (0, 3)]
    if first is None:
        steps.run(steps.prefill(2, 0, 16), saves=(SaveState(0, steps.state(4)),))
        steps.run(steps.prefill(2, 16, 40, new=False))
    else:
        if first:
            steps.run(steps.prefill(2, 0, first))
        steps.run(
            others[0],
            steps.prefill(2, first, 40, new=not first),
            others[1],
            saves=(SaveState(1, steps.state(4), inside=16),),
        )
        assert steps.made[0] == hybrid.tokens(PROMPTS[0], 1)
    while len(steps.made[2]) < 8:  # its last input is then at 47
        steps.run(steps.decode(2))
    steps.run(steps.decode(2), saves=(SaveState(0, steps.state(5)),))
    for row in (0, 1):  # rows of the same tokens, on the same blocks
        prompt = PROMPTS[2] if row == 0 else PROMPTS[2] + tuple(steps.made[2][:8])
        new, start = steps.new_row(2, prompt, 0), 16 if row == 0 else 48
        prompt += (5, 9)  # behind which they are not the same
        # Blocks of its own for the tokens behind.
        blocks = (*new.tables[0][: start // BLOCK], *range(90, 98))[:BLOCKS]
        new = evolve(new, tables=(blocks, steps.state(row)), known=prompt)
        pages = zip(steps.state(4 + row), steps.state(row), strict=True)
        copies = tuple(Copy(source, target, BLOCK) for source, target in pages)
        steps.made[row] = []
        steps.run(
            steps.decode(2), Input(row, start, prompt[start:], new=new), copies=copies
        )
        while len(steps.made[row]) < 4:
            steps.run(Input(row, len(prompt) + len(steps.made[row]) - 1))
        assert steps.made[row] == hybrid.tokens(prompt, 4)
    assert steps.made[2] == hybrid.tokens(PROMPTS[2], len(steps.made[2]))


def test_a_row_opened_anew_starts_from_nothing(hybrid: Hybrid) -> None:
    """On the pages of the row before it, at position 0."""
    steps = Steps.start(hybrid)
    for prompt in (PROMPTS[0], PROMPTS[3], PROMPTS[1]):
        new = steps.new_row(0, prompt, 0)
        steps.made[0] = []
        steps.run(Input(0, 0, prompt, new=new))
        for _ in range(3):
            steps.run(Input(0, len(prompt) + len(steps.made[0]) - 1))
        assert steps.made[0] == hybrid.tokens(prompt, 4)


@pytest.mark.parametrize("depth", [1, 2])  # with 1, drafts and prompts are apart
def test_rejected_drafts_leave_no_trace(hybrid: Hybrid, depth: int) -> None:
    """Beside a row without drafts, and a prompt whose state is saved in the same plan:
    none, some and all of a row's drafts are right, in turn.
    """
    speculation = Speculation(drafter=HOST, drafts=4, adaptive=False)
    steps = Steps.start(hybrid, depth=depth, speculation=speculation)
    expected = {row: hybrid.tokens(PROMPTS[row], 18) for row in (0, 1)}
    steps.run(*(steps.prefill(row, 0, len(PROMPTS[row])) for row in (0, 1, 3)))

    def drafted(row: int, right: int, wrong: int) -> Input:
        made = len(steps.made[row])
        following = expected[row][made : made + right + wrong]
        flawed = [(token + 1) % VOCAB for token in following[right:]]
        return evolve(steps.decode(row), drafts=(*following[:right], *flawed))

    prompt = steps.prefill(2, 0, 16)
    saves = (SaveState(2, steps.state(4)),)
    steps.run(drafted(0, 1, 2), steps.decode(3), prompt, drafted(1, 0, 1), saves=saves)
    assert [len(steps.made[row]) for row in (0, 1, 3)] == [3, 2, 2]
    for right, wrong in ((4, 0), (0, 3), (2, 2)):
        steps.run(steps.decode(3), drafted(0, right, wrong), drafted(1, 1, 1))
    assert [len(steps.made[row]) for row in (0, 1, 3)] == [12, 8, 5]
    # The prompt goes on, and another row of it starts from what was saved.
    new, pages = (
        steps.new_row(2, PROMPTS[2], 0),
        zip(steps.state(4), steps.state(3), strict=True),
    )
    tables = (*new.tables[0][:2], *range(90, 96)), steps.state(3)
    copies = tuple(Copy(source, target, BLOCK) for source, target in pages)
    other = Input(3, 16, PROMPTS[2][16:], new=evolve(new, tables=tables))
    short = steps.made.pop(3)
    steps.run(drafted(0, 1, 1), steps.prefill(2, 16, 40, new=False), other, copies=copies)
    for row, tokens in steps.made.items():
        known = PROMPTS[2] if row == 3 else PROMPTS[row]
        assert tokens == hybrid.tokens(known, len(tokens))
    assert short == hybrid.tokens(PROMPTS[3], len(short))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_have_the_type_that_is_asked_for(dtype: str) -> None:
    hybrid = Hybrid(spec_of(state_dtype=dtype))
    steps = Steps.start(hybrid)
    cache = steps.executor.runner.cache
    assert cache.state(1).part("heads").pages.dtype is getattr(torch, dtype)
    assert cache.state(1).part("inputs").pages.dtype is torch.float32
    steps.run(steps.prefill(0, 0, 21))
    for _ in range(3):
        steps.run(steps.decode(0))
    differs = steps.made[0] != hybrid.tokens(PROMPTS[0], 4)
    assert dtype == "bfloat16" or not differs


def test_states_that_cannot_be_are_refused(hybrid: Hybrid) -> None:
    steps = Steps.start(hybrid)
    good = steps.plan([steps.prefill(0, 0, 21)])
    new = good.opens[0]
    short = evolve(new, tables=(new.tables[0], new.tables[1][:-1]))
    wrong: dict[str, dict[str, Any]] = {
        f"the working state of a row takes {steps.pages} pages": {"opens": (short,)},
        f"a state takes {steps.pages} pages": {"saves": (SaveState(0, (40,)),)},
        "rows of this model have 2 block table(s)": {"grows": (Grow(0, 1, (5,), 1),)},
    }
    for error, changes in wrong.items():
        steps.executor.launch(evolve(good, **changes))
        failed = steps.executor.collect()
        assert isinstance(failed, Failed)
        assert error in failed.error
    steps.run(steps.prefill(0, 0, 21))


def test_a_model_without_recurrent_layers_saves_nothing(hybrid: Hybrid) -> None:
    spec = evolve(hybrid.spec, layers=hybrid.spec.layers[:1])
    config = EngineConfig(num_blocks=9, max_num_seqs=2, vocab_size=VOCAB)
    executor = make_executor(config, spec, hybrid)  # type: ignore[arg-type]  # no step
    fill = PrefillTokens(0, (1,))
    new = opened(Request(id="x", prompt=(1,), max_tokens=3), (0,))
    plan = Plan(0, (0,), (0,), (0,), (1,), (1,), (fill,), (new,))
    executor.launch(evolve(plan, saves=(SaveState(0, (3,)),)))
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert "no recurrent layers to save" in failed.error
