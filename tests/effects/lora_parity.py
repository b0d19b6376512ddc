"""Adapters beside peft's own merged models, in float32, on tiny random models.

    pip install peft
    python -m tests.effects.lora_parity

peft makes and writes the adapters, and merges them (`merge_and_unload`). Of each family,
one `LLM` serves all prompts at once, each with its own adapter or with none, and again
each alone: tokens are equal, and log-probabilities of the sampled and the likeliest
tokens are those of transformers' merged model, within 1e-4. Quantized: the base model has
the dequantized matrices. Results are in bench/results/lora_parity.json.
"""

import argparse
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from bench.results import run, show
from minfer import LLM, LoRARequest, SamplingParams
from minfer.effects.models.architecture.quantization import LEVELS
from minfer.kernels.leaves import Linear
from minfer.kernels.quantized import dequantize, quantize
from tests.effects.tiny_families import VARIANTS, save

ATTENTION: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE: Final = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS: Final = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LATENTS: Final = r".*\.(q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|o_proj)"
# By family: its tiny model, what `LLM` gets besides, and peft's configurations.
Family: TypeAlias = tuple[tuple[str, str], dict[str, Any], list[dict[str, Any]]]
FAMILIES: Final[dict[str, Family]] = {
    "dense": (
        ("Qwen3", "biases, windows"),
        {},
        [
            {"r": 4, "target_modules": "all-linear"},
            {"r": 8, "target_modules": DENSE, "use_rslora": True},
            {"r": 64, "target_modules": DENSE, "lora_alpha": 7},
            {"r": 16, "target_modules": ["q_proj", "down_proj"]},
            {
                "r": 32,
                "target_modules": DENSE,
                "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 5, "up_proj": 64},
                "alpha_pattern": {"down_proj": 3},
            },
            {"r": 4, "target_modules": DENSE, "layers_to_transform": [1]},
            {"r": 12, "target_modules": r".*\.layers\.[02]\..*_proj"},
            {"r": 4, "target_modules": ATTENTION, "exclude_modules": ["v_proj"]},
        ],
    ),
    "experts": (
        ("Qwen3Moe", "experts"),
        {},
        [
            {"r": 4, "target_modules": ATTENTION, "target_parameters": EXPERTS},
            {"r": 16, "target_modules": ATTENTION, "target_parameters": EXPERTS},
            {"r": 64, "target_modules": ATTENTION, "target_parameters": EXPERTS},
        ],
    ),
    "mla": (
        ("DeepseekV3", "groups"),
        {},
        [
            {"r": rank, "target_modules": LATENTS, "target_parameters": EXPERTS}
            for rank in (4, 16, 64)
        ],
    ),
    "hybrid": (
        ("Qwen3_5", "plain"),
        {},
        [{"r": rank, "target_modules": "all-linear"} for rank in (4, 16, 64)],
    ),
    "quantized": (
        ("Qwen3", "plain"),
        {"quantization": "mxfp4"},
        [{"r": rank, "target_modules": DENSE} for rank in (4, 16, 64)],
    ),
}
PROMPTS: Final = [[(7 * i + 3 * j) % 150 + 1 for j in range(9 + i)] for i in range(9)]
TOKENS, TOP = 8, 5
LIMIT: Final = 1e-4


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All families. Raises ModuleNotFoundError without peft."""
    results: dict[str, Any] = {}
    for name in args.families:
        results[name] = family(*FAMILIES[name])
        show({name: results[name]})
    return results


def family(
    key: tuple[str, str], settings: dict[str, Any], configs: list[dict[str, Any]]
) -> dict[str, Any]:
    """One family: how many tokens differ, and the largest difference."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        base = save(str(path), key[0], VARIANTS[key])
        if level := settings.get("quantization"):
            _round(base, level)
        models, adapters = [*_merged(base, Path(folder), configs)], []
        adapters = [
            LoRARequest(str(i), i + 1, str(Path(folder) / str(i)))
            for i in range(len(configs))
        ]
        count = len(configs) + 1
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:count]]
        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP
        )
        with LLM(
            str(path),
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=64,
            enable_lora=True,
            max_loras=len(configs),
            max_lora_rank=64,
            **settings,
        ) as llm:
            requests = [*adapters, None]
            together = llm.generate(
                prompts, params, use_tqdm=False, lora_request=requests
            )
            alone = [
                llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0]
                for prompt, adapter in zip(prompts, requests, strict=True)
            ]
        return _compare([*models, base], together, alone)


def _round(model: Any, level: str) -> None:
    """Round the matrices of a model's layers as a scheme does."""
    scheme = LEVELS[level]
    for name, module in model.named_modules():
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            stored = quantize(module.weight.data, scheme, torch.float32)
            leaf = Linear(
                weight=stored.weight,
                scheme=scheme,
                scales=stored.scales,
                parts=(module.out_features,),
            )
            module.weight.data.copy_(dequantize(leaf))


def _merged(base: Any, folder: Path, configs: list[dict[str, Any]]) -> Iterator[Any]:
    """Yields peft's merged models, whose adapters it writes."""
    import peft

    for number, config in enumerate(configs):
        torch.manual_seed(number)
        lora = peft.LoraConfig(**{"lora_alpha": 8} | config)
        model = peft.get_peft_model(copy.deepcopy(base), lora)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1)
        model.save_pretrained(folder / str(number))
        yield model.merge_and_unload().eval()


def _compare(models: list[Any], together: list[Any], alone: list[Any]) -> dict[str, Any]:
    """How far tokens and log-probabilities are from the models'."""
    differing, by_itself, largest = 0, 0, 0.0
    for model, output, single in zip(models, together, alone, strict=True):
        [found] = output.outputs
        ids = [*found.token_ids]
        by_itself += sum(
            a != b for a, b in zip(ids, single.outputs[0].token_ids, strict=True)
        )
        tokens = torch.tensor([[*output.prompt_token_ids, *ids]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1]
        exact = logits.double().log_softmax(-1)
        differing += int((exact.argmax(-1) != torch.tensor(ids)).sum())
        for place, reported in enumerate(found.logprobs):
            for token, entry in reported.items():
                distance = abs(entry.logprob - float(exact[place, token]))
                largest = max(largest, distance)
    assert largest <= LIMIT, largest
    assert not differing + by_itself
    return {
        "adapters": len(models) - 1,
        "tokens": TOKENS * len(models),
        "tokens unlike peft's": differing,
        "tokens unlike those alone": by_itself,
        "largest difference of log-probabilities": largest,
    }


if __name__ == "__main__":
    families = {"nargs": "+", "choices": [*FAMILIES], "default": [*FAMILIES]}
    run("lora_parity", measure, {"--families": families})
