"""Which matrices stay as they are when a checkpoint is quantized as it is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from safetensors.torch import load_file, save_file

from minfer.effects.models.architecture.quantization import LEVELS, requested
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.stored_matrices import MAX_NORM_RATIO, as_stored
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError
from tests.effects.checkpoints.formats_made import FORMATS
from tests.effects.tiny_model import read_spec, write_checkpoint

NORM = "model.layers.1.post_attention_layernorm.weight"
FIRST = "model.layers.0.input_layernorm.weight"


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}


def stored(folder: Path, level: str) -> ModelSpec:
    spec = evolve(read_spec(folder), quantization=requested(level, None))
    return as_stored(spec, folder)


def plain(folder: Path, level: str) -> set[str]:
    quantization = stored(folder, level).quantization
    assert quantization is not None
    return {*quantization.plain}


@pytest.mark.parametrize("level", LEVELS)
def test_only_int8_leaves_out_matrices_that_read_outliers(
    tmp_path: Path, level: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", **WIDE)
    assert plain(folder, level) == set()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[NORM][5] = 1.01 * MAX_NORM_RATIO
    tensors[FIRST][3] = -0.99 * MAX_NORM_RATIO
    save_file(tensors, file, {"format": "pt"})
    readers = {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")}
    assert plain(folder, level) == (readers if level == "int8" else set())
    tensors[FIRST][3] = -1.01 * MAX_NORM_RATIO
    save_file(tensors, file, {"format": "pt"})
    readers |= {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    assert plain(folder, level) == (readers if level == "int8" else set())


def test_files_that_cannot_be_read_change_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    intact, deep = file.read_bytes(), b"[" * 100_000
    tensors = load_file(file)
    save_file(tensors | {FIRST: tensors[FIRST][:0]}, file, {"format": "pt"})
    assert plain(folder, "int8") == set()
    headers = (
        b"[[1]]",
        b"1",
        b"null",
        b'"x"',
        b"\xff",
        deep,
        b'{"%b": 1}' % FIRST.encode(),
    )
    damaged = [len(header).to_bytes(8, "little") + header for header in headers]
    no_sense = b"damaged, and its length makes no sense"
    for content in (no_sense, b"", intact[: len(intact) // 2], *damaged):
        file.write_bytes(content)
        assert plain(folder, "int8") == set()
    file.unlink()
    assert plain(folder, "int8") == set()


def test_groups_that_do_not_divide_are_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96)
    (folder / "model.safetensors").unlink()
    matrix = r"model\.layers\.0\.mlp\.down_proj"
    with pytest.raises(UnsupportedModelError, match=f"{matrix}: groups of 64 .* 96"):
        prepare(EngineArgs(model=str(folder), quantization="int4-g64", device="cpu"))
    assert plain(folder, "int4-g32") == set()


def test_no_two_levels_share_keys(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **WIDE)
    args = EngineArgs(model=str(folder), kv_cache_memory_bytes=1 << 24, device="cpu")
    levels = (None, *(name for name in LEVELS if name != "int4"))
    fingerprints = {
        prepare(evolve(args, quantization=level)).fingerprint for level in levels
    }
    assert len(fingerprints) == len(levels)
    same = [prepare(evolve(args, quantization=level)) for level in ("int4", "int4-g128")]
    assert same[0].fingerprint == same[1].fingerprint
    assert same[0].memory.weights == same[1].memory.weights


def test_a_scheme_of_the_cache_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    args = EngineArgs(model=str(folder), kv_cache_memory_bytes=1 << 24, device="cpu")
    config = json.loads((folder / "config.json").read_text())
    for scheme in (None, {"num_bits": 8, "type": "float"}, "static"):
        quantization = FORMATS["fp8 rows"][0] | {"kv_cache_scheme": scheme}
        config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        caplog.clear()
        prepare(args)
        warnings = [text for text in caplog.messages if "kv_cache_scheme" in text]
        assert len(warnings) == (scheme is not None)
        assert all("the KV cache is in float32" in text for text in warnings)


def test_a_checkpoint_that_is_quantized_already_is_not_quantized_again(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMATS["awq"][0]
    (folder / "config.json").write_text(json.dumps(config))
    quantization = read_spec(folder).quantization
    assert quantization is not None
    assert requested("awq", quantization) == requested(None, quantization) == quantization
    with pytest.raises(ConfigError, match=r"quantized already \(AWQ\)"):
        requested("int8", quantization)
    with pytest.raises(ConfigError, match=r"not quantized, and .* can be to fp8"):
        requested("awq", None)
