"""Experts, latent attention and windows on a GPU, at the shapes of published models.

    python -m bench.layers_gpu --models moe mla

Output tokens a second of 512 tokens in and 128 out, greedy, without prefix cache, prefill
included; the experts that a decode step hits, beside E * (1 - (1 - k / E)^rows), which
independent choices would; and the median of engine steps in which some rows decode at
32,000 tokens, and nothing is prefilled. Weights are random; embeddings and routers are
drawn from N(0, 1), so that the residual stream is the token's own direction, and experts
are hit independently.
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.nn.functional as F

from bench.kernel_profile import profiled, report
from bench.layer_loads import LONG, STEPS, Loads, measured, step_figures
from bench.results import run
from minfer import LLM, SamplingParams
from minfer.effects.execution.running.own_model import OwnModel
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_weights import MoEWeights
from minfer.effects.models.architecture.weights import Weights
from minfer.kernels import router
from minfer.kernels.activation import gated_mul
from minfer.kernels.experts import add_experts, experts_hit
from minfer.kernels.leaves import ChosenExperts, Experts, Linear

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "moe": {  # Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
    },
    "mla": {  # DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "vocab_size": 102_400,
    },
}
SHAPES["gemma"] = {  # Gemma 3 4B
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "vocab_size": 262_208,
}
SHAPES["gemma2"] = {  # Gemma 2 9B
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 256_000,
}
SHAPES["phi4"] = {  # Phi-4 (14B)
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "rope_theta": 250_000.0,
    "original_max_position_embeddings": 16384,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "vocab_size": 100_352,
}
SHAPES["gpt-oss"] = {  # gpt-oss-20b, in bf16
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
}
SHAPES["next"] = {  # Qwen3-Next-80B-A3B with 128 of its 512 experts
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 128,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 151_936,
    "rope_theta": 1e7,
}
# What Qwen3-Next-80B-A3B-Instruct-FP8 leaves in bfloat16.
NEXT_PLAIN: Final = ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
SHAPES["next-80B"] = SHAPES["next"] | {  # Qwen3-Next-80B-A3B in FP8, as published
    "num_experts": 512,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            *(
                f"model.layers.{layer}.{name}"
                for layer in range(48)
                for name in NEXT_PLAIN
            ),
        ],
    },
}
SHAPES["qwen3.5"] = {  # Qwen3.5 9B's text
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",  # vLLM keeps states in this; minfer always does
    "vocab_size": 248_320,
}
SHAPES["qwen3.5-2B"] = SHAPES["qwen3.5"] | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
SHAPES["granite4"] = {  # Granite 4.0 H Small
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
    "vocab_size": 100_352,
}
SHAPES["granite4-tiny"] = SHAPES["granite4"] | {  # Granite 4.0 H Tiny
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "mamba_n_heads": 48,
}
COMMON: Final = {"dtype": "bfloat16", "max_position_embeddings": 40_960}
TINY_LENGTHS: Final = {"inputs": 64, "outputs": 16, "context": 200}
TINY_PROMPT: Final = 300
PROFILED_INPUTS, PROFILED_STEPS = 16, 33  # of rows; the first step is prefill


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape, so small that a CPU runs it: to try this script."""
    small: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
    }
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2048}
    small |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    small |= {"shared_expert_intermediate_size": 32, "full_attention_interval": 2}
    small |= {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]}
    small |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
    return {**config, **{k: v for k, v in small.items() if k in config}}


