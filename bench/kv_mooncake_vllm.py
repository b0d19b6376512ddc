"""vLLM with its own offloading of KV blocks, on the conversations of `kv_mooncake_gpu`.

    python -m bench.kv_mooncake_vllm --trace mooncake_conversation.jsonl --speed 5.34

For an environment with vLLM beside minfer. The same requests, at the speed which
`kv_mooncake_gpu` found on the same card, a pool of as many tokens, as much host memory;
else vLLM's defaults. `--host 0` leaves offloading out.
"""

import argparse
import asyncio
import os
import tempfile
import time
from typing import Any, Final

from attrs import define, evolve

from bench.gpu_workloads import BLOCK, Lab
from bench.kv_mooncake_gpu import AT_ONCE, HOST, Asked, conversations
from bench.results import percentiles, run, show
from bench.shapes import SHAPES

VLLM_BLOCK: Final = 16  # tokens; vLLM's default
SETTINGS: Final = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}


@define
class Replay:
    """Requests to vLLM, and how many of their prompt tokens were cached."""

    llm: Any  # vllm's AsyncLLM
    cached: int = 0
    prompts: int = 0
    sent: int = 0

    async def first_token_ms(self, asked: Asked, due: float) -> float:
        """ms to the first token of a request, sent when it is due."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        params = SamplingParams(
            temperature=0,
            max_tokens=asked.output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.sent += 1
        prompt, begin, first_token = (
            {"prompt_token_ids": asked.tokens},
            time.perf_counter(),
            0.0,
        )
        async for out in self.llm.generate(prompt, params, str(self.sent)):
            if not first_token:
                first_token = time.perf_counter()
                self.cached += out.num_cached_tokens or 0
                self.prompts += len(asked.tokens)
        return 1e3 * (first_token - begin)

    async def all(self, work: list[Asked], speed: float) -> list[float]:
        """ms to the first tokens of requests that arrive `speed` times as fast."""
        began = time.perf_counter()
        self.cached = self.prompts = 0
        return [
            *await asyncio.gather(
                *(self.first_token_ms(asked, began + asked.at / speed) for asked in work)
            )
        ]


async def served(args: argparse.Namespace, folder: str, words: int) -> dict[str, Any]:
    """What `kv_mooncake_gpu` reports, of vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    offloaded = {"kv_offloading_size": args.host / (1 << 30)} if args.host else {}
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=32_768,
            block_size=VLLM_BLOCK,
            num_gpu_blocks_override=args.pool * BLOCK // VLLM_BLOCK,
            max_num_seqs=256,
            **offloaded,
        )
    )
    replay = Replay(llm)
    first = [evolve(request, at=0.0) for request in conversations(args, words, salt=2)]
    await replay.all(first[:AT_ONCE], 1.0)  # compiles kernels
    work, began = conversations(args, words), time.perf_counter()
    ms = await replay.all(work, args.speed)
    took = time.perf_counter() - began
    figures = {
        "first token, ms": percentiles(ms),
        "output tokens/s": sum(request.output for request in work) / took,
        "prompt tokens/s": sum(len(request.tokens) for request in work) / took,
        "seconds": took,
        "hit share": replay.cached / replay.prompts,
    }
    llm.shutdown()
    return figures


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the conversations once."""
    for name, value in SETTINGS.items():  # read when vllm is imported
        os.environ.setdefault(name, value)
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.for_shape(folder, args.shape)
        figures = asyncio.run(served(args, lab.model(args.shape), lab.words))
    card = torch.cuda.get_device_name()
    setup = {"card": card, "shape": args.shape, "vllm": vllm.__version__}
    show(figures)
    return {**setup, "speed": args.speed, "host": args.host, **figures}


if __name__ == "__main__":
    run(
        "kv_mooncake_vllm",
        measure,
        {
            "--shape": {"choices": [*SHAPES], "default": "7B"},
            "--trace": "mooncake_conversation.jsonl",
            "--requests": 900,
            "--scale": 8,
            "--speed": {"type": float, "required": True},
            "--pool": 750,  # blocks of minfer
            "--host": HOST,
        },
    )
