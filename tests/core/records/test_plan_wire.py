"""Plans and results cross as bytes: nothing is lost, nothing else is taken, and an
executor may be another process.
"""

import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import IO

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minfer.engine import step
from minfer.journal.codec import load
from minfer.records import plan_wire
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Event, Execute, Executed, Failed, Submit, Tick
from minfer.records.plan import (
    Copy,
    Draft,
    Grow,
    Mask,
    NewRow,
    Plan,
    PrefillTokens,
    SampleDeferred,
    SaveState,
)
from minfer.records.plan_wire import (
    WireError,
    deferred_from,
    deferred_to,
    plan_from,
    plan_to,
)
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import initial
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.reference_sampler import RowSampling
from minfer.simulation.oracle import Oracle
from tests.core.recorded import recorded

NUMBERS = st.integers(0, 2**40)
COLUMN = st.lists(NUMBERS, max_size=5).map(tuple)
NAMES = st.tuples(st.text(max_size=5), st.integers(0, 127))
SAMPLINGS = st.builds(
    RowSampling,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 2**31),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
    repetition_penalty=st.floats(0.01, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    min_tokens=st.integers(0, 2**31),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 2**31), st.floats(-100, 100)), max_size=3
    ).map(tuple),
    allowed_token_ids=st.none() | COLUMN,
    bad_words=st.lists(COLUMN, max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
    sample=st.integers(0, 127),
    stop_ids=st.frozensets(st.integers(0, 2**32 - 1), max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
OPENS = st.builds(
    NewRow,
    index=NUMBERS,
    name=NAMES,
    known=COLUMN,
    prompt=NUMBERS,
    last_index=NUMBERS,
    sampling=SAMPLINGS,
    tables=st.lists(COLUMN, min_size=1, max_size=3).map(tuple),
    adapter_slot=st.integers(-1, 1000),
    pooling=st.sampled_from(("", "last", "mean")),
)
PLANS = st.builds(
    Plan,
    step=NUMBERS,
    run_ids=COLUMN,
    rows=COLUMN,
    starts=COLUMN,
    num_scheduled_tokens=COLUMN,
    max_sampled_tokens=COLUMN,
    fills=st.lists(st.builds(PrefillTokens, NUMBERS, COLUMN), max_size=3).map(tuple),
    opens=st.lists(OPENS, max_size=3).map(tuple),
    grows=st.lists(st.builds(Grow, NUMBERS, NUMBERS, COLUMN, NUMBERS), max_size=3).map(
        tuple
    ),
    copies=st.lists(st.builds(Copy, NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple),
    drafts=st.lists(st.builds(Draft, NUMBERS, COLUMN), max_size=3).map(tuple),
    deferred=COLUMN,
    saves=st.lists(st.builds(SaveState, NUMBERS, COLUMN, NUMBERS), max_size=3).map(tuple),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = st.builds(
    TokenLogprobs,
    NUMBERS,
    FLOATS,
    NUMBERS,
    COLUMN,
    st.lists(FLOATS, max_size=4).map(tuple),
)
RESULTS = st.builds(
    Executed,
    NUMBERS,
    st.lists(COLUMN, max_size=4).map(tuple),
    st.lists(st.lists(LOGPROBS, max_size=2).map(tuple), max_size=3).map(tuple),
    st.lists(st.binary(max_size=9), max_size=3).map(tuple),
)


@pytest.mark.long
@given(PLANS)
def test_a_plan_comes_over_as_it_is(plan: Plan) -> None:
    assert plan_from(plan_to(plan)) == plan


@given(
    NUMBERS,
    st.lists(st.builds(Mask, NUMBERS, st.binary(max_size=9), NUMBERS), max_size=3),
)
def test_masks_come_over_as_they_are(number: int, masks: list[Mask]) -> None:
    separate = SampleDeferred(number, tuple(masks))
    assert deferred_from(deferred_to(separate)) == separate


def test_plans_of_a_hostile_world_come_over_as_they_are() -> None:
    seen = 0
    for turn in recorded(1)[1]:
        for command in turn.transition.commands:
            if isinstance(command, Execute):
                assert plan_from(plan_to(command.plan)) == command.plan
                seen += 1
    assert seen > 20


def test_a_steady_plan_is_its_columns_and_little_else() -> None:
    rows = tuple(range(256))
    plan = Plan(7, rows, rows, rows, (1,) * 256, (1,) * 256)
    assert len(plan_to(plan)) < 8 * 5 * 256 + 200


@pytest.mark.parametrize("read", [plan_from, deferred_from])
@given(st.binary(max_size=64))
def test_other_bytes_are_refused_or_mean_something(read: object, data: bytes) -> None:
    assert callable(read)
    with suppress(WireError):
        read(data)


def test_bytes_that_are_cut_off_are_refused() -> None:
    plan = Plan(7, (1,), (2,), (3,), (1,), (1,), (PrefillTokens(0, (5, 6, 7)),))
    data = plan_to(plan)
    for end in range(len(data)):
        with pytest.raises(WireError, match="no plan"):
            plan_from(data[:end])


def test_as_many_rows_are_described_as_are_opened() -> None:
    words = plan_wire._WordReader(array("q", [1]))
    with pytest.raises(ValueError, match="1 rows are opened, of which 0"):
        tuple(plan_wire._opens_from(words, ()))


def test_a_section_is_of_the_words_that_are_left() -> None:
    reader = plan_wire._WordReader(array("q", [7, 7, 7, 9]))
    assert reader.take(3) == (7, 7, 7)
    with pytest.raises(ValueError, match="a section of 2 words"):
        reader.take(2)
    assert reader.one() == 9


# --- an executor in another process -----------------------------------------------------

FAR: str = """
import json, sys
from minfer.simulation.oracle import Oracle
from minfer.journal.codec import dump
from minfer.records.plan_wire import deferred_from, plan_from

block_size, vocab = map(int, sys.argv[1:])
oracle = Oracle(block_size, vocab)
source, sink = sys.stdin.buffer, sys.stdout.buffer
while kind := source.read(1):
    data = source.read(int.from_bytes(source.read(4), "little"))
    if kind == b"P":
        oracle.launch(plan_from(data))
    elif kind == b"S":
        oracle.sample(deferred_from(data))
    else:
        told = json.dumps(dump(oracle.collect())).encode()
        sink.write(len(told).to_bytes(4, "little") + told)
        sink.flush()
"""


class Far:
    """An oracle in another process, to which plans and from which results
    cross as bytes.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self.source = source
        self.sink = sink
        self.waiting = 0  # plans whose results were not asked for

    def _say(self, kind: bytes, data: bytes = b"") -> None:
        self.sink.write(kind + len(data).to_bytes(4, "little") + data)
        self.sink.flush()

    def launch(self, plan: Plan) -> None:
        self.waiting += 1
        self._say(b"P", plan_to(plan))
        if plan.deferred:
            self._say(b"S", deferred_to(SampleDeferred(plan.step)))

    def collect(self) -> Executed | Failed:
        self.waiting -= 1
        self._say(b"C")
        size = int.from_bytes(self.source.read(4), "little")
        results: Executed | Failed = load(json.loads(self.source.read(size)))
        return results


@contextmanager
def far_oracle(config: EngineConfig) -> Iterator[Far]:
    sizes = str(config.block_size), str(config.vocab_size)
    command = [sys.executable, "-c", FAR, *sizes]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Far(process.stdout, process.stdin)
        process.stdin.close()
        assert process.wait() == 0


class Near:
    """An oracle in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.oracle = Oracle(config.block_size, config.vocab_size)

    @property
    def waiting(self) -> int:
        return len(self.oracle.plans)

    def launch(self, plan: Plan) -> None:
        self.oracle.launch(plan)
        if plan.deferred:
            self.oracle.sample(SampleDeferred(plan.step))

    def collect(self) -> Executed | Failed:
        return self.oracle.collect()


def served(
    config: EngineConfig, executor: Far | Near, requests: list[Request]
) -> dict[SampleId, tuple[int, ...]]:
    """What an engine over this executor makes of requests."""
    state = initial(config)
    inbox: list[Event] = [Submit(request) for request in requests]
    out: dict[SampleId, tuple[int, ...]] = {}
    for number in range(1000):
        results = (executor.collect(),) if executor.waiting else ()
        turn = step(config, state, (Tick(float(number)), *results, *inbox))
        inbox, state = [], turn.state
        for command in turn.commands:
            if isinstance(command, Execute):
                executor.launch(command.plan)
            elif isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    out[name] = out.get(name, ()) + tokens
        if not state.requests and not executor.waiting:
            return out
    raise AssertionError("never drained")


@pytest.mark.long
def test_an_oracle_in_another_process_gives_the_same_tokens() -> None:
    config = EngineConfig(
        num_blocks=24,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        vocab_size=1000,
        max_num_batched_tokens=16,
    )
    rng = Random(5)
    requests = [
        Request(
            id=f"r{number}",
            prompt=tuple(rng.randrange(50) for _ in range(rng.randint(1, 20))),
            max_tokens=rng.randint(1, 30),
            n=rng.choice((1, 1, 2)),
            needs_host_mask=number % 3 == 0,
        )
        for number in range(12)
    ]
    near = served(config, Near(config), requests)
    with far_oracle(config) as far:
        assert served(config, far, requests) == near
    assert sum(map(len, near.values())) > 100
