"""Every kind of layer with everything that an engine does: outputs are those of a plain
run.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import evolve

from minfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from tests.circles import claimed
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import EOS, write_tokenizer

KINDS: Final = {
    "dense": ("Qwen3", "plain"),
    "MoE": ("Qwen3Moe", "experts"),
    "MLA": ("DeepseekV3", "groups"),
    "sinks and windows": ("GptOss", "alternate"),
    "capped": ("Gemma2", "caps"),
    "shared keys and inputs of layers": ("Gemma4", "shared keys"),
    "layers of two sizes": ("Gemma4", "small full heads"),
    "several residual streams": ("Gemma3n", "all"),
    "experts beside": ("Gemma4", "all"),
    "norms behind and windows": ("Gemma3", "pattern"),
    "norms of all heads": ("Olmo2", "norms behind"),
    "scaled residuals": ("Granite", "multipliers"),
    "layers without rotation": ("SmolLM3", "interval"),
    "matrices stored as one": ("Phi3", "partial"),
    "parallel and windows": ("Cohere2", "windows alternate"),
    "layer norms of heads": ("StableLm", "all"),
    "gates, heads by layer": ("Laguna", "windows, heads by layer"),
    "norms after rotation": ("HunYuanMoEV1", "tied, by layer"),
    "interleaved rotation": ("Ernie4_5_Moe", "biases, tied"),
    "gated delta nets": ("Qwen3Next", "plain"),
    "Mamba 2": ("GraniteMoeHybrid", "experts"),
}
# Other families of these recurrent layers, and with short convolutions.
HYBRIDS: Final = {
    "Qwen3.5": ("Qwen3_5", "plain"),
    "Qwen3.5 MoE": ("Qwen3_5Moe", "plain"),
    "Nemotron-H": ("NemotronH", "experts"),
    "Falcon-H1": ("FalconH1", "multipliers"),
    "LFM2": ("Lfm2", "plain"),
    "LFM2 MoE": ("Lfm2Moe", "plain"),
    "Kimi-Linear": ("KimiLinear", "plain"),
    "Jamba": ("Jamba", "plain"),
}
# A draft model of these kinds is refused, so theirs is another.
RECURRENT: Final = ("gated delta nets", "Mamba 2", *HYBRIDS)
# 20 blocks; a sequence needs up to 12.
TIGHT: Final = {"num_gpu_blocks_override": 20}
DRAFTS: Final = {"num_speculative_tokens": 3, "adaptive": False}
# What followed the last token earlier: often wrong.
NGRAM: Final = {"method": "ngram", "prompt_lookup_min": 1, **DRAFTS}
DRAFT_MODEL: Final = {"method": "draft_model", **DRAFTS}
ALL_AT_ONCE: Final = "all at once"
WITH_MODEL: Final = "all at once, draft model"
HOST: Final = {"kv_host_memory": 1 << 24, "kv_host_choice": "load"}
CASES: Final[dict[str, dict[str, Any]]] = {
    "prefix cache": {"enable_prefix_caching": True},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "preemption": TIGHT,
    "n-gram drafts": {"speculative_config": NGRAM},
    "draft model": {"speculative_config": DRAFT_MODEL},
    ALL_AT_ONCE: {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 16,
        "speculative_config": NGRAM,
        **TIGHT,
    },
}
# Of recurrent layers, whose states drafts must not change: in a pool for few sequences.
# (Host memory is refused beside a draft model.)
TOGETHER: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 16,
}
HYBRID_CASES: Final[dict[str, dict[str, Any]]] = {
    ALL_AT_ONCE: {**TOGETHER, **HOST, "speculative_config": NGRAM},
    WITH_MODEL: {**TOGETHER, "speculative_config": DRAFT_MODEL},
}
LONGEST: Final = 12  # blocks
PLAIN: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 12,
    "num_gpu_blocks_override": 300,
    "enable_prefix_caching": False,
}
SCHEMA: Final = {
    "type": "object",
    "properties": {"kind": {"enum": ["moe", "mla"]}, "deep": {"type": "boolean"}},
    "required": ["kind", "deep"],
    "additionalProperties": False,
}
SHARED: Final = "def add(a, b): return a + b  # add "
PROMPTS: Final = [
    SHARED,
    "a",
    f"{SHARED}two numbers",
    "x = x + x + x + x + x + x + x",
    "for i in range(3): print(i)",
    f"{SHARED}{SHARED[:20]}",
]
REPEATING: Final[dict[str, Any]] = {"allowed_token_ids": [65, 66]}
# What is asked, in turn: greedily, with a seed, three samples, a grammar.
ASKED: Final[list[dict[str, Any]]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 3},
    {"temperature": 0, **REPEATING},
    {"temperature": 0.7, "seed": 7, "structured_outputs": StructuredOutputs(json=SCHEMA)},
    {"temperature": 0, "n": 3, **REPEATING},
]
Made = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        family, variant = (KINDS | HYBRIDS)[kind]
        config = VARIANTS[family, variant] | {"vocab_size": 260, "eos_token_id": EOS}
        config["vocab_size_per_layer_input"] = 260
        config["tie_word_embeddings"] = False  # tied and random, it repeats its input
        save(str(folder), family, config)
        write_tokenizer(folder)
        # That of bytes, whatever the family's own class would add to it.
        tokenizer_config = {
            "eos_token": "<|end|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return folder

    return make


@pytest.fixture(scope="module")
def plain(folder_of: Callable[[str], Path]) -> Callable[[str], Made]:
    @cache
    def run(kind: str) -> Made:
        """Requests one after another, alone in an engine that does nothing else. Greedy
        samples are all the same, so one is made.
        """
        params = asked()
        params[-1] = evolve(params[-1], n=1)
        with LLM(model=str(folder_of(kind)), steps_in_flight=1, **PLAIN) as llm:
            outputs = [
                tokens(llm.generate([prompt], [param], use_tqdm=False))[0]
                for prompt, param in zip(PROMPTS, params, strict=True)
            ]
        return [*outputs[:-1], outputs[-1] * 3]

    return run


def asked() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=24, **settings) for settings in ASKED]


def tokens(outputs: list[RequestOutput]) -> Made:
    return [
        [tuple(completion.token_ids) for completion in output.outputs]
        for output in outputs
    ]


def happened(kind: str, case: str, passes: list[list[RequestOutput]]) -> bool:
    """Whether a run did what its case is about."""
    all_metrics = [output.metrics for outputs in passes for output in outputs]
    if case == "prefix cache":
        return any(output.num_cached_tokens for output in passes[1])
    if case == "preemption":
        return sum(metrics.preemptions for metrics in all_metrics) > 0
    drafts = sum(metrics.draft_tokens for metrics in all_metrics)
    accepted = sum(metrics.accepted_draft_tokens for metrics in all_metrics)
    if kind in RECURRENT and case in HYBRID_CASES:
        hits = sum(output.num_cached_tokens for output in passes[1])
        preemptions = sum(metrics.preemptions for metrics in all_metrics)
        return 0 < accepted < drafts and hits > 0 and preemptions > 0
    return "draft" not in case or accepted > 0


def kinds_and_cases() -> list[Any]:
    """Kinds of layers, cases and depths. What one setting alone does is claimed for two
    kinds in three: all kinds have the settings at once.
    """
    alone = [case for case in CASES if case != ALL_AT_ONCE]
    pairs = [*product(KINDS, alone)]
    hybrids = ("gated delta nets", "Mamba 2", *HYBRIDS)
    return [
        *((kind, ALL_AT_ONCE, 2) for kind in HYBRIDS),
        *((kind, WITH_MODEL, 1 + place % 2) for place, kind in enumerate(hybrids)),
        *((kind, ALL_AT_ONCE, depth) for kind in KINDS for depth in (1, 2)),
        *((kind, case, 2) for kind, case in pairs[::3]),
        *claimed((kind, case, 2) for kind, case in (*pairs[1::3], *pairs[2::3])),
        *claimed((kind, case, 1) for kind, case in pairs),
    ]


def sequence_pages(kind: str, folder_of: Callable[[str], Path]) -> int:
    """Pages that a sequence holds, with its state."""
    setup = prepare(EngineArgs(model=str(folder_of(kind)), **PLAIN))
    return setup.config.most_pages(LONGEST)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "case", "depth"), kinds_and_cases())
def test_outputs_are_those_of_a_plain_run(
    kind: str,
    case: str,
    depth: int,
    folder_of: Callable[[str], Path],
    plain: Callable[[str], Made],
) -> None:
    """Greedy ones and those of fixed seeds; three samples; a grammar. A draft model is
    of the same kind, with the same weights, or a dense one, some of whose drafts of few
    allowed tokens are right.
    """
    cases = CASES | (HYBRID_CASES if kind in RECURRENT else {})
    settings = {**PLAIN, **cases[case], "model": str(folder_of(kind))}
    if kind in RECURRENT and case in HYBRID_CASES:
        sequences = 4 if case == WITH_MODEL else 3
        settings["num_gpu_blocks_override"] = sequences * sequence_pages(kind, folder_of)
    if "draft model" in case:
        drafts = cases[case]["speculative_config"]
        drafter = "dense" if kind in RECURRENT else kind
        settings["speculative_config"] = {**drafts, "model": str(folder_of(drafter))}
    with LLM(steps_in_flight=depth, **settings) as llm:
        passes = [llm.generate(PROMPTS, asked(), use_tqdm=False) for _ in range(2)]
    for outputs in passes:
        assert tokens(outputs) == plain(kind)
    assert happened(kind, case, passes)


@pytest.mark.long
def test_plain_runs_are_long_enough_and_keep_to_the_grammar(
    plain: Callable[[str], Made],
) -> None:
    for kind in KINDS:
        outputs = plain(kind)
        assert [len(samples) for samples in outputs] == [1, 1, 3, 1, 1, 3]
        assert sum(len(sample) for samples in outputs for sample in samples) > 100
        [grammar] = outputs[4]
        assert bytes_of(grammar).startswith(b"{")


def bytes_of(ids: tuple[int, ...]) -> bytes:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    return "".join(alphabet[token] for token in ids if token < EOS).encode()
