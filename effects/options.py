"""The settings of an engine, and what follows from them before anything is loaded.

`EngineArgs` is what a user says; `prepare` reads the checkpoint's config.json and turns it into
sizes: a memory plan and the core's configuration. Neither imports torch, so `minfer plan` is
instant and a setting that cannot work fails before gigabytes are read.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from minfer.config import ConfigError, EngineConfig
from minfer.effects.checkpoint import CheckpointError, eos_ids, read_config, read_optional
from minfer.effects.memory import CPU_SHARE, MemoryPlan, Sizes, available_memory, plan_memory
from minfer.effects.spec import DTYPE_BYTES, ModelSpec, UnsupportedModelError, parse_spec
from minfer.policies import policy_named
from minfer.policy import FirstCome, Policy
from minfer.request import ParameterError, SamplingParams

EXECUTORS: Final = ("torch", "dry", "oracle")
LOAD_FORMATS: Final = ("auto", "dummy")
DTYPES: Final[Mapping[str, str]] = {
    "half": "float16",
    "float": "float32",
    **{name: name for name in DTYPE_BYTES},
}
_HEAD: Final = 1 << 16  # bytes read at the start of a weight file to know it again
_SAMPLES: Final = 16  # windows of 4 KiB read from the rest of it


@frozen(kw_only=True)
class EngineArgs:
    """Settings of an engine. Names are vLLM's; `steps_in_flight` and `max_repeat` are minfer's.

    Raises ConfigError for a value out of range.
    """

    model: str | None = None  # a checkpoint's folder or its name on the hub; None: the bundled one
    dtype: str = "auto"  # of weights and KV cache; auto: the checkpoint's
    load_format: str = "auto"  # "dummy": random weights, from config.json alone
    max_model_len: int | None = None  # prompt and output; None: what the model was made for
    block_size: int = 64  # tokens of a KV block
    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int = 2048  # of one forward
    gpu_memory_utilization: float | None = None  # share of the device's memory; None: its default
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None  # KV blocks, on whatever device
    enable_prefix_caching: bool = True
    scheduling_policy: str | Policy = "fcfs"  # as `policy_named` reads it, or an object
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    steps_in_flight: int = 2
    max_repeat: int = 1  # decode steps in one plan, at most
    max_waiting: int = 2**20  # samples that may wait in line
    seed: int = 0
    executor: str = "torch"

    def __attrs_post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _policy(self.scheduling_policy)
        _one_of("executor", self.executor, EXECUTORS)
        for name, low in (
            ("max_model_len", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 1),
            ("steps_in_flight", 1),
            ("max_repeat", 1),
            ("max_waiting", 1),
            ("seed", -(2**63)),
        ):
            _whole(name, getattr(self, name), low)
        share = self.gpu_memory_utilization
        if share is not None and not (
            isinstance(share, int | float) and math.isfinite(share) and 0 < share <= 1
        ):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}")
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model must be the path of a checkpoint folder, not {self.model!r}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _policy(wanted: str | Policy) -> Policy:
    if isinstance(wanted, str):
        return policy_named(wanted)
    lacks = [name for name in vars(FirstCome) if name.islower() and not hasattr(wanted, name)]
    if lacks or isinstance(wanted, type):
        why = f"{wanted!r} lacks {lacks[0]}" if lacks else f"{wanted!r} is a class: make one of it"
        raise ConfigError(f"scheduling_policy must be a name or a policy; {why}")
    return wanted


def _whole(name: str, value: object, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise ConfigError(f"{name} must be a whole number from {low} to 2^63 - 1, not {value!r}")


@frozen(kw_only=True)
class Setup:
    """What follows from the settings: all that an engine needs but weights and tokenizer."""

    args: EngineArgs
    folder: Path
    spec: ModelSpec  # with the dtype that runs
    memory: MemoryPlan
    config: EngineConfig
    stop_ids: frozenset[int]  # the model's own ends of sequence
    fingerprint: bytes  # of what KV depends on, besides tokens
    default_params: Mapping[str, float]  # of sampling, as the model's makers advise

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The makers' advice, changed by `overrides`. Raises ParameterError."""
        return SamplingParams(**{**self.default_params, **overrides})


