"""Several residual streams, LAuReL and gates with a cutoff, beside transformers' modules
of Gemma 3n, in each dtype; and the whole model in 16 bits.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.architecture.altup import (
    AltUpWeights,
    correct_streams,
    enter_streams,
    leave_streams,
    predict_streams,
    scaled_active,
)
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.dense import Dense, DenseWeights
from minfer.effects.models.architecture.gaussian_topk import feed_sparse
from minfer.effects.models.architecture.laurel import add_laurel, laurel_rows
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.ranks import SINGLE_RANK, Communicator, Parallel
from minfer.kernels.leaves import FP8
from minfer.kernels.quantized import dequantize, quantize
from tests.effects.models.rank_threads import ThreadRanks, on_ranks
from tests.effects.tiny_families import SIZES, VARIANTS, save, written
from tests.effects.tiny_model import read_spec

TOKENS, LAYER = 7, 1
HIDDEN = SIZES["hidden_size"]
KEY = ("Gemma3n", "all")
PRODUCTS = ProductContext(on_gpu=False)
# How far results of 16 bits may be from those of float32, as a share of their length.
CLOSE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1.5e-3}


@frozen(eq=False)
class Pair:
    """A model of minfer's in a dtype, and transformers' in float32."""

    spec: ModelSpec
    weights: Weights
    theirs: Any
    dtype: torch.dtype

    @property
    def altup(self) -> AltUpWeights:
        altup = self.weights.layers[LAYER].altup
        assert altup is not None
        return altup

    @property
    def layer(self) -> Any:
        """The same layer of transformers'."""
        return self.theirs.model.layers[LAYER]

    def draw(self, *shape: int) -> tuple[Tensor, Tensor]:
        """The same numbers in the dtype and in float32."""
        numbers = torch.randn(*shape).to(self.dtype)
        return numbers, numbers.float().clone()

    def close(self, result: Tensor, expected: Tensor) -> None:
        assert result.dtype is self.dtype
        name = str(self.dtype).removeprefix("torch.")
        assert (result.float() - expected).norm() <= CLOSE[name] * expected.norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(str(path), KEY[0], VARIANTS[KEY] | {"altup_correct_scale": True})
    return path


@pytest.fixture(params=CLOSE)
def pair(folder: Path, request: pytest.FixtureRequest) -> Pair:
    from transformers import Gemma3nForCausalLM

    torch.manual_seed(3)
    spec = parse_spec(json.loads((folder / "config.json").read_text()), "", request.param)
    weights = load_weights(folder, spec, request.param)
    theirs: Any = Gemma3nForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # What 16 bits round in the weights is no error of a step.
    theirs = theirs.to(torch_dtype(request.param)).float().eval()
    return Pair(spec, weights, theirs, torch_dtype(request.param))


def by_stream(streams: Tensor) -> Tensor:
    """[streams, 1, tokens, hidden], as transformers has them."""
    return streams.transpose(0, 1)[:, None]


@torch.inference_mode()
def test_streams_are_predicted_and_corrected_as_in_transformers(pair: Pair) -> None:
    count = pair.altup.prediction.inputs
    streams, wide = pair.draw(TOKENS, count, HIDDEN)
    predictions = predict_streams(pair.altup, streams, PRODUCTS)
    expected = pair.layer.altup.predict(by_stream(wide))
    pair.close(predictions, expected[:, 0].transpose(0, 1))
    hidden, wide_hidden = pair.draw(TOKENS, HIDDEN)
    before = predictions.clone()
    correct_streams(pair.altup, predictions, hidden, PRODUCTS)
    expected = pair.layer.altup.correct(by_stream(before.float()), wide_hidden[None])
    pair.close(predictions, expected[:, 0].transpose(0, 1))
    active = scaled_active(pair.altup, predictions)
    wide_active = predictions[:, pair.altup.active].float()
    pair.close(active, pair.layer.altup.scale_corrected_output(wide_active))
    unscaled = scaled_active(evolve(pair.altup, scaled=False), predictions)
    assert unscaled.equal(predictions[:, pair.altup.active])
    assert unscaled.is_contiguous()


