"""`minfer quantize`: what it writes is what the loader makes, and what compressed-tensors
and transformers read.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minfer import LLM
from minfer.effects.cli.main import main
from minfer.effects.cli.verify.logit_differences import packed_logits
from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.quantization import LEVELS, requested
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint import quantize_checkpoint
from minfer.effects.models.checkpoint.checkpoint import load_weights, read_config
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.formats.write_compressed_tensors import quantization_config
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.circles import long
from tests.effects.families import SMALL
from tests.effects.models.formats.test_formats import leaves
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.schemes import CASES
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import write_checkpoint

SIZES: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 96}
# Of several blocks of 128, and of a part of one.
BLOCKS: Final = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 160,
}
WRITTEN: Final = ("fp8", "fp8_per_block", "int8", "int4-g32")
PRESETS: Final = {
    "fp8": "FP8_DYNAMIC",
    "fp8_per_block": "FP8_BLOCK",
    "int8": "W8A8",
    "int4": "W4A16",
}
# The matrices of all experts are one tensor.
STACKED: Final = (("GptOss", "alternate"), ("Gemma4", "all"))
READ_BY_THEM: Final[tuple[tuple[str, str], ...]] = (
    ("Llama", "biases, tied"),
    ("Qwen3", "plain"),
    ("Qwen3Moe", "experts"),
)
PROMPTS: Final = [[1, 2, 3, 4, 5], [7, 100, 12] * 9]
SHORT_PROMPTS: Final = [[7 + number, 100 - number, 12] for number in range(27)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "tiny", **SIZES)
    tensors = load_file(folder / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    config = read_config(folder) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def command(source: Path, level: str, output: Path) -> list[str]:
    words = ["quantize", "--model", source, "--quantization", level, "-o", output]
    return [str(word) for word in words]


def write(source: Path, level: str, output: Path) -> Path:
    assert main(command(source, level, output)) == 0
    return output


def matrices(folder: Path, level: str | None = None) -> list[Linear]:
    """The leaves of a checkpoint, quantized as it is loaded if there is a level."""
    spec = parse_spec(read_config(folder), str(folder))
    quantization = requested(level, spec.quantization)
    spec = as_stored(evolve(spec, quantization=quantization), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layers, "in_kernel_layout", lambda leaf: leaf
        )  # not packed by a library
        return leaves(load_weights(folder, spec))


def check_same(folder: Path, level: str, output: Path) -> None:
    pairs = [*zip(matrices(folder, level), matrices(output), strict=True)]
    assert any(not loaded.scheme.is_plain for loaded, _ in pairs)
    for loaded, written in pairs:
        assert loaded.scheme == written.scheme
        assert loaded.weight.dtype == written.weight.dtype
        assert loaded.weight.view(torch.uint8).equal(written.weight.view(torch.uint8))
        if loaded.scales is not None:
            assert loaded.scaled.equal(written.scaled)


def family(folder: Path, key: tuple[str, str], sizes: dict[str, Any]) -> Any:
    config = VARIANTS[key] | sizes
    if "Moe" not in key[0] and "moe_intermediate_size" not in CASES.get(key, {}):
        config.pop("moe_intermediate_size", None)
    return save(str(folder), key[0], config)


@pytest.mark.parametrize("level", WRITTEN)
def test_read_back_it_is_what_the_loader_makes(
    source: Path, tmp_path: Path, level: str
) -> None:
    check_same(source, level, write(source, level, tmp_path / "made"))


def test_a_tensor_that_the_index_leaves_out_is_written(
    source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    listed = dict.fromkeys(tensors, "one.safetensors")
    del listed["model.layers.0.mlp.up_proj.weight"]
    index = {"weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_same(folder, "fp8", write(folder, "fp8", tmp_path / "made"))


@pytest.mark.parametrize(
    ("key", "level"),
    long(
        # Falcon's fused matrices are stored in another order of rows than in memory, so
        # that blocks of rows are others.
        (key, "fp8" if key[0] == "Falcon" else WRITTEN[i % len(WRITTEN)])
        for i, key in enumerate(case for case in CASES if case not in STACKED)
    ),
)
def test_every_family_is_read_back(
    tmp_path: Path, key: tuple[str, str], level: str
) -> None:
    family(tmp_path / "source", key, CASES[key])
    check_same(
        tmp_path / "source",
        level,
        write(tmp_path / "source", level, tmp_path / "made"),
    )


@pytest.mark.parametrize("level", long(["fp8", "int4-g32"]))
def test_tokens_are_those_of_the_level_at_load(tmp_path: Path, level: str) -> None:
    family(tmp_path / "source", READ_BY_THEM[2], BLOCKS)
    written = write(tmp_path / "source", level, tmp_path / "made")
    expected, _ = serve_twice(
        str(tmp_path / "source"), PROMPTS, 12, quantization=level, **SMALL
    )
    assert serve_twice(str(written), PROMPTS, 12, **SMALL)[0] == expected


@pytest.mark.parametrize(("level", "preset"), long(PRESETS.items()))
def test_configs_are_the_schemes_that_compressed_tensors_names(
    level: str, preset: str
) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install '.[dev]'")
    from compressed_tensors.quantization import (
        QuantizationConfig,
        preset_name_to_scheme,
    )

    config = QuantizationConfig.model_validate(quantization_config(LEVELS[level], []))
    scheme, expected = (
        config.config_groups["group_0"],
        preset_name_to_scheme(preset, ["Linear"]),
    )
    for arguments in (scheme.weights, expected.weights, scheme.input_activations):
        if arguments is not None:  # how scales are found in training: not used by readers
            arguments.observer = None
    if expected.input_activations is not None:
        expected.input_activations.observer = None
    assert scheme.weights == expected.weights
    assert scheme.input_activations == expected.input_activations


@pytest.mark.parametrize("level", long(WRITTEN))
def test_compressed_tensors_reads_the_same_numbers(tmp_path: Path, level: str) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install '.[dev]'")
    from tests.effects.formats_by_others import decompress

    family(tmp_path / "source", READ_BY_THEM[2], BLOCKS)
    written = write(tmp_path / "source", level, tmp_path / "made")
    decompress(written, tmp_path / "copy")
    for quantized, dequantized in zip(
        matrices(written), matrices(tmp_path / "copy"), strict=True
    ):
        assert dequantized.scheme.is_plain
        assert dequantize(quantized).equal(dequantized.weight)


# Experts that are not in FP8 by outputs, or in 4 bits, transformers does not read itself.
THEIRS: Final = [
    (key, level)
    for key in READ_BY_THEM
    for level in WRITTEN
    if key[0] != "Qwen3Moe" or level in ("fp8", "int4-g32")
]


# That the loading attribute `dequantize` alone counts, of the config that is passed.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(("key", "level"), long(THEIRS))
def test_transformers_has_the_same_matrices_and_tokens(
    tmp_path: Path, key: tuple[str, str], level: str
) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install '.[dev]'")
    import transformers

    family(tmp_path / "source", key, BLOCKS)
    written = write(tmp_path / "source", level, tmp_path / "made")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    quantization = transformers.CompressedTensorsConfig(dequantize=True)
    model = read(written, dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(tmp_path / "copy")
    config = read_config(tmp_path / "source")
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    for quantized, dequantized in zip(
        matrices(written), matrices(tmp_path / "copy"), strict=True
    ):
        assert dequantize(quantized).equal(dequantized.weight)
    if LEVELS[level].activations == "as they are":
        expected = [their_tokens(model, [prompt], 12)[0] for prompt in PROMPTS]
        assert serve_twice(str(written), PROMPTS, 12, **SMALL)[0][0] == expected


@pytest.mark.parametrize("key", long([(key,) for key in READ_BY_THEM[:2]]))
def test_transformers_logits_with_rounded_activations(
    tmp_path: Path, key: tuple[str, str]
) -> None:
    """FP8 alone: for INT8 compressed-tensors divides by 127.5, and minfer by 127. Where
    an activation is halfway between two numbers, the last bit of a sum before it decides
    which is taken, by the processor: so it and the positions behind it in its prompt are
    less close.
    """
    pytest.importorskip("compressed_tensors", reason="pip install '.[dev]'")
    import transformers

    family(tmp_path / "source", key, BLOCKS)
    written = write(tmp_path / "source", "fp8", tmp_path / "made")
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(written, dtype=torch.float32)
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **SMALL}
    with LLM(str(written), **settings) as llm:
        logits = torch.stack([*packed_logits(llm, SHORT_PROMPTS)])
    with torch.inference_mode():
        expected = model(torch.tensor(SHORT_PROMPTS)).logits
    distances = (logits - expected).abs().amax(-1) / expected.std()
    assert float(distances.median()) < 1e-4
    assert float(distances.max()) < 0.3


def test_large_checkpoints_are_in_several_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40_000
    monkeypatch.setattr(quantize_checkpoint, "MAX_SHARD_BYTES", limit)
    written = write(source, "int8", tmp_path / "made")
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = sorted(written.glob("*.safetensors"))
    assert len(files) > 2
    assert {path.name for path in files} == {*index["weight_map"].values()}
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"][name] == path.name
                total += file.get_tensor(name).nbytes
        assert path.stat().st_size < limit + 8_000  # and the header
    assert total == index["metadata"]["total_size"]
    check_same(source, "int8", written)


def test_other_files_are_copied_and_other_weights_are_not(
    source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    config = read_config(folder) | {"transformers_weights": "other.safetensors"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "LICENSE", "pytorch_model.bin", ".hidden"):
        (folder / name).write_text("{}")
    template = Path("additional_chat_templates", "tools.jinja")
    (folder / template).parent.mkdir()
    (folder / template).write_text("text")
    written = write(folder, "fp8", tmp_path / "made" / "deeper")
    assert sorted(path.name for path in written.iterdir()) == [
        "LICENSE",
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (written / template).read_text() == "text"
    tokenizer = "tokenizer.json"
    assert (written / tokenizer).read_bytes() == (folder / tokenizer).read_bytes()
    check_same(folder, "fp8", written)


def test_what_is_not_quantized_is_named(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["model.layers.1.input_layernorm.weight"]
    norm[0] = 100 * norm.float().median()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = write(folder, "int8", tmp_path / "made")
    quantization = read_config(written)["quantization_config"]
    assert quantization["format"] == "int-quantized"
    qkv = [f"model.layers.1.self_attn.{letter}_proj" for letter in "qkv"]
    assert sorted(quantization["ignore"]) == sorted(["re:.*lm_head$", *qkv])
    check_same(folder, "int8", written)


def test_an_interrupted_run_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_checkpoint, "write_file", interrupt)
    assert main(command(source, "fp8", tmp_path / "made")) == 130
    assert [*tmp_path.iterdir()] == []


def refused(
    capsys: pytest.CaptureFixture[str], source: Path, level: str, output: Path
) -> str:
    """Run a command that must be refused with one line, and leave nothing."""
    before = sorted(output.parent.rglob("*"))
    assert main(command(source, level, output)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minfer: ")
    assert err.count("\n") == 1
    assert sorted(output.parent.rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("level", "named"),
    [("mxfp4", "mxfp4"), ("int3", "int4-g32"), ("int4", "do not divide")],
)
def test_levels_that_cannot_be_written(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    level: str,
    named: str,
) -> None:
    error = refused(capsys, source, level, tmp_path / "made")
    assert named in error
    assert level == "mxfp4" or "mxfp4" not in error


def test_folders_that_have_contents(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "exists already" in refused(capsys, source, "fp8", tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "exists already" in refused(capsys, source, "fp8", tmp_path / "full")
    assert "no partial output" in refused(
        capsys, source, "fp8", tmp_path / "file" / "made"
    )
    assert main(command(source, "fp8", Path("/proc"))) == 2
    assert "is a mount point" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    write(source, "fp8", tmp_path / "empty")


def test_too_little_space(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(1, 1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "0.00 GB are free" in refused(capsys, source, "fp8", tmp_path / "made")


def test_files_in_the_format_of_llama_cpp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    err = refused(capsys, tmp_path / "model.gguf", "fp8", tmp_path / "made")
    assert "is a file (GGUF)" in err


def test_checkpoints_that_are_quantized_already(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = write(source, "fp8", tmp_path / "made")
    capsys.readouterr()
    assert "quantized already" in refused(capsys, written, "fp8", tmp_path / "again")


def test_a_tied_model_with_another_output_head(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    config = read_config(folder) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    err = refused(capsys, folder, "fp8", tmp_path / "made")
    assert "lm_head.weight differs" in err


def test_models_that_cannot_be_loaded_quantized(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    config = read_config(folder)
    config |= {"model_type": "olmo", "architectures": ["OlmoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "'olmo'" in refused(capsys, folder, "fp8", tmp_path / "made")


@pytest.mark.parametrize("key", long([(("GptOss", "alternate"),)]))
def test_matrices_of_all_experts_in_one_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: tuple[str, str]
) -> None:
    family(tmp_path / "source", key, {})
    capsys.readouterr()
    err = refused(capsys, tmp_path / "source", "fp8", tmp_path / "made")
    assert "experts.gate_up_proj has the matrices of all experts" in err


def test_numbers_that_cannot_be_rounded(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"{name} has numbers" in refused(capsys, folder, "fp8", tmp_path / "made")
