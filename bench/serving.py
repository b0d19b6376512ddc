"""What several benchmarks share: serving requests in real time, and the same model in transformers.

`Server` runs the real engine over the torch executor, as `LLM` does, but lets a benchmark say when
each request arrives.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen

from minfer.config import EngineConfig
from minfer.effects.driver import Driver
from minfer.effects.rope import Rope
from minfer.effects.spec import ModelSpec
from minfer.effects.torch_executor import TorchExecutor
from minfer.effects.weights import Weights, named_parts
from minfer.messages import Admitted, Emit, Finished, Preempted, Submit, Voided
from minfer.request import Request, SamplingParams

BUNDLED = Path(__file__).resolve().parents[1] / "effects" / "bundled" / "target"
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@frozen
class Arrival:
    """A request and when it comes."""

    prompt: tuple[int, ...]
    tokens: int  # output tokens at most
    at: float = 0.0  # seconds after the run's start
    stop_ids: frozenset[int] = frozenset()


@frozen
class Served:
    """What became of one request. Times are seconds after the run's start."""

    tokens: tuple[int, ...]
    first: float
    done: float


@define
class Server:
    """An engine that stays between runs, its prefix cache too."""

    config: EngineConfig
    driver: Driver
    runs: int = 0
    hit: int = 0  # prompt tokens found in the cache, over all admissions
    preempted: int = 0
    voided: list[str] = field(factory=list)

    @classmethod
    def of(cls, spec: ModelSpec, weights: Weights, **settings: Any) -> "Server":
        """Settings are those of EngineConfig."""
        config = EngineConfig(vocab_size=spec.vocab_size, **settings)
        return cls(config, Driver(config, TorchExecutor.for_config(config, spec, weights)))

    def serve(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Serve all of them, each submitted when its time has come; results in their order."""
        order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at)
        tokens: list[list[int]] = [[] for _ in arrivals]
        first, done = [0.0] * len(arrivals), [0.0] * len(arrivals)
        self.runs += 1
        begin, sent = time.perf_counter(), 0
        while sent < len(order) or self.driver.busy:
            now = time.perf_counter() - begin
            while sent < len(order) and arrivals[order[sent]].at <= now:
                self._submit(order[sent], arrivals[order[sent]])
                sent += 1
            if not self.driver.busy:
                time.sleep(max(0.0, arrivals[order[sent]].at - now))
                continue
            for emit in self._turn():
                now = time.perf_counter() - begin
                for (name, _), new in zip(emit.ids, emit.tokens, strict=True):
                    i = int(name.partition(":")[2])
                    first[i] = first[i] or (now if new else 0.0)
                    tokens[i].extend(new)
                for end in emit.finished:
                    done[int(end.id.partition(":")[2])] = now
        return [Served(tuple(t), f, d) for t, f, d in zip(tokens, first, done, strict=True)]

    def _submit(self, i: int, arrival: Arrival) -> None:
        request = Request(
            id=f"{self.runs}:{i}",
            prompt=arrival.prompt,
            max_tokens=arrival.tokens,
            stop_ids=arrival.stop_ids,
            sampling=GREEDY,
        )
        self.driver.post(Submit(request))

    def _turn(self) -> list[Emit]:
        transition = self.driver.turn()
        for reason in transition.reasons:
            if isinstance(reason, Admitted):
                self.hit += reason.hit
            elif isinstance(reason, Preempted):
                self.preempted += 1
            elif isinstance(reason, Voided):
                self.voided.append(reason.error)
        emits = [command for command in transition.commands if isinstance(command, Emit)]
        for end in (end for emit in emits for end in emit.finished):
            _check(end)
        return emits


def _check(end: Finished) -> None:
    if end.reason not in ("stop", "length"):
        raise RuntimeError(f"request {end.id} ended as {end.reason}: {end.error}")


def theirs(spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> Any:
    """The same model in transformers, ready to generate greedily."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {
        "head_dim": spec.head_dim,
        "attn_implementation": "sdpa",
    }  # in the config, though not in its signature
    rope = spec.rope or Rope()
    config = Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config)
    model = model.to(dtype=dtype).to_empty(device="cpu")
    # What no checkpoint holds (rotary frequencies) is computed anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(dict(named_parts(spec, weights)), strict=False)
    model.tie_weights()
    return model.eval()


def their_tokens(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """`generate`, greedily, exactly `tokens` tokens a prompt, prompts padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    made: list[list[int]] = out[:, longest:].tolist()
    return made
