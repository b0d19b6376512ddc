"""Computes an engine's sizes from its settings, before weights are loaded.

`prepare` reads the checkpoint's config.json, or a GGUF file's metadata, and turns a
user's settings (`EngineArgs`) into a device, a memory plan and the core's configuration.
It loads no weights and imports no torch, but where INT8 is made at load and norms are
read: `minfer plan` is instant, and an impossible setting fails before gigabytes are read.
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from minfer.effects.execution.tiers.peers.peer_plan import PeerPlan
from minfer.effects.models.adapters.peft_files import check_model
from minfer.effects.models.architecture.attention_window import with_attention_window
from minfer.effects.models.architecture.kv_format import AUTO, KV_CACHE_DTYPES
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.quantization import (
    requested,
    warn_of_cache_scheme,
)
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import (
    CheckpointError,
    config_path,
    eos_ids,
    read_config,
)
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.checkpoint.weight_files import warn_of_adapter
from minfer.effects.models.config_reader import (
    UnknownModelError,
    UnsupportedModelError,
)
from minfer.effects.models.dtypes import FP8, INT8
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.setup.advice import recommended_params
from minfer.effects.setup.device import DeviceError, DeviceInfo, find_device
from minfer.effects.setup.draft_checkpoint import DraftCheckpoint
from minfer.effects.setup.draft_head_checkpoint import (
    HeadCheckpoint,
    find_head_checkpoint,
    with_head,
)
from minfer.effects.setup.engine_args import DTYPES, EngineArgs
from minfer.effects.setup.engine_config import engine_config
from minfer.effects.setup.fingerprint import fingerprint
from minfer.effects.setup.memory import (
    MemoryPlan,
    usable_memory,
)
from minfer.effects.setup.model_source import (
    check_generation_overrides,
    checkpoint_folder,
    generation_file,
    tokenizer_folder,
    with_overrides,
)
from minfer.effects.setup.option_values import AUTO_LENGTH
from minfer.effects.setup.plans import (
    check_kernels,
    longest_fitting_context,
    memory_plans,
    prepare_draft,
)
from minfer.effects.setup.recurrent_layers import (
    check_recurrent_layers,
    with_state_dtype,
)
from minfer.effects.setup.speculation_settings import (
    SpeculativeConfig,
    speculative_config,
)
from minfer.effects.setup.tiers import describe_tiers, external_store, host_tier
from minfer.records.config import EngineConfig
from minfer.records.request import SamplingParams
from minfer.values.checks import ConfigError

_log = logging.getLogger("minfer.model")
# One block in 100 stays free at an admission, so that running sequences can grow:
# vLLM's.
WATERMARK_DIVISOR: Final = 100
# Compute capability from which Triton converts FP8 (e4m3).
MIN_FP8_CAPABILITY: Final = (8, 9)


@frozen(kw_only=True)
class Setup:
    """The result of the settings: all that an engine needs but weights and tokenizer."""

    args: EngineArgs
    device: DeviceInfo
    folder: Path
    tokenizer_folder: Path
    spec: ModelSpec  # with the dtype in use
    memory: MemoryPlan
    config: EngineConfig
    stop_ids: frozenset[int]  # the model's own ends of sequence
    fingerprint: bytes  # of all that KV depends on, besides tokens
    default_params: Mapping[str, float]  # the model's recommended sampling parameters
    speculative: SpeculativeConfig | None = None  # as requested
    draft: DraftCheckpoint | None = None  # the draft model, if there is one
    head: HeadCheckpoint | None = None  # the draft head, if there is one

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Returns the recommended parameters, changed by `overrides`. Raises
        ParameterError.
        """
        return SamplingParams(**{**self.default_params, **overrides})

    def described_tiers(self) -> list[tuple[str, str]]:
        """What keeps KV blocks besides the device, and how many, in words."""
        return describe_tiers(self.args, self.config, self.memory)