@torch.inference_mode()
def test_streams_are_made_and_merged_as_in_transformers(pair: Pair) -> None:
    projections, model = pair.weights.projections, pair.theirs.model
    assert projections is not None
    hidden, wide = pair.draw(TOKENS, HIDDEN)
    seen = dict[str, Tensor]()

    def enter(_: Any, args: Any) -> None:
        seen["entered"] = args[0][:, 0].transpose(0, 1)

    def leave(_: Any, _args: Any, result: Tensor) -> Tensor:
        rounded = result.to(pair.dtype)
        seen["left"] = rounded[:, 0].transpose(0, 1)
        return rounded.float()

    def merge(_: Any, args: Any) -> None:
        seen["merged"] = args[0][0]

    handles = [
        model.layers[0].register_forward_pre_hook(enter),
        model.layers[-1].register_forward_hook(leave),
        model.norm.register_forward_pre_hook(merge),
    ]
    model(inputs_embeds=wide[None], per_layer_inputs=None)
    for handle in handles:
        handle.remove()
    pair.close(enter_streams(projections, hidden, PRODUCTS), seen["entered"])
    left = seen["left"]
    for tokens in (TOKENS, 1):
        pair.close(leave_streams(projections, left[:tokens]), seen["merged"][:tokens])


@torch.inference_mode()
def test_a_short_projection_is_not_made_longer_than_a_floor(pair: Pair) -> None:
    """As in transformers, which divides by the root of 1e-5 at least."""
    projections = pair.weights.projections
    assert projections is not None
    matrix = evolve(projections.enter, weight=torch.zeros_like(projections.enter.weight))
    streams = enter_streams(
        evolve(projections, enter=matrix), pair.draw(2, HIDDEN)[0], PRODUCTS
    )
    assert (streams[:, 1:] == 0).all()


@torch.inference_mode()
def test_laurel_is_transformers(pair: Pair) -> None:
    x, wide = pair.draw(TOKENS, HIDDEN)
    rows = laurel_rows(pair.altup.laurel, x, PRODUCTS)
    pair.close(rows, pair.layer.laurel(wide))
    hidden, wide_hidden = pair.draw(TOKENS, HIDDEN)
    add_laurel(hidden, rows)
    pair.close(hidden, (wide_hidden + rows.float()) / 2**0.5)


def sublayer(
    pair: Pair, layer: int, hidden: Tensor, ranks: Communicator = SINGLE_RANK
) -> Tensor:
    """What a feed-forward adds, before it is normalised."""
    sizes, weights = pair.spec.layers[layer], pair.weights.layers[layer].feed_forward
    assert isinstance(sizes.feed_forward, Dense)
    assert isinstance(weights, DenseWeights)
    cutoff = sizes.feed_forward.cutoff
    assert cutoff is not None
    unknown: Any = None  # neither its tokens nor its cache are read
    step, added = ModelStep(unknown, unknown, ranks, PRODUCTS), torch.zeros_like(hidden)
    bare = evolve(weights, norm=None, after=None)
    feed_sparse(sizes.feed_forward, bare, added, step, cutoff, hidden)
    return added


@pytest.mark.parametrize("layer", [0, 2, 3, 5])
@torch.inference_mode()
def test_gates_below_the_cutoff_are_zero_as_in_transformers(
    pair: Pair, layer: int
) -> None:
    hidden, wide = pair.draw(TOKENS, HIDDEN)
    added = sublayer(pair, layer, hidden)
    mlp = pair.theirs.model.layers[layer].mlp
    # A gate near the cutoff is rounded to its other side, where it counts little.
    pair.close(added / 3, mlp(wide) / 3)
    gates = mlp._gaussian_topk(mlp.gate_proj(wide))
    zeros = (gates == 0).float().mean()
    assert zeros == pytest.approx(mlp.activation_sparsity, abs=0.1)
    assert sublayer(pair, layer, hidden[:0]).shape == (0, HIDDEN)


def test_ranks_have_the_cutoff_of_all_gates(folder: Path) -> None:
    """And not of their own."""
    spec = read_spec(folder)
    hidden = torch.randn(TOKENS, HIDDEN)

    def on_rank(ranks: ThreadRanks) -> Tensor:
        rank_info = ranks.rank_info
        weights = load_weights(folder, spec, "float32", rank_info=rank_info)
        part = Pair(spec.for_rank(rank_info), weights, None, torch.float32)
        with torch.inference_mode():
            return sublayer(part, 0, hidden, ranks)

    whole = Pair(spec, load_weights(folder, spec, "float32"), None, torch.float32)
    with torch.inference_mode():
        expected = sublayer(whole, 0, hidden)
    for ranks in (2, 4):
        results, _ = on_ranks(Parallel(tensor=ranks), on_rank)
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


