"""Quantized checkpoints of architectures outside the family table: greedy tokens and
log-probabilities are those of transformers on the matrices that they mean.
"""

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from minfer import LLM, SamplingParams
from minfer.effects.cli.compare.measure_level import held_bytes
from minfer.effects.cli.verify.rounded import RoundedProducts
from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import empty_leaves
from minfer.effects.models.checkpoint.checkpoint import TensorMismatchError, read_config
from minfer.effects.models.config_reader import CheckpointError, UnsupportedModelError
from minfer.effects.models.fallback import load_fallback
from minfer.effects.models.fallback.quantized import QuantizedLinear
from minfer.effects.models.layout.shapes import weight_bytes
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.fingerprint import fingerprint
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError as SettingError
from tests.circles import long
from tests.effects.checkpoints.formats_made import FORMATS, quantized
from tests.effects.tiny_fallback import VOCAB, save

PT: Final = {"format": "pt"}
WEIGHTS: Final = "model.safetensors"
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 12,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 19,
}
WIDE: Final = {"hidden_size": 64, "intermediate_size": 96}  # which groups of 32 divide
LENGTH: Final = 12
PROMPTS: Final = [
    [random.Random(n).randrange(1, VOCAB) for _ in range(n)] for n in (1, 9, 21, 30)
]
# Of log-probabilities: exact products, and those of activations that are rounded, where
# a difference of 1e-7 may be one of a step of 8 bits.
EXACT, ROUNDED = 2e-4, 0.05
KINDS: Final = ("gpt_neox", "phi3")
# The last has other names in its checkpoints, which transformers renames.
MORE: Final = ("exaone4", "nemotron", "arcee", "apertus", "exaone")


