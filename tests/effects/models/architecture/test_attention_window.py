"""`attention_window` and `attention_sink_tokens`: what the engine writes is what
transformers writes with a mask of that window and those first tokens.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch

from minfer import LLM, SamplingParams
from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.layout.cache_layout import cache_layout, one_group
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import NotEnoughMemoryError, describe
from minfer.effects.setup.prepare import Setup, prepare
from minfer.records.config import CacheGroup
from minfer.records.messages import Admitted, Preempted
from minfer.values.checks import ConfigError
from tests.circles import claimed, long
from tests.effects.tiny_families import VARIANTS, WINDOW, save
from tests.effects.tiny_model import CONFIG, write_checkpoint
from tests.effects.watched import Watched

FULL = ("Llama", "plain"), ("Qwen3", "plain")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: str, name: str) -> tuple[str, Any]:
        folder = str(tmp_path_factory.mktemp("model"))
        return folder, save(folder, family, VARIANTS[family, name])

    return make


def reaching(length: int, window: int, sinks: int) -> torch.Tensor:
    """transformers' mask [1, 1, length, length] of a window beside sink tokens."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    visible = (key <= query) & ((key > query - window) | (key < sinks))
    return torch.where(visible, 0.0, -torch.inf)[None, None]


def prompts(count: int) -> list[list[int]]:
    """First short ones, which are admitted together and grow; others of up to 90 tokens,
    half of them behind the same 30.
    """
    draw = random.Random(7)
    shared = draw.choices(range(160), k=30)
    return [
        (shared if i % 2 and i > 3 else [])
        + draw.choices(range(160), k=draw.randint(1, 60) if i > 3 else i + 1)
        for i in range(count)
    ]


