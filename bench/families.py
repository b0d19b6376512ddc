"""Every family of the table, and some outside it, against transformers: greedy float32 tokens.

Tiny random checkpoints as transformers saves them, with weights large enough that tokens vary.
minfer serves the prompts through `LLM`, in small blocks and chunks, eight at a time, far past the
windows; transformers one by one. Counts tokens that differ (expected: none), and different ones.

    python -m bench.families
"""

import argparse
import random
import tempfile
from collections.abc import Mapping
from typing import Any, Final

import torch
import transformers

from bench.results import write
from bench.serving import their_tokens
from minfer import LLM, SamplingParams

WINDOW: Final = 20
PLAIN: Final[dict[str, Any]] = {"skip_tokenizer_init": True, "dtype": "float32"}
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "head_dim": 16, "eos_token_id": None, "initializer_range": 0.3, "sliding_window": None,
}  # fmt: skip
_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: Final[Mapping[str, dict[str, Any]]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": _YARN,
    "yarn-mscale": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "truncate": False},
    "yarn-betas": _YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
}  # fmt: skip
_TIED: Final = {"tie_word_embeddings": True}
_BIAS: Final = {"attention_bias": True}
_UPPER: Final = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_MIXED: Final = ["sliding_attention", "full_attention", "sliding_attention"]
_DYNAMIC: Final = {"rope_type": "dynamic", "factor": 4.0}
_NEOX: Final = {"head_dim": None, "initializer_range": 2.0}
_EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EVERY: Final[dict[str, Any]] = {
    "plain": {}, "tied": _TIED, "head_dim 32": {"head_dim": 32},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}  # fmt: skip
_QWEN: Final = _EVERY | {
    "windows above": _UPPER, "windows everywhere": _UPPER | {"max_window_layers": 0},
    "windows alternate": _UPPER | {"layer_types": _MIXED},
}  # fmt: skip
FAMILIES: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "Qwen2": _QWEN,
    "Qwen3": _QWEN | {"attention_bias": _BIAS, "biases, windows": _BIAS | _UPPER | _TIED},
    "Llama": _EVERY | {"attention_bias": _BIAS, "mlp_bias": {"mlp_bias": True},
                       "biases, tied": _BIAS | _TIED | {"mlp_bias": True}},
    "Mistral": _EVERY | {"window": {"sliding_window": WINDOW},
                         "window, tied": _TIED | {"sliding_window": WINDOW, "head_dim": 32}},
}  # fmt: skip
# transformers' own classes over minfer's paged attention
OUTSIDE: Final[Mapping[str, dict[str, dict[str, Any]]]] = {
    "GPTNeoX": {"parallel residual": _NEOX,
                "sequential": _NEOX | {"use_parallel_residual": False}},
    "Olmo2": {"norms behind": {}, "dynamic rope": {"rope_parameters": _DYNAMIC}},
    "Olmo3": {"windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED}},
    "Mixtral": {"experts": _EXPERTS, "experts, windows": _EXPERTS | {"sliding_window": WINDOW}},
    "Granite": {"multipliers": {"attention_multiplier": 0.3, "logits_scaling": 4.0,
                                "residual_multiplier": 0.5, "embedding_multiplier": 3.0}},
    "Cohere2": {"windows alternate": {"sliding_window": WINDOW, "layer_types": _MIXED}},
    "Phi3": {"fused": {"pad_token_id": None}},
}  # fmt: skip
VARIANTS, OTHERS = (
    {(family, name): SIZES | row for family, rows in table.items() for name, row in rows.items()}
    for table in (FAMILIES, OUTSIDE)
)


def save(folder: str, family: str, config: Mapping[str, Any]) -> Any:
    """Write a random checkpoint; returns transformers' model of it."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:  # made as zeros and ones, which would hide mistakes
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    model.save_pretrained(folder)
    return model


def compare(model: Any, folder: str, prompts: list[list[int]], tokens: int) -> dict[str, int]:
    """Continue the prompts with both; what differs."""
    wanted = [their_tokens(model, [prompt], tokens)[0] for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(folder, block_size=8, max_num_seqs=8, max_num_batched_tokens=24, **PLAIN) as llm:
        made = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    pairs = [pair for row in zip(made, wanted, strict=True) for pair in zip(*row, strict=True)]
    return {
        "output_tokens": len(pairs),
        "mismatched_tokens": sum(ours != theirs for ours, theirs in pairs),
        "different_tokens": len({theirs for _, theirs in pairs}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, rows = random.Random(0), list[dict[str, Any]]()
    for (family, name), config in (VARIANTS | OTHERS).items():
        lengths = rng.choices(range(1, 3 * WINDOW + 1), k=args.prompts)
        prompts = [rng.choices(range(160), k=length) for length in lengths]
        with tempfile.TemporaryDirectory() as folder:
            made = compare(save(folder, family, config), folder, prompts, 2 * WINDOW)
        rows.append({"family": family, "variant": name, **made})
        print(rows[-1], flush=True)
    wrong = sum(row["mismatched_tokens"] for row in rows)
    print(f"{wrong} mismatches in {len(rows)} variants")
    write("families", {"mismatched_tokens": wrong, "prompts": args.prompts, "variants": rows}, 0)


if __name__ == "__main__":
    main()
