"""Settings of models with recurrent layers: a tiny Qwen3-Next."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.cli.compare.levels import levels_of
from minfer.effects.execution.tiers.peers.peer_plan import DECODE, PeerPlan
from minfer.effects.models.architecture.gated_delta import GatedDelta
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.layout.cache_layout import layout_for
from minfer.effects.models.layout.shapes import captured_tokens, pending_state_bytes
from minfer.effects.models.ranks import RankInfo
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import NotEnoughMemoryError, describe
from minfer.effects.setup.prepare import Setup, prepare
from minfer.effects.setup.recurrent_layers import check_draft_layers, state_keeping
from minfer.records.config import CacheGroup
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state_keeping import StateKeeping
from minfer.values.checks import ConfigError
from tests.effects.published_configs import PUBLISHED
from tests.effects.tiny_families import VARIANTS, written
from tests.effects.tiny_model import CONFIG, write_checkpoint

KEY = ("Qwen3Next", "plain")
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    config = written(KEY[0], VARIANTS[KEY])
    (made / "config.json").write_text(json.dumps(config, default=str))
    return made


def prepared(folder: Path, **settings: Any) -> Setup:
    sizes = {"block_size": 8, "max_num_seqs": 4, "num_gpu_blocks_override": 300}
    args = {"device": "cpu", "dtype": "float32", "load_format": "dummy"}
    return prepare(EngineArgs(model=str(folder), **{**args, **sizes, **settings}))


def test_the_group_of_states_is_the_last_of_an_engine(folder: Path) -> None:
    setup = prepared(folder)
    assert setup.config.groups[:-1] == (CacheGroup(),)
    assert setup.config.groups[-1].state
    pages = setup.config.state_pages
    assert pages > 1
    memory = setup.memory
    assert memory.block_bytes % 128 == 0
    lines = dict(
        line.split("  ", 1) for line in describe(memory, "m").splitlines() if "  " in line
    )
    lines = {name: text.strip() for name, text in lines.items()}
    assert lines["state of a sequence"].endswith(f"(float32) in {pages} blocks")
    assert lines["states of all rows"].endswith(f"in {4 * pages} blocks, for 4 rows")
    # Beside it a row's own and padding rows' states.
    [with_a_row, with_two] = (
        prepared(folder, max_num_seqs=n).memory.activations for n in (1, 2)
    )
    assert with_two > with_a_row > pages * memory.block_bytes


def test_the_type_of_states_is_chosen_by_name(folder: Path) -> None:
    auto, full, half = (
        prepared(folder, state_dtype=name) for name in ("auto", "float32", "bfloat16")
    )
    assert [setup.spec.state_dtype for setup in (auto, full, half)] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert half.config.state_pages < full.config.state_pages
    assert auto.fingerprint == full.fingerprint != half.fingerprint
    assert "(bfloat16) in" in describe(half.memory, "m")
    with pytest.raises(ConfigError, match="state_dtype must be one of auto, float32"):
        EngineArgs(state_dtype="float16")


def test_a_model_without_recurrent_layers_has_no_states(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    setup = prepared(tmp_path)
    assert setup.config.state_group is None
    assert "state" not in describe(setup.memory, "m")
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path, state_dtype="bfloat16")
    assert str(caught.value) == (
        "state_dtype 'bfloat16' is for recurrent layers, and Qwen2ForCausalLM has none; "
        "leave it out"
    )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"kv_peers": PeerPlan(name="d", role=DECODE, prefill_ranks=2)},
            r"rank by rank, and 2 \(--prefill-tensor-parallel-size\) is not 1",
        ),
        ({"block_size": 1}, "use --block-size 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        prepared(folder, **settings)


def test_engines_exchange_states(folder: Path) -> None:
    plan = PeerPlan(name="d", role=DECODE, prefill_ranks=2, decode_ranks=2)
    setup = prepared(folder, kv_peers=plan, tensor_parallel_size=2)
    store = setup.config.external_store
    assert store is not None
    assert store.storing >= setup.config.state_pages


def test_each_stage_has_layers_with_attention(folder: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="of its 4 layers, stage 0 of 2 would"
    ):
        prepared(folder, pipeline_parallel_size=2)


def test_stages_have_states_of_their_own_layers_in_the_same_pages(tmp_path: Path) -> None:
    """The first stage has three recurrent layers and one with attention, the other one
    the opposite.
    """
    layers = [*["linear_attention"] * 3, *["full_attention"] * 4, "linear_attention"]
    settings = {**VARIANTS[KEY], "num_hidden_layers": 8, "layer_types": layers}
    config = written(KEY[0], settings)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    setup = prepared(tmp_path, pipeline_parallel_size=2)
    specs = [setup.spec.for_rank(RankInfo(i, setup.args.parallel)) for i in range(2)]
    layouts = [layout_for(spec, setup.config) for spec in specs]
    pages = setup.config.state_pages
    assert [layout.groups for layout in layouts] == [setup.config.groups] * 2
    states = [layout.states for layout in layouts]
    assert [state and state.pages for state in states] == [2, pages]
    assert pages > 4, "of three layers in pages of one"


def test_a_draft_model_has_no_recurrent_layers(folder: Path, tmp_path: Path) -> None:
    check_draft_layers(prepared(write_checkpoint(tmp_path)).spec)
    with pytest.raises(ConfigError, match="a draft model with recurrent layers"):
        check_draft_layers(prepared(folder).spec)


def test_drafts_take_memory_until_they_are_accepted(folder: Path) -> None:
    """What the recurrent layers keep of their inputs."""
    setup = prepared(folder, speculative_config=NGRAM)
    spec, config = setup.spec, setup.config
    layers = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
    [first, *_] = layers
    assert isinstance(first, GatedDelta)
    width = 2 * first.key_size + 2 * first.value_size + 2 * first.heads
    assert pending_state_bytes(spec, config, 5) == 5 * len(layers) * width * 4
    assert pending_state_bytes(spec, evolve(config, speculation=None), 5) == 0


def inside_from(setup: Setup) -> int:
    """The inputs of a chunk for which there is no graph."""
    return 1 + captured_tokens(setup.spec, setup.config.max_num_batched_tokens)


def test_states_are_kept_inside_chunks_that_have_no_graph() -> None:
    spec = parse_spec(PUBLISHED["Qwen3-Next-80B-A3B"])
    assert state_keeping(spec, 64, None, 8192).inside_from == 3073
    assert state_keeping(spec, 64, None, 2048).inside_from > 2048, "all have one"
    assert not state_keeping(parse_spec(CONFIG), 64, None, 8192).inside_from


def test_a_draft_model_has_states_kept_less_often(folder: Path) -> None:
    setup = prepared(folder, speculative_config=NGRAM)
    assert setup.config.states == StateKeeping(inside_from=inside_from(setup))
    drafts = Speculation(drafter=DEVICE, drafts=3, adaptive=False)
    for block_size, stride in ((16, 16), (64, 4), (512, 1)):
        budget = setup.config.max_num_batched_tokens
        keeping = state_keeping(setup.spec, block_size, drafts, budget)
        expected = StateKeeping(
            decode_stride_blocks=stride, inside_from=inside_from(setup)
        )
        assert keeping == expected


def test_without_a_prefix_cache_states_are_kept_for_samples_alone(folder: Path) -> None:
    setup = prepared(folder, enable_prefix_caching=False)
    assert setup.config.states == StateKeeping(
        stride_blocks=0,
        decode_stride_blocks=0,
        every_prompt=False,
        inside_from=inside_from(setup),
    )


def test_a_pool_without_room_for_a_state_names_bytes_and_options(folder: Path) -> None:
    whole = prepared(folder)
    pages, size = whole.config.state_pages, whole.memory.block_bytes
    with pytest.raises(NotEnoughMemoryError) as caught:
        prepared(
            folder,
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=(pages - 1) * size,
        )
    text = str(caught.value)
    assert f"({pages} of them, {pages * size / 1024:.2f} KiB, for the state" in text
    assert "--max-model-len 2" not in text
    assert "; raise --kv-cache-memory-bytes" in text
    with pytest.raises(NotEnoughMemoryError, match="; use --max-model-len 17, or raise"):
        prepared(folder, num_gpu_blocks_override=pages + 2)


def test_ranks_have_states_in_pages_of_their_own(folder: Path) -> None:
    """A rank has half of the heads, in pages of half of the key heads."""
    whole, of_two = (prepared(folder, tensor_parallel_size=n) for n in (1, 2))
    assert of_two.memory.block_bytes < whole.memory.block_bytes
    assert of_two.memory.spec.rank_info.parallel.tensor == 2
    assert of_two.config.state_pages > 0


def test_states_are_a_level_of_compare(folder: Path) -> None:
    args = EngineArgs(model=str(folder))
    [level] = levels_of(["state:bfloat16"], args)
    assert level.args == evolve(args, state_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"state: and a value of --state-dtype \(float"):
        levels_of(["state:float16"], args)


def test_the_spec_has_states_in_float32_by_default() -> None:
    assert parse_spec(written(KEY[0], VARIANTS[KEY])).state_dtype == "float32"
