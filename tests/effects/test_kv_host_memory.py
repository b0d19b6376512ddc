"""KV blocks in host memory, in an engine: the same tokens, by loads and by computing."""

import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.execution.tiers import paged_tensors
from minfer.effects.execution.tiers.host_pages import HostPages
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.architecture.kv_format import AUTO
from minfer.effects.setup import memory, tiers
from minfer.effects.setup import prepare as preparing
from minfer.effects.setup.device import DeviceInfo
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import NotEnoughMemoryError
from minfer.effects.setup.prepare import prepare
from minfer.records.messages import Loading, Preempted, Recomputing
from minfer.records.state import Transition
from minfer.values.checks import ConfigError
from tests.effects.tiny_families import VARIANTS, save

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 96,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "skip_tokenizer_init": True,
}
FAMILIES = [
    ("Gemma3", "pattern"),
    ("Gemma4", "small full heads"),
    ("Gemma3n", "all"),
    next(key for key in VARIANTS if key[0] == "GptOss"),
    next(key for key in VARIANTS if key[0] == "DeepseekV3"),
    ("Qwen3Next", "plain"),
    ("GraniteMoeHybrid", "experts"),
]


def prompts(count: int, length: int, vocab: int = 160) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def reasons_of(llm: LLM) -> list[object]:
    """The reasons of all turns from now on."""
    reasons, driver = list[object](), llm.worker.driver
    turn = driver.turn

    def noted(before: Callable[[Transition], None] | None = None) -> Transition:
        transition = turn(before)
        reasons.extend(transition.reasons)
        return transition

    driver.turn = noted  # type: ignore[method-assign]
    return reasons


def served(**settings: Any) -> tuple[list[tuple[int, ...]], list[object]]:
    """Prompts one by one, more than the pool holds, and the first of them again."""
    first, *other_prompts = prompts(4, 70)
    with LLM(**SMALL, **settings) as llm:
        reasons = reasons_of(llm)
        outputs = [
            llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
            for prompt in (first, *other_prompts, first)
        ]
        return [tuple(tokens) for tokens in outputs], reasons


@pytest.mark.parametrize("name", [AUTO, "fp8", "int8_per_token_head"])
def test_what_is_loaded_is_what_was_computed(name: str) -> None:
    same = {"num_gpu_blocks_override": 13, "kv_cache_dtype": name}
    expected, _ = served(**same)
    tokens, reasons = served(**same, kv_host_memory=1 << 24, kv_host_choice="load")
    assert tokens == expected
    assert tokens[-1] == tokens[0]
    [load] = [reason for reason in reasons if isinstance(reason, Loading)]
    assert (load.blocks, load.hit) == (8, 0)
    _, reasons = served(**same, kv_host_memory=1 << 24, kv_host_choice="recompute")
    assert any(isinstance(reason, Recomputing) for reason in reasons)


@pytest.mark.long
@pytest.mark.parametrize("key", FAMILIES, ids=lambda key: key[0])
def test_every_kind_of_cache_is_moved(key: tuple[str, str], tmp_path: Path) -> None:
    save(str(tmp_path), key[0], VARIANTS[key])
    config = prepare(EngineArgs(model=str(tmp_path), **SMALL)).config
    num_blocks = config.most_pages(12) * 3 // 2
    same = {"model": str(tmp_path), "num_gpu_blocks_override": num_blocks}
    expected, _ = served(**same)
    tokens, reasons = served(**same, kv_host_memory=1 << 24, kv_host_choice="load")
    assert tokens == expected
    assert any(isinstance(reason, Loading) for reason in reasons)


@pytest.mark.parametrize("choice", ["load", "recompute"])
def test_preempted_requests_have_the_same_tokens(choice: str) -> None:
    params = evolve(GREEDY, max_tokens=40)
    expected = made(prompts(3, 40), params)
    reasons = list[object]()
    small_pool = {"num_gpu_blocks_override": 16, "kv_host_memory": 1 << 24}
    tokens = made(prompts(3, 40), params, reasons, **small_pool, kv_host_choice=choice)
    assert tokens == expected
    assert any(isinstance(reason, Preempted) for reason in reasons)
    kind = Loading if choice == "load" else Recomputing
    assert any(isinstance(reason, kind) for reason in reasons)


