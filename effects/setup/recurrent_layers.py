"""Settings of models with recurrent layers, and what is refused beside these."""

from attrs import evolve

from minfer.effects.models.architecture.kv_format import AUTO
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.speculation_settings import SpeculativeConfig
from minfer.values.checks import ConfigError


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


def check_recurrent_layers(
    args: EngineArgs, spec: ModelSpec, speculative: SpeculativeConfig | None
) -> None:
    """Refuse settings that are not supported beside recurrent layers. Raises
    ConfigError.
    """
    if not spec.has_states:
        return
    name = spec.family.architecture
    if speculative is not None:
        raise ConfigError(
            f"speculative decoding is not supported yet for {name}, as the states of its "
            f"recurrent layers take no drafts; leave speculative_config out"
        )
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