def check(hf_model: Any, mask: Any, prompt: list[int], tokens: list[int]) -> None:
    """Check that `tokens` are transformers' greedy tokens after `prompt`."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens])
        logits = hf_model(ids, attention_mask=mask(len(ids[0])), use_cache=False).logits[
            0
        ]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


ROOMY = 400  # blocks; fewer are enough for two rows
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
CASES: list[Any] = [
    (FULL[0], 24, 3, ROOMY, {}),
    *long(
        [
            (FULL[1], 24, 5, 20, {}),
            (FULL[0], 9, 0, 9, {}),
            (FULL[0], 13, 13, 18, DRAFTS),
            (("Qwen3", "windows alternate"), 24, 4, ROOMY, {}),
            (("GptOss", "alternate"), 24, 4, ROOMY, {}),
        ]
    ),
]


@pytest.mark.parametrize(("key", "window", "sinks", "blocks", "extra_settings"), CASES)
def test_greedy_tokens_are_transformers_with_this_mask(
    model: Any,
    key: tuple[str, str],
    window: int,
    sinks: int,
    blocks: int,
    extra_settings: dict[str, Any],
) -> None:
    """Chunked prefill, two steps in flight, and the same prompts again: prefix hits."""
    folder, hf_model = model(*key)
    own_windows = {"sliding_attention": WINDOW} if key not in FULL else {}
    masks: dict[str, tuple[int, int]] = {"full_attention": (window, sinks)}
    masks |= {kind: (reach, 0) for kind, reach in own_windows.items()}

    def mask(length: int) -> Any:
        by_kind = {kind: reaching(length, *reads) for kind, reads in masks.items()}
        return by_kind if own_windows else by_kind["full_attention"]

    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "attention_window": window,
        "attention_sink_tokens": sinks,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": blocks,
    }
    requested = prompts(8)
    with LLM(folder, **settings | extra_settings) as llm:
        turns = Watched(llm)
        for _ in range(2):
            outputs = llm.generate(requested, GREEDY, use_tqdm=False)
            for prompt, output in zip(requested, outputs, strict=True):
                check(hf_model, mask, prompt, list(output.outputs[0].token_ids))
    reasons = [reason for turn in turns for reason in turn.reasons]
    preempted = any(isinstance(reason, Preempted) for reason in reasons)
    assert preempted == (blocks != ROOMY)
    hit = any(isinstance(reason, Admitted) and reason.hit for reason in reasons)
    assert hit or blocks < 10, "what is in the cache was evicted"


def planned(folder: Any, **settings: Any) -> Setup:
    """The setup of an engine with these settings, on the CPU."""
    settings = {"num_gpu_blocks_override": 64, "block_size": 4} | settings
    return prepare(EngineArgs(model=str(folder), device="cpu", **settings))


def test_an_answer_can_be_longer_than_the_cache_and_the_plan_says_so(
    tmp_path: Any,
) -> None:
    write_checkpoint(tmp_path)
    window = {"attention_window": 16, "attention_sink_tokens": 4}
    setup = planned(tmp_path, num_gpu_blocks_override=12, **window)
    assert setup.config.groups == (CacheGroup(16, sink_tokens=4),)
    assert setup.memory.largest_context == CONFIG["max_position_embeddings"]
    assert setup.memory.largest_batch(200) == 12 // (1 + 5)
    assert "window 16, 4 sink tokens" in describe(setup.memory, "m")
    with pytest.raises(NotEnoughMemoryError, match="needs 64 KV blocks"):
        planned(tmp_path, num_gpu_blocks_override=12)


def test_another_window_is_another_fingerprint(tmp_path: Any) -> None:
    write_checkpoint(tmp_path)
    reads = ((None, 0), (16, 0), (16, 4), (20, 4))
    fingerprints = {
        planned(
            tmp_path, attention_window=window, attention_sink_tokens=sinks
        ).fingerprint
        for window, sinks in reads
    }
    assert len(fingerprints) == len(reads)


@pytest.mark.parametrize(
    ("window", "sinks", "named"),
    [
        (1, 0, "attention_window must be a whole number from 2"),
        (-4, 0, "attention_window must be a whole number from 2"),
        (8, -1, "attention_sink_tokens must be a whole number from 0"),
        (8, 9, r"attention_sink_tokens \(9\) must be at most attention_window \(8\)"),
        (None, 4, "set attention_window, too"),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Any, window: int | None, sinks: int, named: str
) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=named):
        planned(tmp_path, attention_window=window, attention_sink_tokens=sinks)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (("DeepseekV3", "groups"), r"keep latents \(MLA\)"),
        (("Mistral", "window"), rf"have a sliding window of their own, \[{WINDOW}\]"),
    ],
)
def test_models_that_cannot_have_it_are_refused(key: tuple[str, str], named: str) -> None:
    family, _ = key
    spec = parse_spec({"architectures": [f"{family}ForCausalLM"], **VARIANTS[key]})
    with pytest.raises(ConfigError, match=named):
        with_attention_window(spec, 16, 4)


def test_layers_with_a_window_keep_it_in_a_group_of_their_own() -> None:
    config = VARIANTS["Qwen3", "windows alternate"]
    spec = parse_spec({"architectures": ["Qwen3ForCausalLM"], **config})
    for window in (16, WINDOW):
        windowed = with_attention_window(spec, window, 4)
        groups = {
            (group.window, group.sink_tokens) for group in cache_layout(windowed).groups
        }
        assert groups == {(WINDOW, 0), (window, 4)}
        assert one_group(windowed).groups == (CacheGroup(WINDOW, sink_tokens=4),)
    assert with_attention_window(spec, None, 0) is spec


@pytest.mark.parametrize(
    ("prompt", "output"), [*long([(8_000, 300)]), *claimed([(96_000, 4_000)])]
)
def test_memory_is_flat_over_a_long_run(tmp_path: Any, prompt: int, output: int) -> None:
    """By what the engine holds after each turn. The cache could not hold the prompt."""
    write_checkpoint(tmp_path, max_position_embeddings=131_072)
    size, window, sinks, budget = 16, 256, 20, 512
    settings: dict[str, Any] = {
        "attention_window": window,
        "attention_sink_tokens": sinks,
        "block_size": size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
    }
    ids = random.Random(0).choices(range(256), k=prompt)
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as llm:
        turns = Watched(llm)
        [result] = llm.generate([ids], sampling, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == output
    states = (turn.state.blocks for turn in turns)
    max_blocks = max(blocks.pool.total - blocks.available for blocks in states)
    print(f"{prompt + output} tokens held {max_blocks} blocks at most")
    ahead = budget * 5 // 4  # of a prompt, with two steps in flight
    assert max_blocks <= -(-sinks // size) + -(-window // size) + -(-ahead // size) + 1