def logits_of(spec: ModelSpec, weights: Weights, ids: list[int], dtype: str) -> Tensor:
    """After each token of a prompt, of a decode step's at last."""
    cache = make_cache(spec, 20, 4, dtype, max_model_len=80)
    rows = (
        BatchRow(ids[first:last], first, list(range(20)), last - first)
        for first, last in ((0, 40), (40, len(ids) - 1), (len(ids) - 1, len(ids)))
    )
    results = [forward(spec, weights, make_batch([row], 4), cache) for row in rows]
    return torch.cat(results).float()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_as_near_to_float32_as_transformers(dtype: str, folder: Path) -> None:
    from transformers import Gemma3nForCausalLM

    spec = parse_spec(json.loads((folder / "config.json").read_text()), "", dtype)
    ids = random.Random(5).choices(range(160), k=60)
    logits = logits_of(spec, load_weights(folder, spec, dtype), ids, dtype)

    def theirs(kind: str) -> Tensor:
        model: Any = Gemma3nForCausalLM.from_pretrained(folder, dtype=torch_dtype(kind))
        with torch.inference_mode():
            whole: Tensor = model.eval()(torch.tensor([ids])).logits[0]
        return whole.float()

    exact = theirs("float32")
    error, their_error = (logits - exact).norm(), (theirs(dtype) - exact).norm()
    assert error <= 1.2 * their_error
    assert their_error < 0.2 * exact.norm()


def fp8(name: str, matrix: Tensor) -> dict[str, Tensor]:
    stored = quantize(matrix, FP8, torch.float32)
    return {name: stored.weight, f"{name}_scale": stored.scales}


def test_small_matrices_are_dequantized_where_a_checkpoint_quantizes_them(
    folder: Path, tmp_path: Path
) -> None:
    """All of a layer's, the others as they are stored."""
    tensors = load_file(folder / "model.safetensors")
    stored, small = dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        is_matrix = ".layers." in name and tensor.dim() == 2
        stored |= fp8(name, tensor) if is_matrix else {name: tensor}
        small += is_matrix and any(part in name for part in ("altup", "laurel"))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    groups = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        },
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        },
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": groups},
        "quantization_status": "compressed",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = as_stored(read_spec(tmp_path), tmp_path)
    weights = load_weights(tmp_path, spec, "float32")
    assert small == 5 * len(spec.layers)
    for index, layer in enumerate(weights.layers):
        altup = layer.altup
        assert altup is not None
        leaves = {
            "altup.modality_router": altup.router,
            "altup.prediction_coefs": altup.prediction,
            "altup.correction_coefs": altup.correction,
            "laurel.linear_left": altup.laurel.left,
            "laurel.linear_right": altup.laurel.right,
        }
        for name, leaf in leaves.items():
            whole = f"model.layers.{index}.{name}.weight"
            rounded = stored[whole].float() * stored[f"{whole}_scale"]
            assert leaf.scheme.is_plain
            torch.testing.assert_close(leaf.weight, rounded)
        assert isinstance(layer.feed_forward, DenseWeights)
        assert layer.feed_forward.down.scheme == FP8
        assert dequantize(layer.feed_forward.down).shape[0] == HIDDEN


OLD: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_local_base_freq": 777.0},
    {
        "rope_theta": 1e5,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    {"rope_scaling": None, "layer_types": None, "activation_sparsity_pattern": None},
    {"num_hidden_layers": 12, "layer_types": None},
]


@pytest.mark.parametrize("fields", OLD)
def test_published_configs_are_read_as_transformers_reads_them(
    fields: dict[str, Any],
) -> None:
    config = VARIANTS["Gemma3n", "plain"] | fields
    config |= {"altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256}
    raw = config | {"architectures": ["Gemma3nForCausalLM"]}
    spec = parse_spec(raw)
    assert spec == parse_spec(written("Gemma3n", config))
    sparse = [layer.feed_forward for layer in spec.layers]
    cutoffs = [layer.cutoff for layer in sparse if isinstance(layer, Dense)]
    if len(cutoffs) == 12:
        assert cutoffs == [pytest.approx(1.6448536)] * 10 + [None] * 2
    else:
        assert cutoffs == [None] * 3