def prepare(args: EngineArgs, *, limit: int | None = None, warns: bool = True) -> Setup:
    """Compute an engine's sizes from the model's config, or a GGUF file's metadata.

    Invalid values in generation_config.json, and a config's `kv_cache_scheme`, are not
    used; `warns` logs a warning for each.
    `limit` is the memory that may be used, in bytes, on a device that need not exist;
    None: the default share of what is available. Executors that compute nothing have no
    limit. Raises CheckpointError, ConfigError, DeviceError and NotEnoughMemoryError.
    """
    if args.journal_redact and not args.journal:
        raise ConfigError(
            "--journal-redact records nothing without --journal DIR; name a folder"
        )
    device = _device(args, limit)
    folder = checkpoint_folder(args)
    tokenizer = tokenizer_folder(args, folder)
    advice_file = generation_file(args, folder)
    own_params = check_generation_overrides(args.override_generation_config)
    raw_config = with_overrides(read_config(folder), args.hf_overrides)
    config_name = str(config_path(folder))
    spec = _quantized(
        _spec(raw_config, config_name, args.dtype, warns=warns), folder, args
    )
    spec = _with_cache_dtype(spec, args.kv_cache_dtype, device)
    spec = with_state_dtype(spec, args.state_dtype)
    window, sinks = args.attention_window, args.attention_sink_tokens
    spec = with_attention_window(spec, window, sinks)
    if warns:
        warn_of_adapter(folder)
        warn_of_cache_scheme(raw_config, config_name, spec.kv_dtype)
    if device.kind == "cuda":
        check_kernels(spec, folder)
    speculative = speculative_config(args.speculative_config)
    head = find_head_checkpoint(speculative, args, folder, spec)
    spec = with_head(spec, head)
    check_peers(args.kv_peers, spec.with_head_layer())
    check_recurrent_layers(args, spec)
    if args.enable_lora:
        check_model(spec)
    elif args.lora_modules:
        raise ConfigError("lora_modules needs enable_lora (--enable-lora); set it, too")
    if limit is None and args.executor == "torch":
        limit = usable_memory(device, args.gpu_memory_utilization)
    if device.kind == "cpu" and limit is not None:
        limit //= args.parallel.ranks  # they share the machine's
    if args.max_model_len == AUTO_LENGTH:
        length = longest_fitting_context(args, spec, device, folder, speculative, limit)
        args = evolve(args, max_model_len=length)
    config = engine_config(args, spec, device, folder, speculative)
    spec = _with_rope_factors(spec, config.max_model_len, args, config_name, warns=warns)
    draft = prepare_draft(args, spec, config, device, folder, speculative)
    if args.parallel.ranks > 1:
        _check_ranks(args, config, speculative)
    plans = memory_plans(args, spec, config, draft, device, limit)
    # All ranks have the same blocks; those of a stage have equal sizes.
    memory = min(plans, key=lambda plan: plan.num_blocks)
    blocks = memory.num_blocks
    return Setup(
        args=args,
        device=device,
        folder=folder,
        tokenizer_folder=tokenizer,
        spec=spec,
        speculative=speculative,
        draft=draft,
        head=head,
        memory=memory,
        config=evolve(
            config,
            num_blocks=blocks,
            watermark=blocks // WATERMARK_DIVISOR,
            host=host_tier(args, memory, on_cpu=device.kind == "cpu"),
            external_store=external_store(args, memory),
        ),
        stop_ids=frozenset(eos_ids(folder)),
        fingerprint=fingerprint(args, raw_config, spec, folder, head),
        default_params={**_advice(advice_file, warns=warns), **own_params},
    )


def _advice(file: Path | None, *, warns: bool) -> Mapping[str, float]:
    """Returns the recommended sampling parameters of a file, if there is one."""
    return {} if file is None else recommended_params(file, warns=warns)


def prepare_as_decided(
    args: EngineArgs, device: str, num_blocks: int, max_model_len: int | None = None
) -> Setup:
    """Returns the same setup that another process has prepared, without a look at this
    machine's devices: `device` (its type), `num_blocks` and, if given, `max_model_len`
    are what that process decided. Raises as `prepare`.
    """
    decided_args = evolve(
        args,
        device=device,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=None,
        max_model_len=max_model_len or args.max_model_len,
    )
    return prepare(decided_args, limit=sys.maxsize, warns=False)


def _device(args: EngineArgs, limit: int | None) -> DeviceInfo:
    """Returns the device that is found, or with a `limit` one that need not exist."""
    if limit is not None:
        return DeviceInfo() if args.device == "auto" else DeviceInfo(args.device)
    if args.executor != "torch":
        return DeviceInfo()
    return find_device(args.device, args.parallel.ranks)


def _spec(
    config: Mapping[str, Any], config_name: str, dtype: str, *, warns: bool
) -> ModelSpec:
    """Returns the spec by the family table, or by transformers for what the table does
    not support; with the requested dtype. Values that are wrong are wrong for both.
    """
    wanted_dtype = DTYPES.get(dtype)
    try:
        return parse_spec(config, config_name, wanted_dtype)
    except UnsupportedModelError as refusal:
        if is_gguf(Path(config_name)):
            raise  # transformers' model is not loaded from such a file
        # It imports torch and transformers.
        from minfer.effects.models.fallback import fallback_spec

        unknown = isinstance(refusal, UnknownModelError)
        try:
            spec = fallback_spec(config, config_name, wanted_dtype)
        except CheckpointError as error:
            # The table's own refusals say more than transformers' class does.
            raise (error if unknown else refusal) from None
        if warns:
            runner = f"{spec.family.architecture} of transformers runs this model"
            _log.warning("%s, as minfer's own forward pass does not: %s", runner, refusal)
        return spec


