"""GGUF files that llama.cpp quantizes, beside the `gguf` package's dequantization, and
log-probabilities that llama.cpp computes from files, beside minfer's.

Runs in an environment of its own, which has `llama-cpp-python` beside minfer. A tiny
random model is written by the `gguf` package and quantized by llama.cpp to types that
need no calibration. Compares each of minfer's matrices with what the package makes of the
file, and greedy tokens with those of transformers' model on these numbers.
"""

import argparse
import random
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import gguf
import pytest
import torch
from torch import Tensor

from bench.results import run, show
from minfer import LLM, SamplingParams
from minfer.effects.models.architecture import layers
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights, read_config
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize
from tests.effects.families import SMALL
from tests.effects.models.formats.test_formats import leaves
from tests.effects.models.gguf.written import tensors, write
from tests.effects.parity import serve_twice, their_tokens
from tests.effects.tiny_families import ROPES, VARIANTS, save

# Rows of all matrices are multiples of the largest block.
SIZES: Final = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
FAMILIES: Final = (("Llama", "plain"), ("Qwen3", "plain"))
# Of families whose metadata and tensors are more than Llama's, also what files do not say
# and llama.cpp assumes.
OWN_SIZES: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("Llama4", "chunks"): {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 512,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    ("Gemma4", "experts"): {
        "global_head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "moe_intermediate_size": 256,
        "final_logit_softcapping": 30.0,
    },
    ("Mistral4", "experts"): {
        "head_dim": 128,
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
        "rope_parameters": ROPES["yarn"]
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    ("Cohere2", "pattern"): {"num_hidden_layers": 4, "sliding_window_pattern": 4},
}
MIXTURES_OF_OWN: Final = ("F16", "Q4_0", "Q8_0", "Q3_K_M", "Q4_K_M", "IQ4_XS")
# llama.cpp's mixtures, by the names of `llama_ftype`
MIXTURES: Final = (
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
)
TOKENS: Final = 30  # of a continuation
VOCABULARY: Final = 160
F32: Final = 0  # ggml's number of a type


def quantize(source: Path, target: Path, mixture: str) -> None:
    """Have llama.cpp quantize a file."""
    # mypy: installed where this runs alone.
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mixture}")
    params.nthread = 1
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), params
    )
    if failed:
        raise RuntimeError(f"llama.cpp did not write {mixture}")


def fill(family: str, model: Any, path: Path) -> Counter[str]:
    """Put what a file's numbers mean into the model; returns its tensors by type."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds: Counter[str] = Counter()
    for named in tensors(family, model):
        tensor = stored[named.name]
        kinds[tensor.tensor_type.name] += 1
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        meant = torch.from_numpy(numbers.copy()).reshape(named.tensor.shape)
        if named.heads:  # Llama's order of a head's dimensions
            shape = (named.heads, -1, 2, *meant.shape[1:])
            meant = meant.reshape(shape).swapaxes(1, 2).reshape(named.tensor.shape)
        with torch.no_grad():
            named.tensor.copy_(meant)
    return kinds


def matrices(checkpoint: Path) -> list[Linear]:
    """All leaves that minfer reads."""
    described = str(checkpoint)
    spec = as_stored(
        parse_spec(read_config(checkpoint), described, "float32"), checkpoint
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "in_kernel_layout", lambda leaf: leaf)
        return leaves(load_weights(checkpoint, spec, "float32"))


def compare(key: tuple[str, str], mixture: str, prompts: list[list[int]]) -> Any:
    """What differs, of a family and a mixture of types."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        model = save(place, key[0], VARIANTS[key] | SIZES | OWN_SIZES.get(key, {}))
        whole = write(folder / "whole.gguf", key[0], model, {})
        path = folder / "quantized.gguf"
        quantize(whole, path, mixture)
        kinds = fill(key[0], model, path)
        model.save_pretrained(folder / "meant")
        pairs = zip(matrices(path), matrices(folder / "meant"), strict=True)
        largest = max(
            float((dequantize(leaf) - meant.weight).abs().max()) for leaf, meant in pairs
        )
        passes, _ = serve_twice(str(path), prompts, TOKENS, **SMALL)
        expected = [their_tokens(model, [prompt], TOKENS)[0] for prompt in prompts]
        different = sum(
            tokens != wanted
            for outputs in passes
            for tokens, wanted in zip(outputs, expected, strict=True)
        )
    return {
        "tensors": dict(kinds),
        "largest_difference": largest,
        "sequences": 2 * len(prompts),
        "different": different,
    }


def without_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add what llama.cpp needs to run a model without a tokenizer."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCABULARY)


def their_logprobs(path: Path, tokens: list[int]) -> Tensor:
    """What llama.cpp computes for each token: [tokens, vocabulary]."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = 1
    settings.type_k = settings.type_v = F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for position, token in enumerate(tokens):
        batch.token[position], batch.pos[position] = token, position
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        batch.logits[position] = 1
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama.cpp did not run {path}")
    logits = [
        np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(context, position), shape=(VOCABULARY,)
        ).copy()
        for position in range(len(tokens))
    ]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return torch.from_numpy(np.stack(logits)).log_softmax(-1)


def run_by_both(key: tuple[str, str], tokens: list[int]) -> dict[str, Any]:
    """How far the log-probabilities of tokens of a prompt are apart."""
    with TemporaryDirectory() as place:
        model = save(place, key[0], VARIANTS[key] | SIZES | OWN_SIZES.get(key, {}))
        path = Path(place) / "whole.gguf"
        write(path, key[0], model, {}, change=without_tokenizer)
        theirs = their_logprobs(path, tokens)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        with LLM(str(path), dtype="float32", skip_tokenizer_init=True) as llm:
            (output,) = llm.generate([{"prompt_token_ids": tokens}], params)
    assert output.prompt_logprobs is not None
    differences = [
        abs(ours[token].logprob - float(of_model[token]))
        for ours, of_model, token in zip(
            output.prompt_logprobs[1:], theirs, tokens[1:], strict=False
        )
        if ours is not None
    ]
    return {"tokens": len(differences), "largest_difference": max(differences)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw, rows = random.Random(args.seed), list[dict[str, Any]]()
    lengths = draw.choices(range(1, 61), k=args.prompts)
    prompts = [draw.choices(range(VOCABULARY), k=length) for length in lengths]
    mixtures = dict.fromkeys(FAMILIES, MIXTURES) | dict.fromkeys(
        OWN_SIZES, MIXTURES_OF_OWN
    )
    for key in mixtures:
        for mixture in mixtures[key]:
            rows.append({"family": key[0], "mixture": mixture})
            rows[-1] |= compare(key, mixture, prompts)
            show(rows[-1])
    tokens, runs = draw.choices(range(VOCABULARY), k=60), list[dict[str, Any]]()
    for key in mixtures:
        runs.append({"family": key[0], **run_by_both(key, tokens)})
        show(runs[-1])
    packages = ("llama-cpp-python", "gguf")
    return {
        "writers": {package: version(package) for package in packages},
        "cases": rows,
        "log_probabilities": runs,
    }


if __name__ == "__main__":
    run("gguf_by_llama_cpp", measure, {"--prompts": 4, "--seed": 0})