def made(
    texts: list[list[int]],
    params: SamplingParams,
    reasons: list[object] | None = None,
    **settings: Any,
) -> list[tuple[int, ...]]:
    """All of them at once."""
    with LLM(**SMALL, **settings) as llm:
        noted = reasons_of(llm)
        outputs = llm.generate(texts, params, use_tqdm=False)
        if reasons is not None:
            reasons += noted
        return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_costs_are_measured() -> None:
    with LLM(**SMALL, kv_host_memory=1 << 24) as llm:
        host = llm.worker.driver.config.host
        assert host is not None
        assert host.choice == "cost"
        assert host.page_seconds > 0
        assert host.token_seconds > 0


def test_what_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="a KV block has"):
        prepare(EngineArgs(device="cpu", kv_host_memory=9))
    with pytest.raises(ConfigError, match="switched off"):
        prepare(
            EngineArgs(device="cpu", kv_host_memory=1 << 20, enable_prefix_caching=False)
        )
    args = EngineArgs(device="cpu", kv_host_memory=1 << 24)
    with pytest.raises(ConfigError, match="does not cover"):
        prepare(evolve(args, journal=str(tmp_path), journal_redact=True))
    draft = {"method": "draft_model", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="beside a draft model"):
        prepare(evolve(args, speculative_config=draft))
    with pytest.raises(ConfigError, match="kv_host_choice must be"):
        EngineArgs(kv_host_choice="maybe")
    monkeypatch.setattr(tiers, "memory_limit", lambda: 1 << 21)
    with pytest.raises(ConfigError, match="control group"):
        prepare(EngineArgs(device="cpu", kv_host_memory=1 << 22))


def test_buffers_of_copies_are_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert memory.COPY_BUFFER_BYTES == paged_tensors.PIECE_BYTES
    args = EngineArgs(device="cuda", num_gpu_blocks_override=99, kv_host_memory=1 << 24)
    gpu = DeviceInfo("cuda", "H100", 1 << 36, 1 << 36, (9, 0))
    monkeypatch.setattr(preparing, "find_device", lambda *_: gpu)
    neither = evolve(args, kv_host_memory=None)
    with_disk = evolve(args, kv_disk=tmp_path, kv_disk_size=1 << 26)
    planned = [
        prepare(settings).memory.activations for settings in (neither, args, with_disk)
    ]
    assert (
        planned[1] - planned[0]
        == planned[2] - planned[1]
        == 4 * paged_tensors.PIECE_BYTES
    )


def test_the_plan_says_what_host_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", "--kv-host-memory", "64M"]) == 0
    assert re.search(
        r"KV in host memory +[\d.]+ MiB: \d+ blocks", capsys.readouterr().out
    )


def test_an_engine_closes_while_blocks_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last blocks are stored when a request ends."""
    copy = paged_tensors.Track.copy

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.3)
        copy(*arguments, **options)

    monkeypatch.setattr(paged_tensors.Track, "copy", slow)
    llm = LLM(**SMALL, kv_host_memory=1 << 24)
    llm.generate(prompts(1, 70), GREEDY, use_tqdm=False)
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_a_closed_engine_holds_no_cache() -> None:
    llm = LLM(**SMALL, kv_host_memory=1 << 24)
    executor = cast(TorchExecutor, llm.worker.driver.executor)
    assert executor.copiers is not None
    assert executor.copiers.host is not None
    views = [weakref.ref(tensor.device) for tensor in executor.copiers.host.tensors]
    llm.close()
    gc.collect()
    assert [view() for view in views] == [None]


def test_memory_that_cannot_be_had_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: HostPages) -> bool:
        self._note(failed="no more")
        return False

    monkeypatch.setattr(HostPages, "grow", refuse)
    with pytest.raises(NotEnoughMemoryError, match=r"host memory.*no more"):
        LLM(**SMALL, kv_host_memory=1 << 24)
    assert not [thread for thread in threading.enumerate() if "minfer-kv" in thread.name]