def _quantized(spec: ModelSpec, folder: Path, args: EngineArgs) -> ModelSpec:
    """Returns the spec with its matrices stored as the settings and the checkpoint's
    files say. Raises ConfigError.
    """
    stored = spec.quantization
    if spec.parameters and stored is None and args.quantization is not None:
        raise ConfigError(
            f"quantization {args.quantization!r} is not supported for "
            f"{spec.family.architecture}, which transformers' own model runs; leave the "
            f"setting out"
        )
    spec = evolve(spec, quantization=requested(args.quantization, stored))
    has_files = args.executor == "torch" and args.load_format != "dummy"
    return as_stored(spec, folder) if has_files else spec


def check_peers(plan: PeerPlan | None, spec: ModelSpec) -> None:
    """Refuse to exchange blocks that ranks of several sizes divide in more ways than by
    key heads. Raises ConfigError.
    """
    if plan is None or not spec.has_mixed_layers:
        return
    if max(plan.prefill_ranks, plan.decode_ranks) > 1:
        raise ConfigError(
            f"prefill and decode apart (--prefill, --decode) are not supported for "
            f"{spec.family.architecture} over several GPUs each, as its layers keep "
            f"different numbers of a token; use one for each (tensor_parallel_size)"
        )


def _check_ranks(
    args: EngineArgs,
    config: EngineConfig,
    speculative: SpeculativeConfig | None,
) -> None:
    """Refuse what engines of several ranks do not do. Raises ConfigError."""
    subject = "an engine of several ranks (tensor_parallel_size, pipeline_parallel_size)"
    if args.executor != "torch":
        raise ConfigError(f"{subject} needs the torch executor, not {args.executor!r}")
    if args.kv_disk is not None:
        raise ConfigError(
            f"{subject} cannot keep KV blocks on disk (kv_disk) yet; leave that out"
        )
    plan = args.kv_peers
    if plan is not None and not plan.is_local:
        raise ConfigError(
            f"{subject} cannot exchange KV blocks with engines of other machines "
            f"(--prefill-listen, --prefill-at) yet; leave these out"
        )
    if args.pipeline_parallel_size == 1:
        return
    if plan is not None:
        raise ConfigError(
            "prefill and decode apart (--prefill, --decode) are not supported with "
            "stages; use one (pipeline_parallel_size)"
        )
    if speculative is not None:
        raise ConfigError(
            "speculative decoding is not supported with stages; use one "
            "(pipeline_parallel_size), or leave speculative_config out"
        )
    if len(config.block_groups) > 1:
        raise ConfigError(
            "layers with different windows cannot be divided into stages yet; use one "
            "(pipeline_parallel_size)"
        )


def _with_cache_dtype(spec: ModelSpec, name: str, device: DeviceInfo) -> ModelSpec:
    """Returns the spec with a KV cache of the requested type. Raises ConfigError,
    DeviceError.
    """
    if name == AUTO:
        return spec
    dtype = KV_CACHE_DTYPES[name]
    latents = any(isinstance(group.attention, MLA) for group in spec.groups)
    if dtype == INT8 and latents:
        raise ConfigError(
            f"kv_cache_dtype {name!r} is for keys and values of heads, and this model "
            "keeps latents (MLA); choose fp8 or auto"
        )
    if dtype == INT8 and spec.has_mixed_layers:
        raise ConfigError(
            f"kv_cache_dtype {name!r} is not supported for {spec.family.architecture}, "
            f"whose layers keep different numbers of a token; choose fp8 or auto"
        )
    if (
        dtype == FP8
        and device.capability is not None
        and device.capability < MIN_FP8_CAPABILITY
    ):
        major, minor = device.capability
        raise DeviceError(
            f"kv_cache_dtype {name!r} needs a GPU of compute capability "
            f"{MIN_FP8_CAPABILITY[0]}.{MIN_FP8_CAPABILITY[1]} (Ada, Hopper) or later, "
            f"and {device.name} has {major}.{minor}; choose int8_per_token_head or auto"
        )
    return evolve(spec, kv_dtype=dtype)


def _with_rope_factors(
    spec: ModelSpec, length: int, args: EngineArgs, config_name: str, *, warns: bool
) -> ModelSpec:
    """Returns the spec with the factors of longrope that a context of that many tokens
    has; logs which.
    """
    original_length = spec.original_context
    if original_length is None:
        return spec
    is_long = length > original_length
    if warns and is_long:
        explanation = (
            "its long factors hold for sequences of all lengths; transformers takes"
        )
        _log.warning(
            "%s: longrope: with a context of %d tokens, %s the short ones up to %d",
            config_name,
            length,
            explanation,
            original_length,
        )
    elif warns and args.max_model_len is None:
        _log.warning(
            "%s: longrope: the context is %d tokens, where its short factors hold; "
            "--max-model-len up to %d takes the long ones",
            config_name,
            original_length,
            spec.max_position_embeddings,
        )
    return spec.with_context(length)
