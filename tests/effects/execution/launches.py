"""What traffic launches, and what dummy steps launch before it: `python -m
tests.effects.execution.launches [NAME ...]`.

Triton decides when it is imported whether it interprets, which the suite's process does;
so this is one of its own. An executor serves random requests on the CPU as on a GPU; its
kernels' launches are noted and not made, so tokens mean nothing, and nothing of what is
launched depends on them. Prints a line of JSON for each case: how many specializations
dummy steps launch, how many requests do, and which of these dummy steps do not.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
from attrs import evolve, frozen
from torch import Tensor

from minfer import kernels
from minfer.effects.execution.device import routes
from minfer.effects.execution.running.adapter_loader import AdapterRoom
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.execution.warming.dummy_steps import launch_dummy_steps
from minfer.effects.live.engine.driver import Driver
from minfer.effects.models.architecture import products
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.families.attention_keys import HeadGateKeys
from minfer.effects.models.layout.cache_layout import plain_layout
from minfer.effects.models.layout.shapes import captured_tokens
from minfer.effects.models.ranks import (
    SINGLE_RANK,
    Communicator,
    Parallel,
    RankInfo,
    SingleRank,
)
from minfer.kernels import fused_linear, head_gates, heads_norm, lora
from minfer.kernels.compiling import compile_launches
from minfer.records.config import EngineConfig
from minfer.records.messages import AdapterLoaded, Event, LoadAdapter, Submit
from minfer.records.request import Request, SamplingParams
from minfer.records.speculation import DEVICE, REJECTION, SAME_NOISE, Speculation
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import CONFIG, with_attention, with_windows
from tests.kernels import specialization

BLOCK: Final = 16
VOCAB: Final = 5000  # three chunks of the sampler, a number that nothing divides
BASE: Final = parse_spec({**CONFIG, "vocab_size": VOCAB, "torch_dtype": "bfloat16"})
SMALLER: Final = evolve(
    with_attention(BASE, heads=2, kv_heads=1), layers=BASE.layers[:1], dtype="float32"
)
_OF_LATENTS: Final = VARIANTS["DeepseekV2", "greedy"] | {"first_k_dense_replace": 3}
LATENTS: Final = parse_spec(
    written("DeepseekV2", _OF_LATENTS | {"vocab_size": VOCAB}), dtype="bfloat16"
)
# Blocks of attention beside feed-forward, without gates, and with norms of heads; and
# several residual streams.
FAMILIES: Final = {
    key[0]: parse_spec(
        written(key[0], VARIANTS[key] | {"vocab_size": VOCAB}), dtype=dtype
    )
    for key, dtype in (
        (("Falcon", "two norms"), "bfloat16"),
        (("Cohere", "norms of heads"), "float16"),
        (("Gemma3n", "all"), "bfloat16"),
    )
}
# Gated delta nets, Mamba 2, and Mamba; Kimi delta attention beside MLA.
RECURRENT: Final = {
    key[0]: parse_spec(
        written(key[0], VARIANTS[key] | {"vocab_size": VOCAB}), dtype=dtype
    )
    for key, dtype in (
        (("Qwen3_5", "plain"), "bfloat16"),
        (("GraniteMoeHybrid", "dense"), "float32"),
        (("Jamba", "dense"), "bfloat16"),
    )
}
_OF_KIMI: Final = VARIANTS["KimiLinear", "plain"] | {"mlp_layer_types": ["dense"] * 4}
KIMI: Final = parse_spec(
    written("KimiLinear", _OF_KIMI | {"vocab_size": VOCAB}), dtype="bfloat16"
)
HOPPER: Final = (9, 0)
MAX_LORA_RANK: Final = 16
# What multiplies and normalises on a GPU.
PRODUCTS: Final = SimpleNamespace(
    **{
        **vars(fused_linear),
        "norm_heads": heads_norm.norm_heads,
        "gate_heads": head_gates.gate_heads,
        "add_lora": lora.add_lora,
    }
)
MIN_EXPAND_TOKENS: Final = 64  # and MIN_DEQUANTIZE_TOKENS: as no prompt here is long


class FirstStage(SingleRank):
    """Of two stages, of which there is no other."""

    def send(self, hidden: Tensor) -> None:
        pass

    def receive_tokens(self, lines: int) -> Tensor:
        return torch.zeros(lines, dtype=torch.int32)


class FirstPart(SingleRank):
    """Of two tensor parallel ranks, of which there is no other."""

    def gather(self, local_columns: Tensor) -> Tensor:
        return torch.cat((local_columns, local_columns), 1)


@frozen
class Case:
    """A model, an engine, a GPU."""

    spec: ModelSpec = BASE
    seqs: int = 72
    budget: int = 1100
    graphs: bool = True
    capability: tuple[int, int] = HOPPER
    crowds: tuple[int, ...] = (1, 1, 1, 2, 3, 5, 12, 30, 100)  # requests at once
    draft: ModelSpec | None = None
    drafts: int = 0  # of a row
    rule: str = SAME_NOISE
    ranks: Communicator = SINGLE_RANK
    captured: int | None = None  # prefill tokens of the largest graph; None: the model's
    adapters: int = 0  # slots

    @property
    def speculation(self) -> Speculation | None:
        """By the draft model, if there is one."""
        if self.draft is None:
            return None
        return Speculation(
            drafter=DEVICE, drafts=self.drafts, rule=self.rule, adaptive=False
        )


CASES: Final = {
    "graphs": Case(),
    "adapters": Case(adapters=3),
    "eager": Case(graphs=False),
    "drafts": Case(draft=SMALLER, drafts=5, crowds=(1, 1, 2, 5, 30)),
    "coins": Case(draft=SMALLER, drafts=3, rule=REJECTION, crowds=(1, 5, 30)),
    "first stage": Case(
        seqs=3,
        budget=40,
        crowds=(1, 2, 3, 12, 20),
        ranks=FirstStage(RankInfo(1, Parallel(pipeline=2))),
    ),
    "few": Case(seqs=3, budget=40, crowds=(1, 2, 3, 12, 20)),
    "ranks": Case(
        seqs=3,
        budget=40,
        crowds=(1, 2, 3, 12, 20),
        ranks=FirstPart(RankInfo(0, Parallel(tensor=2))),
    ),
    "float32": Case(evolve(BASE, dtype="float32"), graphs=False),
    "windows": Case(with_windows(BASE, None, 40), capability=(8, 0)),
    "norms": Case(with_attention(BASE, qk_norm=True, heads=6, kv_heads=1)),
    "norms of all heads": Case(with_attention(BASE, qk_norm=True, qk_norm_over="all")),
    "gates": Case(
        with_attention(
            BASE,
            gate=HeadGateKeys(name="self_attn.g_proj", activation="softplus"),
            gates_by_head=True,
        )
    ),
    "scaled logits": Case(evolve(BASE, logit_scale=0.5)),
    "latents": Case(LATENTS, captured=128),
    "no gate": Case(FAMILIES["Falcon"], captured=128),
    "parallel": Case(FAMILIES["Cohere"], captured=128),
    "streams": Case(FAMILIES["Gemma3n"], captured=128),
    "int8": Case(evolve(BASE, kv_dtype="int8"), captured=128),
    "delta": Case(RECURRENT["Qwen3_5"], captured=128),
    "Mamba": Case(RECURRENT["GraniteMoeHybrid"], graphs=False),
    "Kimi delta": Case(KIMI, captured=128),
    "scan": Case(RECURRENT["Jamba"], captured=128),
    "wide": Case(
        with_attention(BASE, heads=4, kv_heads=4, head_dim=256), capability=(8, 6)
    ),
}


def requests(rng: random.Random, count: int, adapters: int = 0) -> list[Request]:
    """Prompts of all lengths, and all ways to draw; of most adapters, and of none."""
    plans = []
    for i in range(count):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            logprobs=rng.choice([None, None, 3]),
            presence_penalty=rng.choice([0, 0, 0, 1]),
        )
        length = rng.choice([1, 2, 3, 5, 9, 17, 40, 70, 130])
        plans.append(
            Request(
                id=str(i),
                prompt=tuple(rng.randrange(VOCAB) for _ in range(length)),
                max_tokens=rng.randrange(1, 9),
                sampling=sampling,
                needs_host_mask=i % 7 == 0,
                seed=i,
                adapter=f"{i % (adapters + 2):02x}"
                * bool(adapters and i % (adapters + 2)),
            )
        )
    return plans


def load_at_once(command: LoadAdapter, report: Callable[[Event], None]) -> None:
    """Take what is in the slot as the adapter."""
    report(AdapterLoaded(command.adapter, command.slot))


@contextmanager
def executing(
    case: Case, config: EngineConfig
) -> Iterator[tuple[TorchExecutor, list[specialization.Specialization]]]:
    """An executor, and what it launches in here."""
    rank_info, captured = case.ranks.rank_info, case.captured
    weights = random_weights(case.spec, case.spec.dtype, 0, rank_info=rank_info)
    spec = case.spec.for_rank(rank_info)
    with (
        patch.object(routes, "MIN_EXPAND_TOKENS", MIN_EXPAND_TOKENS),
        patch.object(routes, "MIN_DEQUANTIZE_TOKENS", MIN_EXPAND_TOKENS),
        patch.object(routes, "captured_tokens", captured_tokens)
        if captured is None
        else patch.object(routes, "captured_tokens", lambda *_: captured),
        specialization.recorded(case.capability) as launches,
        patch.object(kernels, "interpreting", True),
        patch.object(products, "_module", lambda _: PRODUCTS),
    ):
        draft = None
        if case.draft is not None:
            draft_spec = case.draft
            draft_weights = random_weights(draft_spec, draft_spec.dtype, 0)
            draft = LoadedDraft(draft_spec, draft_weights)
        executor = TorchExecutor(
            config,
            spec,
            weights,
            "cpu",
            kernels=True,
            draft=draft,
            ranks=case.ranks,
            adapters=AdapterRoom(case.spec, MAX_LORA_RANK),
        )
        executor.runner.shortcuts.graphs = case.graphs
        yield executor, launches


def foreseen(case: Case, config: EngineConfig) -> list[specialization.Specialization]:
    """What dummy steps launch before any request."""
    with executing(case, config) as (executor, launches), torch.inference_mode():
        compile_launches(
            lambda: launch_dummy_steps(executor.dummy_runner), lambda _: None
        )
    return launches


def launched(case: Case, config: EngineConfig) -> list[specialization.Specialization]:
    """What an executor launches for such requests, one by one, and in crowds."""
    rng = random.Random(0)
    with (
        executing(case, config) as (executor, launches),
        # Nothing is written by kernels, so what they are to fill is to be sound before.
        patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        patch.object(torch, "empty", torch.zeros),
    ):
        runner: Any = executor.runner
        runner._replay = runner.step  # what would be captured
        driver = Driver(config, executor)
        driver.load_adapter = load_at_once
        wanted_requests = requests(rng, 160, case.adapters)
        for crowd in case.crowds:
            for request in wanted_requests[:crowd]:
                driver.post(Submit(evolve(request, id=f"{crowd} {request.id}")))
            rng.shuffle(wanted_requests)
            while driver.busy:
                driver.turn()
        for request in wanted_requests[: case.seqs]:  # many short chunks
            driver.post(Submit(evolve(request, id=f"short {request.id}", prompt=(1, 2))))
        while driver.busy:
            driver.turn()
    return launches


def report(name: str) -> dict[str, Any]:
    """What came of a case."""
    case = CASES[name]
    config = EngineConfig(
        num_blocks=600 if not case.spec.has_states else 2000,
        block_size=BLOCK,
        max_model_len=160,
        max_num_seqs=case.seqs,
        max_num_batched_tokens=case.budget,
        vocab_size=VOCAB,
        speculation=case.speculation,
        adapter_slots=case.adapters,
        groups=plain_layout(case.spec, BLOCK).groups,
    )
    before, launches = foreseen(case, config), launched(case, config)
    return {
        "case": name,
        "foreseen": len(before),
        "launched": len(launches),
        "kernels": sorted({launch.kernel for launch in launches}),
        "unforeseen": [
            [launch.kernel, launch.constants, sorted(launch.divisible), launch.options]
            for launch in launches
            if launch not in before
        ],
    }


if __name__ == "__main__":
    for each in sys.argv[1:] or CASES:
        print(json.dumps(report(each)), flush=True)
