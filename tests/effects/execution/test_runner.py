"""The model runner: what is compiled ahead, what packages are given, and two of them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, evolve, field

from minfer.effects.execution.open_backend import open_backend
from minfer.effects.execution.packing.pack_plan import Packer
from minfer.effects.execution.packing.read_back import HostSlot, SlotRing, results
from minfer.effects.execution.running import shortcuts
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.kernels.packages import FLASH
from minfer.records.config import EngineConfig
from minfer.records.plan import Plan, PrefillTokens
from minfer.records.request import Request, SamplingParams
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import (
    CUDA,
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    on_device,
    requests,
    serve_by_packages,
)
from tests.effects.tiny_model import with_attention, with_feed_forward, with_windows
from tests.kernels.test_flash import stand_in

on_gpu = pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
pytestmark = pytest.mark.usefixtures("device_kind")


@pytest.mark.long
@on_gpu
def test_flash_attn_is_given_what_it_needs(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its stand-in: one chunk and several, from the beginning and from later on."""
    calls = set[tuple[bool, bool]]()

    def attend(*arguments: Any, **keywords: Any) -> None:
        counts = keywords["cu_seqlens_q"].diff()
        calls.add((len(counts) > 1, bool((keywords["seqused_k"] > counts).any())))
        stand_in(*arguments, **keywords)

    run = Run.start(model)
    executor: Any = run.driver.executor
    serve_by_packages(executor.runner, monkeypatch, flash_from=2)
    monkeypatch.setattr(shortcuts, "load", lambda _: "")
    monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=attend))
    assert run.serve(requests(0)) == reference
    request = Request(
        id="x", prompt=tuple(range(3, 83)), max_tokens=3, sampling=GREEDY
    )  # in two steps
    assert run.serve([request])["x", 0] == model.expected(request)
    assert {(False, False), (False, True), (True, False)} <= calls


# --- two in a process -------------------------------------------------------------------

PROMPTS = ((3, 4, 5), (9,) * 11, (17, 2))
TURNS = 12


@define
class Solo:
    """A runner by itself: what an executor does for it, without plans of an engine."""

    runner: ModelRunner
    packer: Packer
    ring: SlotRing
    starts: list[int] = field(factory=list)
    out: list[tuple[int, ...]] = field(factory=list)

    @classmethod
    def open(cls, spec: ModelSpec, weights: Weights, device_kind: str) -> "Solo":
        device = torch.device("cuda" if CUDA and device_kind == "cuda" else "cpu")
        backend = open_backend(spec, CONFIG, device, kernels=device_kind == "cuda")
        runner = ModelRunner(backend, spec, weights, CONFIG)
        ring = SlotRing(4, runner.max_words, runner.lines, device)
        return cls(runner, Packer(runner.rows, runner.padded), ring)

    def begin(self) -> None:
        """Give each prompt a row, and draw after it."""
        rows = tuple(range(len(PROMPTS)))
        counts = tuple(map(len, PROMPTS))
        opens = [
            evolve(opened(self._request(i), tuple(range(8 * i, 8 * i + 8))), index=i)
            for i in rows
        ]
        fills = tuple(PrefillTokens(i, prompt) for i, prompt in enumerate(PROMPTS))
        zeros, all_ones = (0,) * len(rows), (1,) * len(rows)
        self.starts = list(counts)
        self._run(Plan(0, rows, rows, zeros, counts, all_ones, fills, tuple(opens)))

    def go_on(self) -> None:
        """Each row feeds itself."""
        rows = tuple(range(len(PROMPTS)))
        all_ones = (1,) * len(rows)
        self._run(Plan(1, rows, rows, tuple(self.starts), all_ones, all_ones))
        self.starts = [start + 1 for start in self.starts]

    @staticmethod
    def _request(i: int) -> Request:
        sampling = GREEDY if i % 2 else SamplingParams(temperature=0.8, top_p=0.9)
        return Request(
            id=str(i), prompt=PROMPTS[i], max_tokens=TURNS, sampling=sampling, seed=i
        )

    def _run(self, plan: Plan) -> None:
        with torch.inference_mode(), torch.cuda.stream(self.runner.stream):
            self.runner.apply_changes(plan)
            slots = list[HostSlot]()
            for forward in self.packer.forwards(plan):
                slots.append(self.ring.next())
                self.runner.run(forward, slots[-1])
        outputs = results(plan, slots, VOCAB)
        self.out += [tuple(token for (token,) in outputs.yields)]


CONFIG = EngineConfig(
    num_blocks=64,
    block_size=8,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
)


@pytest.mark.long
def test_two_runners_in_a_process_give_what_each_gives_by_itself(
    model: Model, device_kind: str
) -> None:
    """A target and a smaller model of the same vocabulary, in turns."""
    narrow = with_windows(evolve(model.spec, hidden_size=16), None)
    attending = with_attention(narrow, hidden_size=16, heads=2, kv_heads=1)
    smaller = with_feed_forward(attending, hidden_size=16, intermediate_size=24)
    draft = random_weights(evolve(smaller, initializer_range=0.4), "float32", 1)
    models = [(model.spec, on_device(model.weights)), (smaller, on_device(draft))]
    outputs = []
    for spec, weights in models:
        solo = Solo.open(spec, weights, device_kind)
        solo.begin()
        for _ in range(TURNS - 1):
            solo.go_on()
        outputs.append(solo.out)
    solos = [Solo.open(spec, weights, device_kind) for spec, weights in models]
    for solo in solos:
        solo.begin()
    for _ in range(TURNS - 1):
        for solo in solos:
            solo.go_on()
    assert [solo.out for solo in solos] == outputs
    assert outputs[0] != outputs[1]
    for i in range(len(PROMPTS)):
        expected = model.expected(Solo._request(i))
        assert [tokens[i] for tokens in outputs[0]] == expected
