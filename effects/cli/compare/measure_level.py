"""One level: its engine is opened, measured, and closed."""

import gc
import inspect
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

import attrs
import torch
from attrs import frozen
from torch import Tensor

from minfer.effects.cli.compare.levels import Level
from minfer.effects.cli.compare.results import LevelResult, Memory, Quality, Speed
from minfer.effects.cli.compare.score_text import BaseProbabilities, score_text
from minfer.effects.cli.compare.text_windows import TextWindows
from minfer.effects.execution.device.streams import release_cached_memory
from minfer.effects.execution.running.draft_head import DraftHead
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.execution.warming.start_progress import ignore_progress
from minfer.effects.live.llm import LLM
from minfer.effects.models.layout.shapes import kv_bytes_per_token
from minfer.effects.models.layout.state_layout import state_bytes
from minfer.effects.text.outputs import RequestOutput
from minfer.kernels.leaves import INT8_TABLE
from minfer.records.request import SamplingParams

RUNS_PER_BATCH: Final = 3  # of each batch, after one that is not measured


class LevelFailedError(Exception):
    """A request of a level failed."""


@frozen(kw_only=True)
class MeasuredLoad:
    """The load that speed is measured under: requests of random tokens of the text."""

    batches: tuple[int, ...]
    prompt: int  # tokens
    output: int  # tokens
    seed: int


def measure_level(
    level: Level,
    text: TextWindows,
    load: MeasuredLoad,
    base: BaseProbabilities | None,
    *,
    is_base: bool,
) -> LevelResult:
    """Returns what is measured of a level; its engine is gone by then.

    Raises as `LLM` does, and LevelFailedError.
    """
    with LLM.from_engine_args(level.args, ignore_progress) as llm:
        executor: Any = llm.worker.driver.executor
        device, size = executor.device, llm.setup.config.block_size
        memory = _memory(llm, executor)
        quality = score_text(executor, size, text, base, is_base=is_base)
        speeds = tuple(_speed(llm, text, load, batch) for batch in load.batches)
    result = _result(level, llm, memory, quality, speeds)
    del llm, executor
    gc.collect()
    release_cached_memory(device)
    return result


def _result(
    level: Level, llm: LLM, memory: Memory, quality: Quality, speeds: tuple[Speed, ...]
) -> LevelResult:
    spec = llm.setup.spec
    return LevelResult(
        level=level.name,
        model=level.args.model or "bundled",
        dtype=spec.dtype,
        matrices="plain" if spec.quantization is None else spec.quantization.text,
        kv_dtype=spec.kv_dtype,
        state_dtype=spec.state_dtype if spec.has_states else None,
        memory=memory,
        quality=quality,
        speeds=speeds,
    )


# --- memory -----------------------------------------------------------------------------


def _memory(llm: LLM, executor: TorchExecutor) -> Memory:
    """Returns the memory of weights and KV, a drafter's included."""
    plan, runner = llm.setup.memory, executor.runner
    models: list[object] = [runner.step.model]
    caches = runner.cache.page_views()
    if isinstance(runner.drafter, DraftHead):
        models.append(runner.drafter.model.weights)
    if runner.draft_model is not None:
        models.append(runner.draft_model.model)
        caches += runner.draft_model.cache.page_views()
    token = kv_bytes_per_token(plan.spec)
    token += 0 if plan.draft is None else kv_bytes_per_token(plan.draft)
    return Memory(
        weights_planned=plan.weights,
        weights_held=held_bytes(models),
        kv_planned=plan.kv_cache,
        kv_held=held_bytes(caches),
        kv_blocks=plan.num_blocks,
        kv_of_token=token,
        state=state_bytes(plan.spec),
    )


def held_bytes(tree: object) -> int:
    """Returns the bytes of all tensors of a model; shared memory counts once."""
    sizes: dict[object, int] = {}
    for tensor in _tensors(tree):
        if isinstance(tensor, torch.ScriptObject):  # FBGEMM's
            outputs, inputs = torch.ops.quantized.linear_unpack(tensor)[0].shape
            sizes[id(tensor)] = outputs * (inputs + INT8_TABLE)
        elif tensor.is_meta:
            continue
        elif tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
        else:  # packed by a library, which does not show its storage
            sizes[tensor.device, id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def _tensors(tree: object) -> Iterator[Tensor | torch.ScriptObject]:
    """Yield the tensors of records, collections, modules, and functions over these, and
    matrices in a library's own layout.
    """
    inner: Sequence[object] = ()
    if isinstance(tree, Tensor | torch.ScriptObject):
        yield tree
    elif isinstance(tree, torch.nn.Module):
        leaves = (getattr(module, "leaf", None) for module in tree.modules())
        inner = [*tree.parameters(), *tree.buffers(), *leaves]
    elif isinstance(tree, Mapping):
        inner = [*tree.values()]
    elif isinstance(tree, list | tuple):
        inner = tree
    elif inspect.isfunction(tree):
        inner = [*inspect.getclosurevars(tree).nonlocals.values()]
    elif attrs.has(kind := type(tree)):
        inner = [getattr(tree, attribute.name) for attribute in attrs.fields(kind)]
    for child in inner:
        yield from _tensors(child)


# --- speed ------------------------------------------------------------------------------


def _speed(llm: LLM, windows: TextWindows, load: MeasuredLoad, batch: int) -> Speed:
    """Returns the speed of a batch: medians of several runs."""
    params = SamplingParams(temperature=0, max_tokens=load.output, ignore_eos=True)
    rng, text_tokens = random.Random(load.seed), windows.ids  # noqa: S311 - no secrets
    outputs: list[RequestOutput] = []
    seconds: list[float] = []
    for run in range(RUNS_PER_BATCH + 1):
        prompts = [rng.choices(text_tokens, k=load.prompt) for _ in range(batch)]
        begin = time.perf_counter()
        generated = llm.generate(prompts, params, use_tqdm=False)
        end = time.perf_counter()
        _check(generated)
        if run:  # the first one is slower: it captures graphs and fills caches
            outputs += generated
            seconds.append(end - begin)
    return Speed(
        batch=batch,
        ttft=median(output.metrics.ttft or 0.0 for output in outputs),
        tpot=median(output.metrics.tpot or 0.0 for output in outputs),
        throughput=batch * load.output / median(seconds),
    )


def _check(outputs: Sequence[RequestOutput]) -> None:
    """Raise LevelFailedError if a request failed."""
    for output in outputs:
        if output.outputs[0].error:
            raise LevelFailedError(output.outputs[0].error)