class Model:
    """An engine with one model."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        config = {**SHAPES[name], **COMMON}
        self.small = bool(args.tiny)
        folder = Path(tempfile.gettempdir()) / "layers" / name
        folder.mkdir(parents=True, exist_ok=True)
        used_config = tiny(config) if self.small else config
        (folder / "config.json").write_text(json.dumps(used_config))
        length = 400 if self.small else LONG + 2000
        began = time.perf_counter()
        self.llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=length,
            max_num_seqs=256,
            gpu_memory_utilization=0.93 if name == "moe" else 0.88,
            enforce_eager=args.hits,
            quantization=args.quantization,
            state_dtype=args.state_dtype,
        )
        self.start = time.perf_counter() - began
        self.executor = cast(TorchExecutor, self.llm.worker.driver.executor)
        self.model = cast(OwnModel, self.executor.runner.step.model)
        draw(self.model.weights)
        self.rng = random.Random(0)

    def ask(self, rows: int, inputs: int, outputs: int) -> float:
        """Returns output tokens a second."""
        prompts = [self.rng.choices(range(100, 2000), k=inputs) for _ in range(rows)]
        if not self.small:
            prompts = [self.rng.choices(range(100, 100_000), k=inputs) for _ in prompts]
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        began = time.perf_counter()
        generated = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(output.outputs[0].token_ids) for output in generated) / seconds

    def steps(self, rows: int, context: int) -> dict[str, Any]:
        """Returns the median time of a step in which `rows` decode, in milliseconds."""
        driver, ends, plans = self.llm.worker.driver, [], []
        collect = driver.executor.collect

        def timed(*args: Any) -> Any:
            result = collect(*args)
            ends.append(time.perf_counter())
            return result

        launch = driver.executor.launch

        def noted(plan: Any, *args: Any) -> Any:
            plans.append(len(plan.rows) == rows and not plan.fills)
            return launch(plan, *args)

        vars(driver.executor).update(collect=timed, launch=noted)
        self.ask(rows, context, STEPS)
        del driver.executor.collect, driver.executor.launch
        pairs = zip(plans[1:], plans, ends[1:], ends, strict=False)
        gaps = [end - before for now, previous, end, before in pairs if now and previous]
        return step_figures(rows, context, gaps)

    def hit(self, rows: int) -> dict[str, Any]:
        """Returns how many experts a layer's step of `rows` decode rows hits: the mean
        of all layers of some steps. The engine must run without graphs.
        """
        feeds = [layer.feed_forward for layer in self.model.spec.layers]
        sparse = next(feed for feed in feeds if isinstance(feed, MoE))
        counts: list[torch.Tensor] = []
        real = router.route

        def counted(*args: Any) -> ChosenExperts:
            choice = real(*args)
            if len(choice.ids) >= rows == int((choice.ids[:, 0] >= 0).sum()):
                counts.append(experts_hit(choice))
            return choice

        vars(router).update(route=counted)
        self.ask(rows, 16, 16)
        vars(router).update(route=real)
        experts, k = sparse.experts, sparse.rule.top_k
        return {
            "rows": rows,
            "hit": float(torch.stack(counts).float().mean()),
            "independent": experts * (1 - (1 - k / experts) ** rows),
        }


def loop(name: str) -> dict[str, Any]:
    """Returns the time of one layer's experts for 64 tokens, beside that of a loop over
    all experts in plain torch, each in one CUDA graph: microseconds.
    """
    from triton.testing import do_bench_cudagraph

    shape, tokens = SHAPES[name], 64
    count = int(shape.get("num_experts") or shape["n_routed_experts"])
    hidden, inter = shape["hidden_size"], shape["moe_intermediate_size"]

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

    experts = Experts(
        gate_up=Linear(weight=drawn(count, 2 * inter, hidden) / 45, parts=(inter, inter)),
        down=Linear(weight=drawn(count, hidden, inter) / 28, parts=(hidden,)),
    )
    x, out = drawn(tokens, hidden), drawn(tokens, hidden).zero_()
    picked = torch.rand(tokens, count, device="cuda").topk(shape["num_experts_per_tok"])
    choice = ChosenExperts(picked.indices.int(), picked.values)
    share = torch.zeros(tokens, count, device="cuda")
    share.scatter_(1, picked.indices, picked.values)
    shares = share.to(torch.bfloat16).unbind(1)

    def looped() -> None:
        for gate_up, down, expert_share in zip(
            experts.gate_up.weight, experts.down.weight, shares, strict=True
        ):
            inner = gated_mul(F.linear(x, gate_up))
            out.add_(F.linear(inner, down) * expert_share[:, None])

    calls = {"grouped": lambda: add_experts(out, x, experts, choice), "loop": looped}
    times = {key: 1e3 * do_bench_cudagraph(call) for key, call in calls.items()}
    return times | {"times": times["loop"] / times["grouped"]}


def draw(weights: Weights) -> None:
    """Draw embeddings and routers from N(0, 1)."""
    weights.embed.normal_()
    for layer in weights.layers:
        if isinstance(layer.feed_forward, MoEWeights):
            layer.feed_forward.router.weight.normal_()


def profiles(name: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the kernels of decode steps by rows, and of prompts by tokens."""
    results = dict[str, Any]()

    def note(title: str, rows: int, inputs: int, outputs: int, steps: int) -> None:
        work = partial(model.ask, rows, inputs, outputs)
        work()
        results[title] = report(f"{name}, {title}", profiled(work), steps)

    for rows in args.profile_rows:
        note(f"{rows} rows", rows, PROFILED_INPUTS, PROFILED_STEPS, PROFILED_STEPS - 1)
    for tokens in args.profile_prefill:
        note(f"prompt of {tokens}", 1, tokens, 1, 1)
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all models that are named."""
    results: dict[str, Any] = {}
    for name in args.models:
        if args.loop:
            results[name] = loop(name)
            print(name, results[name], flush=True)
            continue
        model = Model(name, args)
        if args.hits:
            results[name] = {"hits": [model.hit(rows) for rows in args.rows]}
            print(name, results[name], flush=True)
            model.llm.close()
            del model
            gc.collect()
            torch.cuda.empty_cache()
            continue
        loads = Loads(args.rows, args.long, args.prefill)
        if args.tiny:
            prompts = [TINY_PROMPT for _ in args.prefill]
            loads = Loads(args.rows, args.long, prompts, **TINY_LENGTHS)
        results[name] = {"start_s": model.start, **measured(name, model, loads)}
        if profile := profiles(name, model, args):
            results[name]["profile"] = profile
        model.llm.close()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    run(
        "layers_gpu",
        measure,
        {
            "--models": {"nargs": "+", "default": list(SHAPES)},
            "--rows": {"nargs": "*", "type": int, "default": [1, 8, 64, 256]},
            "--long": {"nargs": "*", "type": int, "default": [1, 8]},
            "--prefill": {"nargs": "*", "type": int, "default": [8192]},
            "--quantization": {"default": None, "help": "as minfer's option"},
            "--state-dtype": "auto",
            "--profile-rows": {"nargs": "*", "type": int, "default": []},
            "--profile-prefill": {"nargs": "*", "type": int, "default": []},
            "--hits": {"action": "store_true", "help": "count experts instead"},
            "--loop": {"action": "store_true", "help": "beside a loop over experts"},
            "--tiny": {"action": "store_true"},
        },
    )
