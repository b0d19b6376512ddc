"""Settings of models with recurrent layers, and what is refused beside these."""

from math import ceil
from typing import Final

from attrs import evolve

from minfer.effects.models.architecture.kv_format import AUTO
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.layout.shapes import captured_tokens
from minfer.effects.setup.engine_args import EngineArgs
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.state_keeping import StateKeeping
from minfer.values.checks import ConfigError

# Of states that are saved in decode beside drafts of the device: 4 tokens of 256 have no
# drafts with two steps in flight.
DRAFTED_STRIDE_TOKENS: Final = 256


def with_state_dtype(spec: ModelSpec, name: str) -> ModelSpec:
    """Returns the spec with states of the requested type; "auto" is float32. Raises
    ConfigError for a type without states.
    """
    if name == AUTO:
        return spec
    if not spec.has_states:
        raise ConfigError(
            f"state_dtype {name!r} is for recurrent layers, and "
            f"{spec.family.architecture} has none; leave it out"
        )
    return evolve(spec, state_dtype=name)


def state_keeping(
    spec: ModelSpec,
    block_size: int,
    speculation: Speculation | None,
    budget: int,
    *,
    caches_prefixes: bool = True,
) -> StateKeeping:
    """Returns which states are kept, in an engine with `budget` tokens of a step.

    Without a prefix cache, only those that samples of one request share. With a draft
    model or head the last few tokens before a state is saved in decode have no drafts, so
    that happens less often. No graph keeps states inside chunks, so only chunks that are
    too long for a graph do.
    """
    if not spec.has_states:
        return StateKeeping()
    keeping = StateKeeping(inside_from=1 + captured_tokens(spec, budget))
    if not caches_prefixes:
        return evolve(
            keeping, stride_blocks=0, decode_stride_blocks=0, every_prompt=False
        )
    if speculation is None or speculation.drafter != DEVICE:
        return keeping
    stride = ceil(DRAFTED_STRIDE_TOKENS / block_size)
    return evolve(keeping, decode_stride_blocks=stride)


def check_recurrent_layers(args: EngineArgs, spec: ModelSpec) -> None:
    """Refuse settings that are not supported beside recurrent layers. Raises
    ConfigError.
    """
    if not spec.has_states:
        return
    name = spec.family.architecture
    plan = args.kv_peers
    if plan is not None and plan.prefill_ranks != plan.decode_ranks:
        raise ConfigError(
            f"prefill and decode apart (--prefill, --decode) need as many GPUs for a "
            f"prefill engine as for one that decodes with {name}, as a state of its "
            f"recurrent layers is exchanged rank by rank, and {plan.prefill_ranks} "
            f"(--prefill-tensor-parallel-size) is not {plan.decode_ranks} "
            f"(--tensor-parallel-size)"
        )


def check_draft_layers(spec: ModelSpec) -> None:
    """Refuse a draft model with recurrent layers. Raises ConfigError."""
    if spec.has_states:
        raise ConfigError(
            f"speculative_config: a draft model with recurrent layers "
            f"({spec.family.architecture}) is not supported; choose another draft model"
        )
