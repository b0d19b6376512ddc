"""Layers of several sizes, keys of other layers and inputs of layers: in both caches, in
places that layers share.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.layout.cache_layout import (
    CacheLayout,
    LayerPlace,
    cache_layout,
    one_group,
)
from minfer.effects.models.layout.shapes import (
    kv_bytes_per_token,
    layer_kv_bytes_per_token,
)
from minfer.effects.models.ranks import Parallel, RankInfo
from minfer.effects.setup.prepare import check_peers
from minfer.records.config import CacheGroup
from minfer.values.checks import ConfigError
from tests.effects.tiny_families import VARIANTS, WINDOW, config_of, written

BLOCK, PAGES = 4, 40
KEYS = [key for key in VARIANTS if key[0] in ("Gemma3n", "Gemma4")]
SLIDING, FULL = "sliding_attention", "full_attention"
# The sizes of Gemma 4 31B, without its other layers.
LARGE = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 60,
    "layer_types": [*[SLIDING] * 5, FULL] * 10,
}
TWELVE = {"num_hidden_layers": 12, "layer_types": [*[SLIDING] * 5, FULL] * 2}


def spec_of(name: str = "plain", **changes: Any) -> ModelSpec:
    config = VARIANTS["Gemma4", name] | changes
    return parse_spec(config | {"architectures": ["Gemma4ForCausalLM"]})


def make_caches(spec: ModelSpec, layout: CacheLayout) -> list[Any]:
    gpu = CudaCache.make(spec, layout, PAGES, BLOCK, 80, torch.device("cpu"))
    gpu.data.fill_(torch.nan)  # nothing is read that was not written
    cpu = make_cache(spec, PAGES, BLOCK, "float32", max_model_len=80, layout=layout)
    return [cpu, gpu]


def logits(spec: ModelSpec, layout: CacheLayout, cache: Any) -> Tensor:
    """All logits of a prompt in three chunks and of two decode steps."""
    weights = random_weights(spec, "float32", seed=3)
    ids = random.Random(2).choices(range(160), k=50)
    blocks, order = -(-len(ids) // BLOCK), random.Random(4)
    pages = order.sample(range(PAGES), layout.tables * blocks)
    table = torch.tensor(pages, dtype=torch.int32).view(layout.tables, 1, blocks)
    results = []
    for first, last in ((0, 13), (13, 30), (30, 48), (48, 49), (49, 50)):
        row = BatchRow(ids[first:last], first, table[0, 0].tolist(), last - first)
        batch = make_batch([row], BLOCK)
        positions = torch.arange(first, last)
        slots = table[:, 0].long()[:, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = evolve(batch, table=table, slots=slots.to(batch.slots))
        results.append(forward(spec, weights, batch, cache))
    return torch.cat(results)


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
@pytest.mark.parametrize("grouped", [True, False])
def test_both_caches_give_the_same_in_both_layouts(
    key: tuple[str, str], grouped: bool
) -> None:
    names = {"architectures": [f"{key[0]}ForCausalLM"]}
    spec = parse_spec(VARIANTS[key] | {"initializer_range": 0.1} | names)
    plain = one_group(spec)
    want = logits(spec, plain, make_caches(spec, plain)[0])
    layout = cache_layout(spec) if grouped else plain
    for cache in make_caches(spec, layout):
        torch.testing.assert_close(
            logits(spec, layout, cache), want, rtol=1e-4, atol=1e-4
        )


def test_smaller_layers_share_a_place() -> None:
    spec = spec_of("plain", **LARGE)
    sizes = [attention.kv_elements for attention in spec.attentions]
    assert sizes == [*[8192] * 5, 4096] * 10
    assert [attention.layers_a_slot for attention in spec.attentions[4:6]] == [1, 2]
    layout = cache_layout(spec)
    assert layout.groups == (CacheGroup(WINDOW, 10), CacheGroup(0, 1))
    assert layout.layers_a_page == 5
    assert layout.padding == 0
    full = layout.places[5::6]
    assert full[:3] == (LayerPlace(10, 0, 0), LayerPlace(10, 0, 1), LayerPlace(10, 1, 0))
    element = 4  # float32
    assert layer_kv_bytes_per_token(spec) == 8192 * element
    assert kv_bytes_per_token(spec) == (50 * 8192 + 10 * 4096) * element
    assert one_group(spec).layers_a_page == 55


def test_no_two_layers_have_the_same_memory() -> None:
    for ranks in (1, 2, 8):
        whole = spec_of("plain", **LARGE | TWELVE)
        spec = whole.for_rank(RankInfo(0, Parallel(tensor=ranks)))
        layout = cache_layout(whole)
        assert cache_layout(spec) == layout
        caches = make_caches(spec, layout)
        for cache in caches:
            cache.data.zero_()
        cpu, gpu = (cache.layers for cache in caches)
        for index in range(len(spec.layers)):
            place = layout.place(index)
            for tensors in (gpu[index], (cpu[index].stored,)):
                for tensor in tensors:
                    page = tensor[place.table]  # page n is of table n
                    assert (page == 0).all(), (ranks, index, place)
                    page.fill_(index + 1)


def test_sharing_layers_keep_nothing() -> None:
    spec = spec_of("shared keys")
    assert [layer.shares_keys_of for layer in spec.layers] == [
        None,
        None,
        None,
        2,
        1,
        1,
    ]
    layout = cache_layout(spec)
    assert layout.places[3:] == tuple(layout.places[i] for i in (2, 1, 1))
    kept = [attention.kv_elements for attention in spec.attentions[:3]]
    assert kv_bytes_per_token(spec) == 4 * sum(kept)
    widths = [feed_forward.intermediate_size for feed_forward in spec.feed_forwards]
    assert widths == [96] * 3 + [192] * 3


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_kv_shared_layers": 3}, ["num_kv_shared_layers", "a layer of each kind"]),
    ({"num_kv_shared_layers": 2}, ["num_kv_shared_layers", "a layer of each kind"]),
    ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention 'all'"]),
    ({"vocab_size_per_layer_input": 100}, ["vocab_size_per_layer_input", "160"]),
    ({"sliding_window": None}, ["no sliding window"]),
    ({"global_head_dim": 30}, ["global_head_dim", "a multiple of 4"]),
    (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        ["num_global_key_value_heads", "num_attention_heads = 4"],
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling"]),
    ({"per_layer_config": {"7": {"head_dim": 8}}}, ["per_layer_config", "layers 0 to 2"]),
    ({"per_layer_config": {"1": {"hidden_size": 8}}}, ["['hidden_size'] of '1'"]),
    ({"per_layer_config": {"1": 3}}, ["per_layer_config", "for each layer"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of("inputs of layers", **changes)
    for word in words:
        assert word in str(caught.value)


def test_sizes_by_layer_are_read_in_both_forms() -> None:
    """As published, and as transformers writes them."""
    spec = spec_of("plain")
    written = spec_of("plain", global_head_dim=8, per_layer_config={"1": {}, "2": {}})
    dims = [[attention.query_dim for attention in s.attentions] for s in (spec, written)]
    assert dims == [[16, 32, 32], [16, 16, 16]]
    by_layer = {"per_layer_config": {"1": {"head_dim": 32}, "2": {"head_dim": 32}}}
    assert spec_of("plain", **by_layer) == spec


def test_other_families_refuse_sizes_by_layer() -> None:
    with pytest.raises(CheckpointError, match="per_layer_config"):
        parse_spec(config_of("Llama", per_layer_config={"0": {"head_dim": 8}}))


def test_peers_of_several_ranks_are_refused() -> None:
    plan: Any = SimpleNamespace(prefill_ranks=1, decode_ranks=2)
    check_peers(plan, parse_spec(config_of("Llama")))
    single: Any = SimpleNamespace(prefill_ranks=1, decode_ranks=1)
    check_peers(single, spec_of())
    with pytest.raises(ConfigError, match=r"Gemma4.*tensor_parallel_size"):
        check_peers(plan, spec_of())


def test_stages_are_refused() -> None:
    streams = parse_spec(written("Gemma3n", VARIANTS["Gemma3n", "plain"]))
    for spec in (spec_of("shared keys"), spec_of("inputs of layers"), streams):
        with pytest.raises(CheckpointError, match="pipeline_parallel_size"):
            spec.for_rank(RankInfo(0, Parallel(pipeline=2)))