def bundled_folder(name: str = "target") -> Path:
    """The folder of a model that comes with the package. Raises ConfigError if it is not there."""
    folder = Path(str(resources.files("minfer.effects"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: the bundled model is missing from this installation; "
            "install minfer again, or name a checkpoint folder with --model"
        )
    return folder


def model_folder(model: str | None) -> Path:
    """The folder of the checkpoint that `model` names, here or on the hub. Raises ConfigError."""
    if model is None:
        return bundled_folder()
    if Path(model).is_dir():
        return Path(model)
    from minfer.effects.hub import is_id, snapshot  # its import takes a while

    if is_id(str(model)):
        return snapshot(str(model))
    raise ConfigError(
        f"model {str(model)!r} is not a folder; give the path of a Hugging Face checkpoint "
        "(config.json, safetensors, tokenizer.json) or its name on the hub (org/name), or leave it "
        "out for the bundled model"
    )


def prepare(args: EngineArgs, *, limit: int | None = None) -> Setup:
    """Size an engine from config.json alone.

    `limit` is the memory that may be used, in bytes; None: the default share of what is available.
    Executors that compute nothing have no limit. Raises CheckpointError, ConfigError and
    NotEnoughMemoryError.
    """
    folder = model_folder(args.model)
    raw = read_config(folder)
    spec = _spec(raw, str(folder / "config.json"))
    dtype = spec.dtype if args.dtype == "auto" else DTYPES[args.dtype]
    spec = evolve(spec, dtype=dtype)
    length = args.max_model_len or spec.max_position_embeddings
    if length > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {length} is longer than the {spec.max_position_embeddings} tokens the "
            f"model was made for (max_position_embeddings in {folder / 'config.json'}); lower it"
        )
    if limit is None and args.executor == "torch":
        limit = int(available_memory() * (args.gpu_memory_utilization or CPU_SHARE))
    sizes = Sizes(
        max_model_len=length,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    memory = plan_memory(
        spec,
        dtype=dtype,
        sizes=sizes,
        limit=limit,
        kv_cache_memory=args.kv_cache_memory_bytes,
        num_blocks=args.num_gpu_blocks_override,
    )
    return Setup(
        args=args,
        folder=folder,
        spec=spec,
        memory=memory,
        config=_engine_config(args, spec, memory),
        stop_ids=frozenset(eos_ids(folder)),
        fingerprint=_fingerprint(args, raw, dtype, folder),
        default_params=_default_params(folder / "generation_config.json"),
    )


def _spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec by the family table, or by transformers for what is not in it."""
    try:
        return parse_spec(config, where)
    except UnsupportedModelError:
        from minfer.effects.fallback import fallback_spec  # imports torch and transformers

        return fallback_spec(config, where)


def _engine_config(args: EngineArgs, spec: ModelSpec, memory: MemoryPlan) -> EngineConfig:
    return EngineConfig(
        num_blocks=memory.num_blocks,
        block_size=args.block_size,
        max_model_len=memory.sizes.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        depth=args.steps_in_flight,
        watermark=memory.num_blocks // 100,  # vLLM's share: who runs can grow before somebody joins
        max_repeat=args.max_repeat,
        max_waiting=args.max_waiting,
        policy=_policy(args.scheduling_policy),
        window=_window(spec),
    )


def _window(spec: ModelSpec) -> int:
    """The keys that no layer looks beyond; 0 if one looks at all of them."""
    return 0 if None in spec.windows else max(filter(None, spec.windows), default=0)


def _default_params(path: Path) -> Mapping[str, float]:
    """What generation_config.json says about sampling. Raises CheckpointError."""
    advice = read_optional(path)
    if advice.get("do_sample") is False:
        return {"temperature": 0}
    names = ("temperature", "top_p", "top_k")
    found = {name: advice[name] for name in names if advice.get(name) is not None}
    try:
        SamplingParams(**found)
    except ParameterError as error:
        raise CheckpointError(f"{path}: {error}; correct it, or remove it there") from None
    return found


def _fingerprint(args: EngineArgs, config: Mapping[str, object], dtype: str, folder: Path) -> bytes:
    """Digest all that the KV of a token depends on besides the tokens before it.

    Weights are known by name and size of their files, their headers, and windows of their bytes:
    reading all of a large model to name it would take as long as loading it.
    """
    if args.executor != "torch":
        weights = args.executor.encode()
    elif args.load_format == "dummy":
        weights = f"dummy {args.seed}".encode()
    else:
        weights = b"".join(map(_file_identity, sorted(folder.glob("*.safetensors"))))
    parts = (json.dumps(config, sort_keys=True).encode(), dtype.encode(), weights)
    # Each part is digested by itself, so that none runs into the next.
    return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).digest()


def _file_identity(path: Path) -> bytes:
    digest = hashlib.sha256(path.name.encode())
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(size.to_bytes(8, "little") + file.read(_HEAD))
            for i in range(1, _SAMPLES + 1):
                file.seek(max(0, (size * i) // _SAMPLES - 4096))
                digest.update(file.read(4096))
    except OSError:
        pass  # the loader will say what is wrong with it
    return digest.digest()
