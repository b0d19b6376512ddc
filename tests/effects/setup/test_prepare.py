"""Sizes of an engine that follow from what it is for."""

import json
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import NotEnoughMemoryError
from minfer.effects.setup.prepare import prepare, prepare_as_decided
from tests.effects.tiny_model import CONFIG, write_checkpoint

NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(("hidden", "tokens"), [(64, 8192), (8192, 512)])
def test_where_tokens_are_streamed_a_steps_work_is_bounded(
    tmp_path: Path, hidden: int, tokens: int
) -> None:
    sizes = {"hidden_size": hidden, "num_hidden_layers": 80, "vocab_size": 32_000}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    config = {"model_type": "qwen2", "dtype": "bfloat16", "intermediate_size": 4 * hidden}
    limits = {"max_position_embeddings": 8192, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    reported = {
        "architectures": ["Qwen2ForCausalLM"],
        **config,
        **sizes,
        **heads,
        **limits,
    }
    (tmp_path / "config.json").write_text(json.dumps(reported))
    args = EngineArgs(
        model=str(tmp_path), device="cuda", streaming=True, load_format="dummy"
    )
    assert prepare(args, limit=10**13).config.max_num_batched_tokens == tokens
    by_hand = attrs.evolve(args, max_num_batched_tokens=4096)
    assert prepare(by_hand, limit=10**13).config.max_num_batched_tokens == 4096
    not_streamed = attrs.evolve(args, streaming=False)
    assert prepare(not_streamed, limit=10**13).config.max_num_batched_tokens == 8192


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, None),
        ({"itl_target": "none"}, None),
        ({"itl_target": "auto"}, 0.0),
        ({"itl_target": 12.5}, 0.0125),
        ({"speculative_config": NGRAM, "itl_target": "auto"}, 0.0),
    ],
)
def test_the_target_for_the_time_between_tokens(
    tmp_path: Path, settings: dict[str, Any], seconds: float | None
) -> None:
    write_checkpoint(tmp_path)
    args = EngineArgs(model=str(tmp_path), dtype="float32", **settings)
    assert prepare(args).config.itl_target == seconds


def say(folder: Path, **changes: object) -> EngineArgs:
    """A checkpoint whose config has these changes; the settings for it."""
    write_checkpoint(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, "torch_dtype": None, **changes}))
    return EngineArgs(model=str(folder), dtype="float32")


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "auto"])
def test_a_config_that_names_a_type_that_does_not_run(
    tmp_path: Path, name: str, dtype: str
) -> None:
    args = say(tmp_path, **{name: dtype})
    assert prepare(args).spec.dtype == "float32"
    says = rf"{name} must be one of .*{dtype}.*--dtype"
    with pytest.raises(CheckpointError, match=says):
        prepare(attrs.evolve(args, dtype="auto"))


def test_what_the_family_table_refuses_is_tried_with_transformers(tmp_path: Path) -> None:
    """And if that refuses too, the error is the first one. Wrong values are not tried."""
    args = say(tmp_path, hidden_act="gelu")
    with pytest.raises(UnsupportedModelError, match="hidden_act 'gelu'"):
        parse_spec(read_config(tmp_path))
    assert prepare(args).spec.parameters
    with pytest.raises(CheckpointError, match="hidden_act 'nothing'"):
        prepare(say(tmp_path, hidden_act="nothing"))
    for key, value in (("hidden_size", "many"), ("rms_norm_eps", 0.0)):
        with pytest.raises(CheckpointError, match=f"{key} must be"):
            prepare(say(tmp_path, **{key: value}))


def test_a_gguf_file_is_not_tried_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose model is not loaded from one."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(
        "minfer.effects.setup.prepare.read_config",
        lambda _: {**CONFIG, "hidden_act": "gelu"},
    )
    with pytest.raises(UnsupportedModelError, match="hidden_act 'gelu'"):
        prepare(EngineArgs(model=str(file)))


def test_the_longest_context_that_fits_is_found(tmp_path: Path) -> None:
    """One more token does not fit; a model that fits whole has its own context."""
    args = say(tmp_path)
    model_length = prepare(args).spec.max_position_embeddings
    block = prepare(args, limit=1 << 40).memory.block_bytes
    for limit, cache in ((None, 3 * block), (1 << 40, 3 * block), (None, 1 << 30)):
        sized = attrs.evolve(args, kv_cache_memory_bytes=cache)
        setup = prepare(attrs.evolve(sized, max_model_len=-1), limit=limit)
        length = setup.config.max_model_len
        assert setup.args.max_model_len == length
        assert prepare(attrs.evolve(sized, max_model_len=length), limit=limit).memory
        if length == model_length:
            assert cache == 1 << 30
            continue
        assert length == 3 * args.block_size + 1  # the last token is not kept
        with pytest.raises(NotEnoughMemoryError):
            prepare(attrs.evolve(sized, max_model_len=length + 1), limit=limit)
    needed = prepare(args, limit=1 << 40).memory
    small = needed.weights + (needed.total - needed.weights) // 2
    setup = prepare(attrs.evolve(args, max_model_len=-1), limit=small)
    assert 0 < setup.config.max_model_len <= model_length
    with pytest.raises(NotEnoughMemoryError):
        prepare(attrs.evolve(args, max_model_len=-1), limit=needed.weights // 2)


def test_another_process_has_the_length_that_was_found(tmp_path: Path) -> None:
    args = say(tmp_path)
    block = prepare(args, limit=1 << 40).memory.block_bytes
    args = attrs.evolve(args, max_model_len=-1, kv_cache_memory_bytes=3 * block)
    setup = prepare(args)
    remote_setup = prepare_as_decided(
        args, "cpu", setup.config.num_blocks, setup.config.max_model_len
    )
    assert remote_setup.config == setup.config
    assert remote_setup.fingerprint == setup.fingerprint
