"""The settings of an engine, and what follows from them before anything is loaded.

`EngineArgs` is what a user says; `prepare` reads the checkpoint's config.json and turns
it into sizes: a memory plan and the core's configuration. Neither imports torch, so
`minfer plan` is instant and a setting that cannot work fails before gigabytes are read.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Final

from attrs import Attribute, evolve, field, fields, frozen

from minfer.config import ConfigError, EngineConfig
from minfer.effects.models.checkpoint import (
    CheckpointError,
    eos_ids,
    read_config,
    read_optional,
)
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import parse_spec
from minfer.effects.setup.device import DEVICES, Device, DeviceError, find_device
from minfer.effects.setup.memory import MemoryPlan, plan_memory, usable_memory
from minfer.policies import policy_named
from minfer.policy import Policy
from minfer.request import ParameterError, SamplingParams

BATCHED_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
_SHORT: Final = {"half": "float16", "float": "float32"}
DTYPES: Final[Mapping[str, str]] = _SHORT | {name: name for name in DTYPE_BYTES}
_HEAD: Final = 1 << 16  # bytes read at the start of a weight file to know it again
_SAMPLES: Final = 16  # windows of 4 KiB read from the rest of it


def read_bytes(text: str) -> int:
    """A size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x 2^30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 512M, 2G or 2000000000"
        )
    number, unit = found.groups()
    base = 1000 if unit.islower() else 1024
    return int(float(number) * base ** " kmgt".index(unit[:1].lower() or " "))


@frozen
class _Kind:
    """What a setting may be, as a validator of its field, and how the command line reads
    it.
    """

    wanted: str
    right: Callable[[Any], bool]
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None

    def __call__(self, _: object, attribute: "Attribute[Any]", value: object) -> None:
        if not self.right(value):
            raise ConfigError(f"{attribute.name} must be {self.wanted}, not {value!r}")


def _whole(low: int = 1, metavar: str = "N", read: Callable[[str], int] = int) -> _Kind:
    def right(value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value is None or (whole and low <= value < 2**63)

    return _Kind(f"a whole number from {low} to 2^63 - 1", right, metavar, read)


def _one_of(known: tuple[str, ...], metavar: str | None = None) -> _Kind:
    choices = None if metavar else known
    return _Kind(
        f"one of {', '.join(known)}", known.__contains__, metavar, choices=choices
    )


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 < value <= 1)


def _policy(wanted: str | Policy) -> Policy:
    if isinstance(wanted, str):
        return policy_named(wanted)
    lacks = [
        name for name in vars(Policy) if name[0] != "_" and not hasattr(wanted, name)
    ]
    if lacks or isinstance(wanted, type):
        why = (
            f"{wanted!r} lacks {lacks[0]}"
            if lacks
            else f"{wanted!r} is a class: make one of it"
        )
        raise ConfigError(f"scheduling_policy must be a name or a policy; {why}")
    return wanted


_DTYPE: Final = _one_of(("auto", *DTYPES), "TYPE")
_FORMAT: Final = _one_of(("auto", "dummy"))
_COUNT: Final = _whole()
_BYTES: Final = _whole(1, "BYTES", read_bytes)
_SHARE: Final = _Kind("above 0 and at most 1", _is_share, "SHARE", float)
_MODEL: Final = _Kind(
    "the path of a checkpoint folder",
    lambda value: isinstance(value, str | Path | None),
    "MODEL",
)
_FOLDER: Final = _Kind(
    "a folder", lambda value: isinstance(value, str | Path | None), "DIR"
)
_POLICY: Final = _Kind(
    "a name or a policy", lambda value: _policy(value) is not None, "NAME"
)


def _option(default: Any, text: str, kind: _Kind | None = None) -> Any:
    """A field that is also an option: its metadata is what argparse is told. No kind: a
    flag.
    """
    told: dict[str, Any] = {
        "action": argparse.BooleanOptionalAction if default else "store_true"
    }
    if kind is not None:
        told = {"type": kind.read, "metavar": kind.metavar, "choices": kind.choices}
    return field(default=default, validator=kind, metadata={"help": text, **told})


