"""What only a GPU shows: its memory, its graphs, and the same tokens whatever way they
are made.

Most of it can be tried without one: set DEVICE to "cpu".
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from torch import Tensor
from transformers import AutoModelForCausalLM

from minfer import LLM, SamplingParams
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.live.input_processing.input_processor import RequestError
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.memory import MemoryPlan, NotEnoughMemoryError
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer
from minfer.kernels import fused_linear
from minfer.kernels.flash import FlashWork
from minfer.kernels.gated import gated
from minfer.kernels.packages import FLASH, QUACK, missing
from minfer.records.messages import Discarded, Event, Execute, Preempted, Reason, Submit
from minfer.records.plan import Mask
from tests.effects.masking import MasksBy
from tests.effects.tiny_fallback import VOCAB, save
from tests.effects.tiny_families import VARIANTS
from tests.effects.tiny_families import save as save_family
from tests.effects.watched import Watched

DEVICE: str = "cuda"
CUDA: Final = torch.cuda.is_available()
ROOT: Final = Path(__file__).resolve().parents[3]
BLOCK: Final = 64
SMALL: Final[dict[str, Any]] = {
    "device": DEVICE,
    "block_size": BLOCK,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 256,
}

pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not CUDA, reason="needs a CUDA GPU")
only_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def memory_of_others() -> None:
    """Engines of earlier tests have given their memory back."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """Text that the bundled model knows something about."""
    paths = sorted((ROOT / "minfer" / "records").glob("*.py"))
    return Tokenizer(bundled_folder()).encode(
        "".join(p.read_text("utf-8") for p in paths)
    )


@pytest.fixture(scope="module")
def prompts(ids: list[int]) -> list[list[int]]:
    return [ids[500 * i : 500 * i + 8 + 37 * i % 180] for i in range(24)]


class TokenCounts:
    """What an engine did: its reasons, and how many rows its largest step had."""

    def __init__(self, llm: LLM) -> None:
        self.turns = Watched(llm)

    @property
    def reasons(self) -> list[Reason]:
        return [reason for turn in self.turns for reason in turn.reasons]

    @property
    def rows(self) -> int:
        commands = [command for turn in self.turns for command in turn.commands]
        plans = [command.plan for command in commands if isinstance(command, Execute)]
        return max((len(plan.rows) for plan in plans), default=0)

    def count(self, kind: type) -> int:
        return sum(isinstance(reason, kind) for reason in self.reasons)


def runner_of(llm: LLM) -> ModelRunner:
    """What runs an engine's model."""
    executor = llm.worker.driver.executor
    assert isinstance(executor, TorchExecutor)
    return executor.runner