def made_of(kind: str, name: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and a copy with the numbers that it means."""
    save(folder, kind, **WIDE, **changes)
    return quantized(folder, folder, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt_neox", "gptq"),
        *long((kind, name) for kind in KINDS for name in FORMATS),
        *long((kind, name) for kind in MORE for name in ("awq", "fp8 blocks")),
    ],
)
def test_tokens_are_those_of_the_numbers_that_a_checkpoint_means(
    kind: str, name: str, tmp_path: Path
) -> None:
    folder, copy = made_of(kind, name, tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager")
    params = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=3, ignore_eos=True)
    with LLM(str(folder), **SMALL) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        quantization = llm.setup.spec.quantization
    assert quantization is not None
    assert quantization.plain == frozenset()
    is_exact = quantization.format.scheme.activations == "as they are"
    names = frozenset(f"{sizes.names[0]}.weight" for sizes in llm.setup.spec.linears)
    rounding: Any = RoundedProducts(model, names, quantization.format.scheme)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode(), nullcontext() if is_exact else rounding:
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        for row, listed, token in zip(expected, logprobs, tokens, strict=True):
            reported = torch.tensor([entry.logprob for entry in listed.values()])
            gaps = (row[[*listed]] - reported).abs()
            assert float(gaps.max()) < (EXACT if is_exact else ROUNDED)
            assert int(row.argmax()) == token or not is_exact


@pytest.mark.parametrize("name", ["gptq", *long(["fp8 rows", "fp8 blocks"])])
def test_weights_take_the_planned_memory(name: str, tmp_path: Path) -> None:
    folders = made_of("gpt_neox", name, tmp_path)
    specs = [spec_of(folder, dtype="bfloat16") for folder in folders]
    planned = [weight_bytes(spec, cuda=False) for spec in specs]
    num_bytes = [
        held_bytes(load_fallback(folder, read_config(folder), spec, make_cache))
        for folder, spec in zip(folders, specs, strict=True)
    ]
    assert num_bytes[1] - num_bytes[0] == planned[1] - planned[0] > 0


def test_a_move_to_another_device_takes_the_matrices_along(tmp_path: Path) -> None:
    folder, _ = made_of("gpt_neox", "awq", tmp_path)
    spec = spec_of(folder)
    leaves = [
        evolve(leaf, blocks=torch.ones(1, 4)) for leaf in empty_leaves(spec).values()
    ]
    moved = [QuantizedLinear(leaf).to("meta") for leaf in leaves]
    assert len(moved) == len(spec.linears) == 8
    for module in moved:
        leaf = module.leaf
        assert leaf.zeros is not None
        assert leaf.bias is not None
        assert leaf.blocks is not None
        tensors = (leaf.weight, leaf.scaled, leaf.zeros, leaf.bias, leaf.blocks)
        assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize(
    ("kind", "unquantized"),
    [("phi3", "layers.1.mlp.down_proj"), *long([("olmoe", "mlp.experts")])],
)
def test_matrices_that_files_leave_as_they_are_are_read(
    kind: str, unquantized: str, tmp_path: Path
) -> None:
    save(tmp_path, kind, **WIDE)
    folders = quantized(tmp_path, tmp_path, "awq", lambda name: unquantized in name)
    spec = spec_of(folders[0])
    assert spec.quantization is not None
    names = {sizes.names[0] for sizes in spec.linears}
    assert spec.quantization.plain == {name for name in names if unquantized in name}
    tokens, expected = map(greedy, folders)
    assert tokens == expected


def test_how_matrices_are_stored_is_in_the_keys_of_blocks(tmp_path: Path) -> None:
    folder, _ = made_of("phi3", "awq", tmp_path)
    setup = prepare(EngineArgs(model=str(folder)))
    assert setup.spec.quantization is not None
    config = read_config(folder)
    for spec in (setup.spec, evolve(setup.spec, quantization=None)):
        same = fingerprint(setup.args, config, spec, folder) == setup.fingerprint
        assert same == (spec is setup.spec)


@pytest.mark.long
def test_random_weights_are_quantized_as_the_config_says(tmp_path: Path) -> None:
    folder, _ = made_of("gpt_neox", "fp8 rows", tmp_path)
    (folder / WEIGHTS).unlink()
    assert greedy(folder, load_format="dummy") == greedy(folder, load_format="dummy")
    spec, config = spec_of(folder, load_format="dummy"), read_config(folder)
    plain = evolve(spec, quantization=None)
    num_bytes = [
        held_bytes(load_fallback(folder, config, model_spec, make_cache, seed=1))
        for model_spec in (plain, spec)
    ]
    planned = [weight_bytes(model_spec, cuda=False) for model_spec in (plain, spec)]
    assert num_bytes[0] - num_bytes[1] == planned[0] - planned[1] > 0


@pytest.mark.long
def test_rounded_activations_do_not_fail_the_self_check(tmp_path: Path) -> None:
    """With them, differences grow with each layer: to 2 % of the logits' spread here."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    save(tmp_path, "gpt_neox", **sizes, initializer_range=0.1)
    folder, _ = quantized(tmp_path, tmp_path, "fp8 blocks")
    load_fallback(folder, read_config(folder), spec_of(folder), make_cache)


def test_a_bias_of_zeros_that_the_model_has_not_is_harmless(tmp_path: Path) -> None:
    """AutoGPTQ gives every matrix one."""
    folder, _ = made_of("phi3", "gptq", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.self_attn.o_proj.bias"
    expected = greedy(folder)
    save_file({**tensors, name: torch.zeros(64)}, folder / WEIGHTS, PT)
    assert greedy(folder) == expected
    save_file({**tensors, name: torch.ones(64)}, folder / WEIGHTS, PT)
    with pytest.raises(TensorMismatchError, match=f"unexpected tensor {name}"):
        greedy(folder)


MISSING: Final = "gpt_neox.layers.1.mlp.dense_4h_to_h"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{MISSING}.scales"), f"missing tensor {MISSING}.scales"),
        (lambda t: t.pop(f"{MISSING}.bias"), f"missing tensor {MISSING}.bias"),
        (lambda t: t[f"{MISSING}.scales"].fill_(torch.nan), "scales are NaN"),
        (
            lambda t: t.update({f"{MISSING}.qweight": t[f"{MISSING}.qweight"][:-1]}),
            r"expected \[12, 64\] by config.json and its quantization_config",
        ),
    ],
)
def test_damaged_matrices_are_named(change: Any, message: str, tmp_path: Path) -> None:
    folder, _ = made_of("gpt_neox", "gptq", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(
        {k: tensor.contiguous() for k, tensor in tensors.items()}, folder / WEIGHTS, PT
    )
    with pytest.raises(CheckpointError, match=message):
        greedy(folder)


@pytest.mark.parametrize(
    ("kind", "stem", "name"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn", "GPT2LMHeadModel"),
        ("olmoe", "model.layers.0.mlp.experts.0.down_proj", "OlmoeForCausalLM"),
        ("phi3", "lm_head", "Phi3ForCausalLM"),
    ],
)
def test_other_quantized_modules_are_refused(
    kind: str, stem: str, name: str, tmp_path: Path
) -> None:
    folder, _ = made_of(kind, "awq", tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors = {k: tensor for k, tensor in tensors.items() if not k.startswith(f"{stem}.")}
    save_file({**tensors, f"{stem}.qweight": torch.zeros(1)}, folder / WEIGHTS, PT)
    message = rf"module {stem} is quantized \(AWQ, tensor {stem}.qweight\), but {name}"
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(folder)
    assert spec_of(folder, executor="dry")  # which reads no weights


def test_what_is_not_done_with_quantized_matrices_is_refused(tmp_path: Path) -> None:
    quantized_folder, copy = made_of("gpt_neox", "awq", tmp_path)
    with pytest.raises(UnsupportedModelError, match="cannot be divided among ranks"):
        spec_of(quantized_folder, tensor_parallel_size=2)
    for folder, level in ((quantized_folder, "fp8"), (copy, "fp8"), (copy, "awq")):
        with pytest.raises(SettingError, match=f"quantization '{level}'"):
            spec_of(folder, quantization=level)
    assert spec_of(quantized_folder, quantization="awq") == spec_of(quantized_folder)
    rewrite(
        quantized_folder / "config.json",
        quantization_config={"quant_method": "awq", "bits": 8},
    )
    with pytest.raises(UnsupportedModelError, match=r"\(awq\): 8 bits are not"):
        spec_of(quantized_folder)


def test_groups_that_do_not_divide_a_matrix_are_refused(tmp_path: Path) -> None:
    folder, _ = made_of("phi3", "awq", tmp_path)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    rewrite(folder / "config.json", quantization_config=quantization)
    with pytest.raises(UnsupportedModelError, match="o_proj: groups of 128 do not"):
        spec_of(folder)


def spec_of(folder: Path, **settings: Any) -> ModelSpec:
    """The spec of a checkpoint, as an engine has it."""
    return prepare(EngineArgs(model=str(folder), device="cpu", **settings)).spec


def greedy(folder: Path, **settings: Any) -> list[list[int]]:
    """Greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    with LLM(str(folder), **SMALL, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