@frozen(kw_only=True)
class EngineArgs:
    """Settings of an engine. Names are vLLM's; `steps_in_flight` and `max_repeat` are
    minfer's.

    Raises ConfigError for a value out of range.
    """

    model: str | None = _option(
        None,
        "a Hugging Face checkpoint: its folder, or its name on the hub, such as "
        "org/name or "
        "org/name@revision (default: the bundled model)",
        _MODEL,
    )
    dtype: str = _option(
        "auto", "auto, float32, bfloat16 or float16 (default: the checkpoint's)", _DTYPE
    )
    device: str = _option(
        "auto", "where to run (default: a GPU if there is one)", _one_of(DEVICES)
    )
    load_format: str = _option(
        "auto", "dummy: random weights, from config.json alone", _FORMAT
    )
    max_model_len: int | None = _option(
        None, "tokens of prompt and output together (default: the model's)", _whole(2)
    )
    block_size: int = _option(64, "tokens of a KV block (default: 64)", _COUNT)
    max_num_seqs: int = _option(256, "sequences that run at once (default: 256)", _COUNT)
    max_num_batched_tokens: int | None = _option(
        None, "tokens of a step (default: 8192 on a GPU, else 2048)", _COUNT
    )
    gpu_memory_utilization: float | None = _option(
        None,
        "share of the memory that may be used; on the CPU, of what is available",
        _SHARE,
    )
    kv_cache_memory_bytes: int | None = _option(
        None, "size of the KV cache, such as 512M or 2G; overrides the share", _BYTES
    )
    num_gpu_blocks_override: int | None = _option(
        None, "number of KV blocks, on whatever device; overrides both", _COUNT
    )
    enable_prefix_caching: bool = _option(
        True, "keep the KV of prompts for those that begin alike (default: yes)"
    )
    scheduling_policy: str | Policy = _option(  # noqa: RUF009 - a field
        "fcfs",
        "who goes first: fcfs, priority, ageing, deadline, shortest, fair, window or "
        "static, with options as in ageing:seconds=5 (default: fcfs)",
        _POLICY,
    )
    steps_in_flight: int = _option(2, "steps planned ahead (default: 2)", _COUNT)
    max_repeat: int = _option(1, "decode steps in one plan (default: 1)", _COUNT)
    enforce_eager: bool = _option(False, "no CUDA graphs")
    journal: str | Path | None = _option(  # noqa: RUF009 - a field
        None,
        "record every input of the engine in this folder, for minfer replay",
        _FOLDER,
    )
    journal_redact: bool = _option(
        False, "keep token ids out of it: decisions replay, text does not"
    )
    journal_size: int = _option(
        2**30, "what a run's journal may take (default: 1G)", _BYTES
    )
    seed: int = _option(0, "for all that is random (default: 0)", _whole(-(2**63)))
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    max_waiting: int = field(
        default=2**20, validator=_COUNT
    )  # samples that may wait in line
    executor: str = field(default="torch", validator=_one_of(("torch", "dry", "oracle")))
    check_steps: bool = (
        False  # a decode step that waits for the GPU or takes its memory fails
    )


def engine_args(options: argparse.Namespace, **more: Any) -> EngineArgs:
    """The settings that were given; what was left out keeps its default."""
    names = {setting.name for setting in fields(EngineArgs)}
    given = {key: value for key, value in vars(options).items() if value is not None}
    return EngineArgs(**{key: given[key] for key in given.keys() & names}, **more)