def tokens(
    llm: LLM, prompts: list[list[int]], count: int = 32, **options: Any
) -> list[list[int]]:
    """What becomes of prompts, greedily unless told otherwise."""
    options = {"temperature": 0, "max_tokens": count, "ignore_eos": True, **options}
    outputs = llm.generate(prompts, SamplingParams(**options), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(
        prompts
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_are_scored_beside_others_that_are_not_held_to_it(
    ids: list[int], prompts: list[list[int]]
) -> None:
    reference_model = AutoModelForCausalLM.from_pretrained(
        bundled_folder(), dtype=torch.float32
    )
    scored = [ids[:600], ids[700:730]]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=4)
    with LLM(**SMALL, dtype="float32") as llm:
        solo = tokens(llm, prompts)
        all_params = [params] * 2 + [
            evolve(params, max_tokens=32, prompt_logprobs=None)
        ] * 24
        all_params = [evolve(each, ignore_eos=True) for each in all_params]
        outputs = llm.generate([*scored, *prompts], all_params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs[2:]] == solo
    for output, prompt in zip(outputs, scored, strict=False):
        right = reference_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for place, by_id in enumerate(output.prompt_logprobs[1:]):
            assert by_id is not None
            reported = torch.tensor([output.logprob for output in by_id.values()])
            expected = right[place, list(by_id)]
            assert torch.allclose(reported, expected, atol=2e-3), (
                f"at {place}: {reported}, {expected}"
            )


# --- the memory plan keeps what it promises ---------------------------------------------


def planned(**settings: Any) -> MemoryPlan:
    return prepare(EngineArgs(**settings)).memory


def test_the_largest_batch_of_the_plan_runs_together_and_one_more_is_served_too(
    ids: list[int],
) -> None:
    length, most_rows = 1024, {"max_num_seqs": 64, "enable_prefix_caching": False}
    bound: dict[str, Any] = {**most_rows, "device": DEVICE, "max_model_len": length}
    blocks: dict[str, Any] = {"num_gpu_blocks_override": 256}
    if DEVICE == "cuda":  # a share of the memory that comes to about as many blocks
        needs = planned(**bound, **blocks).total
        free, total = torch.cuda.mem_get_info()
        blocks = {"gpu_memory_utilization": (total - free + needs) / total}
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    with LLM(**bound, **blocks) as llm:
        plan = llm.setup.memory
        max_count = plan.largest_batch(length)
        assert max_count >= 2
        for count in (max_count, max_count + 1):
            token_counts = TokenCounts(llm)
            all_prompts = [ids[i : i + length - 80] for i in range(count)]
            assert len(tokens(llm, all_prompts, 80)) == count
            if count == max_count:
                assert (token_counts.rows, token_counts.count(Preempted)) == (
                    max_count,
                    0,
                )
            else:
                assert token_counts.rows == max_count or token_counts.count(Preempted)
            assert not [
                reason.error
                for reason in token_counts.reasons
                if isinstance(reason, Discarded)
            ]
    if DEVICE == "cuda":
        assert torch.cuda.max_memory_reserved() - before <= plan.total


def test_the_largest_context_of_the_plan_runs_and_one_more_token_is_refused(
    ids: list[int],
) -> None:
    small_engine: dict[str, Any] = {"device": DEVICE, "num_gpu_blocks_override": 20}
    longest = planned(**small_engine, max_model_len=BLOCK).largest_context
    assert longest == 20 * BLOCK + 1
    with LLM(**small_engine, max_model_len=longest) as llm:
        assert len(tokens(llm, [ids[: longest - 8]], 8)[0]) == 8
        with pytest.raises(RequestError, match=f"{longest}"):
            tokens(llm, [ids[:longest]], 1)  # which makes one more
    with pytest.raises(NotEnoughMemoryError, match=f"use --max-model-len {longest},"):
        planned(**small_engine, max_model_len=longest + 1)


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4, 5])
def test_out_of_memory_in_any_forward_costs_only_its_step(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    settings = SMALL | {"enable_prefix_caching": False, "enforce_eager": True}
    with LLM(dtype="float32", **settings) as llm:
        expected = tokens(llm, prompts)
    with LLM(dtype="float32", **settings) as llm:
        runner: ModelRunner = runner_of(llm)
        model, calls = runner.step.model, 0

        def scarce(*arguments: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise torch.OutOfMemoryError("CUDA out of memory")
            hidden: Tensor = model(*arguments)
            return hidden

        monkeypatch.setattr(runner.step, "model", scarce)
        token_counts = TokenCounts(llm)
        assert tokens(llm, prompts) == expected
        assert calls >= failing_call
        voided = [
            reason.error
            for reason in token_counts.reasons
            if isinstance(reason, Discarded)
        ]
        assert len(voided) == 1
        assert "CUDA out of memory" in voided[0]


@only_cuda
def test_memory_of_another_process_costs_only_a_step(
    ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is captured as a graph has its memory already.
    settings = SMALL | {"max_num_batched_tokens": 8192, "enforce_eager": True}
    all_prompts = [ids[i : i + 1000] for i in range(8)]
    with LLM(dtype="float32", enable_prefix_caching=False, **settings) as llm:
        executor, total = llm.worker.driver.executor, torch.cuda.mem_get_info()[1]
        collect = executor.collect

        def collected() -> Any:
            result = collect()
            torch.cuda.set_per_process_memory_fraction(1.0)  # it is given back
            return result

        monkeypatch.setattr(executor, "collect", collected)
        token_counts = TokenCounts(llm)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            outputs = tokens(llm, all_prompts)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        voided = [
            reason.error
            for reason in token_counts.reasons
            if isinstance(reason, Discarded)
        ]
        assert len(voided) == 1
        assert "out of memory" in voided[0]
        assert outputs == tokens(llm, all_prompts)


# --- the loop neither waits nor takes memory --------------------------------------------


def test_an_engine_opens_while_another_captures_its_graphs(
    prompts: list[list[int]],
) -> None:
    """Waiting for a whole device spoils what is captured on it."""
    with LLM(**SMALL) as first:
        expected = tokens(first, prompts[:4])
        time.sleep(0.3)  # it rests, and captures what is left
        for _ in range(2):
            with LLM(**SMALL) as second:
                assert tokens(second, prompts[:4]) == expected
                assert runner_of(second).shortcuts.graphs is CUDA
        assert tokens(first, prompts[:4]) == expected
        assert runner_of(first).shortcuts.graphs is CUDA


def test_a_checked_decode_has_nothing_to_complain_of(prompts: list[list[int]]) -> None:
    with LLM(check_steps=True, **SMALL) as llm:
        token_counts = TokenCounts(llm)
        tokens(llm, prompts)
        tokens(llm, prompts, temperature=0.8)
        tokens(llm, prompts, temperature=0.8, top_p=0.9, top_k=40)
        tokens(llm, prompts, temperature=0.8, min_p=0.1)
        tokens(llm, prompts, temperature=0.8, top_k=40, logprobs=5)
        assert not [
            reason.error
            for reason in token_counts.reasons
            if isinstance(reason, Discarded)
        ]


@only_cuda
@pytest.mark.parametrize(
    ("fault", "emitted"), [("memory", "took memory"), ("wait", "synchroniz")]
)
def test_a_check_finds_what_it_is_for(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, fault: str, emitted: str
) -> None:
    with LLM(check_steps=True, dtype="float32", **SMALL) as llm:
        runner = runner_of(llm)
        solo = [prompts[3]]
        expected = tokens(llm, solo)

        replays = iter(range(100))

        class Faulty:
            def __init__(self, graph: Any) -> None:
                self.graph = graph

            def replay(self) -> None:
                self.graph.replay()
                # A step that fails is done again, by this graph or by another.
                if next(replays) % 2:
                    return
                if fault == "wait":
                    runner.sampler.out[:1].item()
                else:
                    torch.empty(1 << 20, device=DEVICE)

        graphs = runner.captures.graphs
        faulty = OrderedDict(
            (kind, graph if kind.tokens else Faulty(graph))
            for kind, graph in graphs.items()
        )
        monkeypatch.setattr(runner.captures, "graphs", faulty)
        token_counts = TokenCounts(llm)
        assert tokens(llm, solo) == expected
        errors = [
            reason.error
            for reason in token_counts.reasons
            if isinstance(reason, Discarded)
        ]
        assert errors
        assert all(emitted in error for error in errors)
        monkeypatch.setattr(runner.captures, "graphs", graphs)
        assert tokens(llm, solo) == expected


# --- the same tokens --------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model in float32, where minfer's is."""
    read: Any = AutoModelForCausalLM.from_pretrained
    return read(bundled_folder(), dtype=torch.float32).to(DEVICE).eval()


@pytest.fixture(scope="module")
def expected(theirs: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy continuations, one by one."""
    options = {
        "max_new_tokens": 32,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    inputs = [torch.tensor([prompt], device=DEVICE) for prompt in prompts]
    generated = [
        theirs.generate(x, attention_mask=torch.ones_like(x), **options) for x in inputs
    ]
    return [
        out[0, len(prompt) :].tolist()
        for out, prompt in zip(generated, prompts, strict=True)
    ]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("depth", [1, 2])
def test_float32_tokens_are_those_of_transformers(
    prompts: list[list[int]], expected: list[list[int]], eager: bool, depth: int
) -> None:
    settings = {**SMALL, "enforce_eager": eager, "steps_in_flight": depth}
    with LLM(dtype="float32", **settings) as llm:
        for _ in range(2):  # the second time with graphs of mixed steps, and prefix hits
            assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_float32_log_probabilities_are_those_of_transformers(
    prompts: list[list[int]], expected: list[list[int]], theirs: Any, eager: bool
) -> None:
    """Within 1e-3, where neighbours ask for none; products are IEEE's, sums in another
    order.
    """
    requested = [(None, 0, 4, 20)[i % 4] for i in range(len(prompts))]
    params = [
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=k)
        for k in requested
    ]
    with LLM(dtype="float32", **SMALL, enforce_eager=eager) as llm:
        for _ in range(2):  # the second time with graphs of mixed steps
            outputs = [
                o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)
            ]
            assert [list(output.token_ids) for output in outputs] == expected
            for prompt, k, output in zip(prompts, requested, outputs, strict=True):
                assert (output.logprobs is None) == (k is None)
                with torch.inference_mode():
                    ids = torch.tensor([[*prompt, *output.token_ids]], device=DEVICE)
                    exact = (
                        theirs(ids)
                        .logits[0, len(prompt) - 1 : -1]
                        .double()
                        .log_softmax(-1)
                    )
                scored = zip(
                    output.token_ids,
                    exact.cpu(),
                    output.logprobs or (),
                    strict=k is not None,
                )
                for token, row, by_id in scored:
                    assert by_id[token].rank == 1
                    assert len(by_id) == max(k or 0, 1)
                    for token_id, entry in by_id.items():
                        assert entry.logprob == pytest.approx(
                            float(row[token_id]), abs=1e-3
                        )


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_deferred_rows_sample_the_same(
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    eager: bool,
) -> None:
    """Every second one; then with masks that allow one token each."""
    with LLM(dtype="float32", **SMALL, enforce_eager=eager) as llm:
        driver = llm.worker.driver
        post, count = driver.post, 0

        def bound(event: Event) -> None:
            nonlocal count
            if isinstance(event, Submit):
                count += 1
                event = Submit(evolve(event.request, needs_host_mask=count % 2 == 1))
            post(event)

        monkeypatch.setattr(driver, "post", bound)
        token_counts = TokenCounts(llm)
        for _ in range(2):  # the second time with graphs of mixed steps, and prefix hits
            assert tokens(llm, prompts) == expected
        only = (1 << 77).to_bytes(10, "little")
        driver.deferred.masks = MasksBy(
            lambda plan: tuple(Mask(i, only) for i in plan.deferred)
        )
        forced = tokens(llm, prompts)
        assert forced[1::2] == expected[1::2]
        assert {token for row in forced[::2] for token in row} == {77}
        assert not token_counts.count(Discarded)


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text"])
def test_a_model_of_transformers_gives_the_tokens_that_it_gives_on_the_cpu(
    kind: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    all_prompts = [
        [(7 * i + j * j) % (VOCAB - 1) + 1 for j in range(3 + 5 * i)] for i in range(9)
    ]
    settings = SMALL | {
        "block_size": 16,
        "max_num_batched_tokens": 24,
        "dtype": "float32",
    }
    outputs = []
    for device in (DEVICE, "cpu"):
        with LLM(
            str(tmp_path), skip_tokenizer_init=True, **(settings | {"device": device})
        ) as llm:
            outputs.append(tokens(llm, all_prompts, 24, temperature=1.0))
    assert outputs[0] == outputs[1]
    assert len({token for row in outputs[0] for token in row}) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_several_residual_streams_are_computed_in_graphs(
    dtype: str, tmp_path: Path
) -> None:
    """Of Gemma 3n, as launched one by one: in float32 as on the CPU."""
    save_family(str(tmp_path), "Gemma3n", VARIANTS["Gemma3n", "all"])
    all_prompts = [[(7 * i + j * j) % 160 for j in range(3 + 5 * i)] for i in range(9)]
    settings = SMALL | {
        "block_size": 16,
        "max_num_batched_tokens": 24,
        "dtype": dtype,
        "skip_tokenizer_init": True,
    }
    graphs = settings | {"check_steps": True}
    others = settings | {"enforce_eager": True}
    if dtype == "float32":
        others |= {"device": "cpu"}
    outputs = []
    for engine in (graphs, others):
        with LLM(str(tmp_path), **engine) as llm:
            token_counts = TokenCounts(llm)
            outputs.append(tokens(llm, all_prompts, 24))
            assert not token_counts.count(Discarded)
    assert outputs[0] == outputs[1]
    assert len({token for row in outputs[0] for token in row}) > 10


PROCESS: Final = """
import json, sys
from minfer import LLM, SamplingParams
settings, prompts = json.load(sys.stdin)
params = [
    SamplingParams(
        temperature=0.8,
        top_p=0.9 + 0.1 * (i % 2),
        seed=i,
        max_tokens=48,
        ignore_eos=True,
        logprobs=i % 4 or None,
    )
    for i in range(len(prompts))
]
with LLM(**settings) as llm:
    found = llm.generate(prompts, params, use_tqdm=False)
    outputs = [output.outputs[0] for output in found]
scores = [[[[i, found.rank, found.logprob.hex()] for i, found in by_id.items()]
           for by_id in one.logprobs or ()] for one in outputs]
print(json.dumps([[one.token_ids for one in outputs], scores]))
"""


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_two_processes_give_the_same_bits(prompts: list[list[int]], eager: bool) -> None:
    """Tokens and log-probabilities."""
    job, outputs = json.dumps([SMALL | {"enforce_eager": eager}, prompts]), []
    for _ in range(2):
        command = [sys.executable, "-c", PROCESS]
        finished = subprocess.run(
            command, input=job, cwd=ROOT, capture_output=True, text=True, check=True
        )
        outputs.append(json.loads(finished.stdout.splitlines()[-1]))
    assert outputs[0] == outputs[1]
    drawn, scores = outputs[0]
    assert [len(row) for row in drawn] == [48] * len(prompts)
    assert [len(row) for row in scores] == [48 * bool(i % 4) for i in range(len(prompts))]
    assert len({tuple(row) for row in drawn}) == len(prompts)


AHEAD = """
import json, sys
from triton import knobs
from minfer import LLM, SamplingParams

late = []
with LLM(**json.load(sys.stdin)) as llm:
    knobs.runtime.jit_post_compile_hook = lambda **told: late.append(told["fn"].name)
    for how in ({"temperature": 0}, {"top_p": 0.9}, {"logprobs": 2, "top_k": 4}):
        for sizes in ((40,), (3,), (200, 7, 30), (1,) * 20):
            short = SamplingParams(max_tokens=4, **how)
            prompts = [[*range(40, 40 + size)] for size in sizes]
            llm.generate(prompts, short, use_tqdm=False)
print(json.dumps(late))
"""


@only_cuda
def test_requests_find_their_kernels_compiled(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", AHEAD],
        input=json.dumps(SMALL),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert any(tmp_path.iterdir())
    assert json.loads(finished.stdout.splitlines()[-1]) == []


# --- every way of attention, and of products --------------------------------------------

COUNT, LENGTH = 16, 256  # texts and their tokens
# Inputs of a chunk, ranges that contexts are cut into, which package serves them.
WAYS: Final = {
    "Triton, chunks": (96, 1, ""),
    "Triton, decode": (1, 1, ""),
    "Triton, split decode": (1, 4, ""),
    "flash-attn, chunks": (96, 1, FLASH),
    "quack, gate and up": (96, 1, QUACK),
}


@pytest.fixture(scope="module")
def exact(theirs: Any, ids: list[int]) -> Tensor:
    """transformers' log-probabilities in float32, [COUNT, LENGTH, vocab]."""
    with torch.inference_mode():
        texts = torch.tensor(ids[: COUNT * LENGTH], device=DEVICE).view(COUNT, LENGTH)
        logprobs: Tensor = theirs(texts).logits.double().log_softmax(-1)
    return logprobs


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Argument aux_data"
)  # flash-attn's
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_distributions_are_those_of_float32(
    exact: Tensor, ids: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, splits, package = WAYS[way]
    if package and (reason := missing(package, torch.bfloat16, torch.device(DEVICE))):
        pytest.skip(reason)
    monkeypatch.setattr(fused_linear, "is_gated_faster", lambda *_: True)
    with (
        LLM(dtype="bfloat16", **SMALL) as llm,
        patch.object(fused_linear, "gated", wraps=gated) as used,
    ):
        runner = runner_of(llm)
        logprobs = forced(runner, ids, chunk, splits, package).double().log_softmax(-1)
    assert used.called == (package == QUACK)
    divergence = (exact.exp() * (exact - logprobs)).sum(-1).mean()
    same = (exact.argmax(-1) == logprobs.argmax(-1)).double().mean()
    assert divergence < 0.0005  # nats
    assert same > 0.98


def forced(
    runner: ModelRunner, ids: list[int], chunk: int, splits: int, package: str
) -> Tensor:
    """Logits [COUNT, LENGTH, vocab] of given texts, a chunk of each at a time."""
    chunk_length, pieces = LENGTH // BLOCK, list[Tensor]()
    backend = runner.backend
    cache = backend.make_cache(runner.spec, COUNT * chunk_length, BLOCK, LENGTH)
    for start in range(0, LENGTH, chunk):
        size = min(chunk, LENGTH - start)
        rows = []
        for i in range(COUNT):
            position = i * LENGTH + start
            rows.append(
                BatchRow(
                    ids[position : position + size],
                    start,
                    range(i * chunk_length, (i + 1) * chunk_length),
                    size,
                )
            )
        batch = make_batch(rows, BLOCK, backend.device)
        batch = evolve(batch, splits=(splits,), fused=package == QUACK)
        if package == FLASH:
            chunks = batch.chunks
            assert chunks is not None
            four = chunks.rows, chunks.starts, chunks.counts, batch.table
            work = FlashWork.of(*four, size)
            batch = evolve(batch, chunks=evolve(chunks, flash=(work,)))
        with torch.inference_mode():
            pieces.append(runner.step.model(batch, cache).view(COUNT, size, -1))
    return torch.cat(pieces, 1)
