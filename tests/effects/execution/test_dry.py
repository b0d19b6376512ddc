"""The dry executor keeps an executor's contract, and its text depends on request and
position.
"""

from typing import Any

import pytest

from minfer.effects.execution.dry_executor import PASSAGE, DryExecutor, encoded_passage
from minfer.effects.live.engine.driver import Driver
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Executed, Submit, Tick
from minfer.records.plan import Plan
from minfer.records.request import Request, SamplingParams, row_sampling
from minfer.records.state import Turn
from minfer.simulation.oracle import Oracle
from tests.core.recorded import Seen

SENTENCES = ((10, 11, 12), (20, 21), (30,))
STOP = 99


def serve(
    dry: DryExecutor, requests: list[Request], **sizes: int
) -> dict[tuple[str, int], list[int]]:
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 64}
    settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "vocab_size": 100}
    config = EngineConfig(**(settings | sizes))
    driver = Driver(config, dry)
    for request in requests:
        driver.post(Submit(request))
    out: dict[tuple[str, int], list[int]] = {}
    for _ in range(2000):
        if not driver.busy:
            driver.close()
            return out
        for command in driver.turn().commands:
            if isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    out.setdefault(name, []).extend(tokens)
    raise AssertionError("the requests did not end")


def wanted(dry: DryExecutor, request: Request, sample: int) -> list[int]:
    out: list[int] = []
    for place in range(request.max_tokens):
        position = len(request.prompt) + place
        out.append(
            dry.token(row_sampling(request, sample), len(request.prompt), position)
        )
        if out[-1] in request.stop_ids:
            break
    return out


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_schedule_gives_the_same_tokens(num_blocks: int, depth: int) -> None:
    dry = DryExecutor(SENTENCES)
    requests = [
        Request(
            id=f"r{i}",
            prompt=tuple(range(1 + 5 * i)),
            max_tokens=3 + 4 * i,
            n=1 + i % 2,
            seed=i,
            stop_ids=frozenset({STOP} if i % 2 else ()),
        )
        for i in range(6)
    ]
    tokens = serve(dry, requests, num_blocks=num_blocks, depth=depth)
    assert tokens == {
        (r.id, sample): wanted(dry, r, sample) for r in requests for sample in range(r.n)
    }


def test_it_reads_the_passage_from_a_sentence_that_seed_and_sample_choose() -> None:
    request = Request(id="r", prompt=(1,), max_tokens=7, seed=1, n=2)
    tokens = serve(DryExecutor(SENTENCES), [request])
    assert tokens["r", 0] == [20, 21, 30, 10, 11, 12, 20]
    assert tokens["r", 1] == [30, 10, 11, 12, 20, 21, 30]


def test_greedy_requests_read_from_the_beginning() -> None:
    greedy = SamplingParams(temperature=0)
    request = Request(id="r", prompt=(1,), max_tokens=3, seed=1, sampling=greedy)
    assert serve(DryExecutor(SENTENCES), [request])["r", 0] == [10, 11, 12]


def test_a_request_that_may_stop_does_at_the_end_of_the_passage() -> None:
    request = Request(id="r", prompt=(1,), max_tokens=50, stop_ids=frozenset({STOP}))
    assert serve(DryExecutor(SENTENCES), [request])["r", 0] == [
        10,
        11,
        12,
        20,
        21,
        30,
        STOP,
    ]


def test_the_built_in_passage_is_encoded_by_sentence() -> None:
    encoded = encoded_passage(lambda text: list(text.encode()))
    assert [bytes(sentence).decode() for sentence in encoded] == list(PASSAGE)
    assert encoded_passage(lambda _: []) == ()


def test_an_empty_passage_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        DryExecutor([(), ()])


# --- the driver -------------------------------------------------------------------------


def test_results_come_before_what_waited() -> None:
    driver = Driver(
        EngineConfig(num_blocks=8, block_size=4, vocab_size=100), Oracle(4, 100)
    )
    for name in "ab":
        driver.post(Submit(Request(id=name, prompt=(1, 2), max_tokens=9)))
        driver.turn()
    assert [type(event) for event in driver.last_events] == [Tick, Executed, Submit]


def test_a_turn_is_recorded_before_its_commands_are_performed() -> None:
    order: list[str] = []

    class Launching(Oracle):
        def launch(self, plan: Plan) -> None:
            order.append("launch")
            super().launch(plan)

    class Recording(Seen):
        def __call__(self, turn: Turn) -> None:
            order.append("record")
            super().__call__(turn)

    config = EngineConfig(num_blocks=8, block_size=4, vocab_size=100, depth=1)
    driver = Driver(config, Launching(4, 100), record=Recording())
    driver.post(Submit(Request(id="a", prompt=(1, 2), max_tokens=9)))
    driver.turn()
    assert order == ["record", "launch"]