@frozen(kw_only=True)
class Setup:
    """What follows from the settings: all that an engine needs but weights
    and tokenizer.
    """

    args: EngineArgs
    device: Device
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
    """The folder of a model that comes with the package. Raises ConfigError if it is not
    there.
    """
    folder = Path(str(resources.files("minfer.effects"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        what = (
            "the bundled model is missing; install minfer again, or name a folder "
            "with --model"
        )
        raise ConfigError(f"{folder}: {what}")
    return folder


def model_folder(model: str | None) -> Path:
    """The folder of the checkpoint that `model` names, here or on the hub. Raises
    ConfigError.
    """
    if model is None:
        return bundled_folder()
    if Path(model).is_dir():
        return Path(model)
    from minfer.effects.models.hub import is_id, snapshot  # its import takes a while

    if is_id(str(model)):
        return snapshot(str(model))
    what = (
        "give the path of a Hugging Face checkpoint (config.json, safetensors, "
        "tokenizer.json) "
    )
    what += "or its name on the hub (org/name), or leave it out for the bundled model"
    raise ConfigError(f"model {str(model)!r} is not a folder; {what}")


def prepare(args: EngineArgs, *, limit: int | None = None) -> Setup:
    """Size an engine from config.json alone.

    `limit` is the memory that may be used, in bytes, on a device that need not be there;
    None: the default share of what is available. Executors that compute nothing have no
    limit. Raises CheckpointError, ConfigError, DeviceError and NotEnoughMemoryError.
    """
    if args.journal_redact and not args.journal:
        raise ConfigError(
            "--journal-redact records nothing without --journal DIR; name a folder"
        )
    computes = args.executor == "torch"
    device = (
        Device(args.device) if limit is not None and args.device != "auto" else Device()
    )
    if limit is None and computes:
        device = find_device(args.device)
    folder = model_folder(args.model)
    raw = read_config(folder)
    spec = _spec(raw, str(folder / "config.json"))
    spec = evolve(spec, dtype=DTYPES.get(args.dtype, spec.dtype))
    if device.kind == "cuda" and spec.head_dim > 256:
        what = (
            f"heads of {spec.head_dim} dimensions are too wide for the GPU (at most 256)"
        )
        raise DeviceError(f"{folder}: {what}; run it on the CPU with --device cpu")
    if device.kind == "cuda" and spec.vocab_size > 1 << 20:
        what = f"the GPU's sampler takes {1 << 20} tokens at most, not {spec.vocab_size}"
        raise DeviceError(f"{folder}: {what}; run it on the CPU with --device cpu")
    length = args.max_model_len or spec.max_position_embeddings
    if length > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {length} is longer than the {spec.max_position_embeddings} "
            f"tokens the "
            f"model was made for (max_position_embeddings in {folder / 'config.json'}); "
            f"lower it"
        )
    if limit is None and computes:
        limit = usable_memory(device, args.gpu_memory_utilization)
    config = EngineConfig(
        num_blocks=1,  # until the plan says how many
        block_size=args.block_size,
        max_model_len=length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or BATCHED_TOKENS[device.kind],
        vocab_size=spec.vocab_size,
        depth=args.steps_in_flight,
        max_repeat=args.max_repeat,
        max_waiting=args.max_waiting,
        policy=_policy(args.scheduling_policy),
        # Keys that no layer looks beyond; 0 if one looks at all of them.
        window=0 if None in spec.windows else max(filter(None, spec.windows), default=0),
    )
    memory = plan_memory(
        spec,
        config,
        limit,
        kv_cache_memory=args.kv_cache_memory_bytes,
        num_blocks=args.num_gpu_blocks_override,
        cuda=device.kind == "cuda",
    )
    free = (
        memory.num_blocks // 100
    )  # vLLM's share: who runs can grow before somebody joins
    return Setup(
        args=args,
        device=device,
        folder=folder,
        spec=spec,
        memory=memory,
        config=evolve(config, num_blocks=memory.num_blocks, watermark=free),
        stop_ids=frozenset(eos_ids(folder)),
        fingerprint=_fingerprint(args, raw, spec.dtype, folder),
        default_params=_default_params(folder / "generation_config.json"),
    )


def _spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec by the family table, or by transformers for what is not in it."""
    try:
        return parse_spec(config, where)
    except UnsupportedModelError:
        from minfer.effects.models.fallback import (
            fallback_spec,
        )  # imports torch and transformers

        return fallback_spec(config, where)


def _default_params(path: Path) -> Mapping[str, float]:
    """What generation_config.json says about sampling. Raises CheckpointError."""
    advice = read_optional(path)
    if advice.get("do_sample") is False:
        return {"temperature": 0}
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: advice[name] for name in names if advice.get(name) is not None}
    try:
        SamplingParams(**found)
    except ParameterError as error:
        raise CheckpointError(
            f"{path}: {error}; correct it, or remove it there"
        ) from None
    return found


def _fingerprint(
    args: EngineArgs, config: Mapping[str, object], dtype: str, folder: Path
) -> bytes:
    """Digest all that the KV of a token depends on besides the tokens before it.

    Weights are known by name and size of their files, their headers, and windows of their
    bytes: reading all of a large model to name it would take as long as loading it.
    """
    weights: list[Any] = [args.executor, args.load_format, args.seed]
    if args.executor == "torch" and args.load_format != "dummy":
        weights = [_file_identity(path) for path in sorted(folder.glob("*.safetensors"))]
    told = json.dumps([config, dtype, weights], sort_keys=True)
    return hashlib.sha256(told.encode()).digest()


def _file_identity(path: Path) -> str:
    digest = hashlib.sha256(path.name.encode())
    with (
        suppress(OSError),
        path.open("rb") as file,
    ):  # the loader will say what is wrong with it
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little") + file.read(_HEAD))
        for i in range(1, _SAMPLES + 1):
            file.seek(max(0, (size * i) // _SAMPLES - 4096))
            digest.update(file.read(4096))
    return digest.hexdigest()
