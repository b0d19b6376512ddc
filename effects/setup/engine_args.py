"""The settings of an engine, in Python or on the command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

from attrs import evolve, field, fields, frozen

from minfer.effects.execution.tiers.peers.peer_plan import PeerPlan
from minfer.effects.models.architecture.kv_format import AUTO, KV_CACHE_DTYPES
from minfer.effects.models.architecture.quantization import LEVELS
from minfer.effects.models.architecture.state_parts import STATE_DTYPES
from minfer.effects.models.dtypes import DTYPE_BYTES
from minfer.effects.models.formats import READERS
from minfer.effects.models.ranks import Parallel
from minfer.effects.setup.custom_template import CustomTemplate
from minfer.effects.setup.device import DEVICES
from minfer.effects.setup.flexible_parser import FlexibleArgumentParser
from minfer.effects.setup.kv_events_settings import KvEventsConfig, kv_events_config
from minfer.effects.setup.option_values import (
    BYTES,
    COUNT,
    FLAG,
    FOLDER,
    ITL,
    KV_EVENTS,
    LENGTH,
    LORA_MODULES,
    MODEL,
    OBJECT,
    POLICY,
    SHARE,
    SPECULATION,
    TEMPLATE,
    TEXT,
    VALUE_ALIASES,
    WORD,
    one_of,
    option,
    own_value,
    whole_number,
)
from minfer.effects.setup.removed import refuse
from minfer.effects.setup.speculation_settings import SpeculativeConfig
from minfer.records.adapters import MAX_ADAPTER_SLOTS
from minfer.records.policy import Policy
from minfer.records.tiers import BY_COST, CHOICES
from minfer.sampling.params import MAX_LOGPROBS

_SHORT: Final = {"half": "float16", "float": "float32"}
DTYPES: Final[Mapping[str, str]] = _SHORT | {name: name for name in DTYPE_BYTES}
_Args = TypeVar("_Args")
Speculative = Mapping[str, Any] | SpeculativeConfig | None
KvEvents = Mapping[str, Any] | KvEventsConfig | None
# Removed settings, and why they were removed.
REMOVED: Final = {
    "max_repeat": "a step computes one token of each row, which is as fast as several"
}
EXECUTORS: Final = ("torch", "dry", "oracle")
# Adapters on the device, and their largest rank, by default; the largest that can be set.
MAX_LORAS, MAX_LORA_RANK, LARGEST_LORA_RANK = 8, 16, 512
CPU_LORAS_FACTOR: Final = 4  # adapters in host memory, for each on the device
MAX_ADAPTER_BYTES: Final = 2**32  # of the weights of one, by default


@frozen
class ModelArg:
    """The setting that may be a positional argument."""

    model: str | None = option(
        None,
        "a Hugging Face checkpoint: its folder, or its name on the hub, such as "
        "org/name or org/name@revision; or a GGUF file (default: the bundled model, a "
        "toy)",
        MODEL,
    )


def _takes_vllm_settings(cls: type[_Args]) -> type[_Args]:
    """Have a class of settings take those of vLLM's, too: see `read_settings`."""
    own_init: Callable[..., None] = cls.__init__
    known = {setting.name for setting in fields(cls) if setting.init}  # type: ignore[arg-type]  # attrs classes alone

    @wraps(own_init)
    def init(self: _Args, *values: Any, **settings: Any) -> None:
        if not settings.keys() <= known:
            from minfer.effects.setup.vllm_settings import read_settings  # a table

            settings = read_settings(cls.__name__, settings, known)
        settings = {
            name: own_value(name, value)
            for name, value in settings.items()
            if value is not None  # in vLLM's names: as if it were left out
        }
        own_init(self, *values, **settings)

    cls.__init__ = init  # type: ignore[assignment]  # its signature is the same
    return cls


@_takes_vllm_settings
@frozen(kw_only=True)
class EngineArgs(ModelArg):
    """Settings of an engine, which are also the parameters of `LLM` and `AsyncLLM`. Names
    are vLLM's; `steps_in_flight` is minfer's.

    Raises ConfigError for a value out of range.
    """

    tokenizer: str | Path | None = option(  # noqa: RUF009 - a field
        None,
        "another tokenizer than the checkpoint's: its folder, or its name on the hub",
        MODEL,
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a checkpoint on the hub",
        TEXT,
    )
    tokenizer_revision: str | None = option(
        None, "branch, tag or commit of --tokenizer on the hub", TEXT
    )
    download_dir: str | Path | None = option(  # noqa: RUF009 - a field
        None,
        "where checkpoints of the hub are kept (default: HF_HUB_CACHE, or "
        "~/.cache/huggingface/hub)",
        FOLDER,
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "changes to the checkpoint's config.json, as a JSON object; objects in it are "
        "merged",
        OBJECT,
    )
    generation_config: str = option(
        "auto",
        "where recommended sampling parameters are: auto, the checkpoint's "
        "generation_config.json; a folder that has that file; or vllm: none (default: "
        "auto)",
        WORD,
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "default sampling parameters as a JSON object, before the recommended ones",
        OBJECT,
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        f"most log-probabilities that a request may have, up to {MAX_LOGPROBS} (default: "
        f"{MAX_LOGPROBS})",
        whole_number(0, high=MAX_LOGPROBS),
    )
    dtype: str = option(
        "auto",
        "type of the numbers to compute with: auto, float32, bfloat16 or float16 "
        "(default: auto, which is the checkpoint's)",
        one_of(("auto", *DTYPES), "TYPE"),
    )
    kv_cache_dtype: str = option(
        AUTO,
        "type of the numbers in the KV cache: auto, the model's; fp8 or fp8_e4m3; or "
        "int8_per_token_head, with a scale per token and head (default: auto)",
        one_of((AUTO, *KV_CACHE_DTYPES), "TYPE"),
    )
    state_dtype: str = option(
        AUTO,
        "type of the numbers in the states of recurrent layers: auto, which is float32; "
        "float32; or bfloat16, of half the size (default: auto)",
        one_of((AUTO, *STATE_DTYPES), "TYPE"),
    )
    quantization: str | None = option(
        None,
        f"round a checkpoint's matrices as it is loaded: {', '.join(LEVELS)}; a "
        "checkpoint that is quantized already needs no option (default: none)",
        one_of(
            (*dict.fromkeys((*LEVELS, *READERS)),),
            "TYPE",
            optional=True,
            aliases=VALUE_ALIASES["quantization"],
        ),
    )
    enable_lora: bool = option(
        False,
        "run adapters (LoRA, in PEFT's form) beside the model: each request may name one",
    )
    max_loras: int = option(
        MAX_LORAS,
        "adapters on the device at once, and so in one step; others are loaded in turns "
        f"(default: {MAX_LORAS})",
        whole_number(1, high=MAX_ADAPTER_SLOTS),
    )
    max_lora_rank: int = option(
        MAX_LORA_RANK,
        "largest rank of an adapter, which each one on the device has room for (default: "
        f"{MAX_LORA_RANK})",
        whole_number(1, high=LARGEST_LORA_RANK),
    )
    max_cpu_loras: int | None = option(
        None,
        "adapters in host memory, from where they get onto the device without reading "
        "files (default: four times --max-loras)",
        COUNT,
    )
    max_lora_size: int = option(
        MAX_ADAPTER_BYTES,
        "most that the weights of one adapter may take, such as 512M (default: 4G)",
        BYTES,
    )
    device: str = option(
        "auto",
        "where to run (default: auto, a GPU if there is one that can be used)",
        one_of(DEVICES),
    )
    load_format: str = option(
        "auto",
        "dummy: random weights, made from config.json alone, to try speed and memory",
        one_of(("auto", "dummy"), aliases=VALUE_ALIASES["load_format"]),
    )
    max_model_len: int | None = option(
        None,
        "the context: most tokens of prompt and output together, such as 4096, 4k "
        "(4,000) or 4K (4,096); auto: as many as fit into memory (default: the model's)",
        LENGTH,
    )
    tensor_parallel_size: int = option(
        1,
        "GPUs that share the model, each with a part of every matrix (default: 1)",
        COUNT,
    )
    pipeline_parallel_size: int = option(
        1,
        "groups of tensor parallel GPUs, each with some of the layers (default: 1)",
        COUNT,
    )
    enable_expert_parallel: bool = option(
        False,
        "divide mixtures of experts among these GPUs by whole experts, instead of a part "
        "of each",
    )
    attention_window: int | None = option(
        None,
        "let layers with full attention read only this many tokens, up to their own, so "
        "that a sequence's memory stops growing; models were not trained for it "
        "(default: all tokens)",
        whole_number(2),
    )
    attention_sink_tokens: int = option(
        0,
        "first tokens of each sequence that are read beside --attention-window, as in "
        "StreamingLLM; 4 is usual (default: 0)",
        whole_number(0),
    )
    block_size: int = option(
        64, "tokens of a block, in which the KV cache is given out (default: 64)", COUNT
    )
    max_num_seqs: int = option(
        256, "most sequences that run at once (default: 256)", COUNT
    )
    max_num_batched_tokens: int | None = option(
        None, "most tokens of one step (default: 8192 on a GPU, else 2048)", COUNT
    )
    itl_target: float | str | None = option(
        None,
        "target for the time between tokens, in milliseconds: a step in which sequences "
        "decode takes only as many prompt tokens as fit into it; auto: a step takes "
        "little longer than without prompts, unless prompts pile up; none: only "
        "--max-num-batched-tokens bounds a step (default: none)",
        ITL,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "share of the memory that may be used, above 0 and at most 1 (default: 0.9 of a "
        "GPU's; without one, 0.5 of what is available)",
        SHARE,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV cache, such as 512M or 2G, instead of a share of the memory",
        BYTES,
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "size of the KV cache in blocks, on any device, instead of both",
        COUNT,
    )
    kv_host_memory: int | None = option(
        None,
        "host memory for KV blocks, such as 20G: what the device evicts can be loaded "
        "from there (default: none)",
        BYTES,
    )
    kv_host_choice: str = option(
        BY_COST,
        "whether cached blocks in host memory are loaded: cost, where that is measured "
        "to be faster than to compute them; load, always; or recompute, never (default: "
        "cost)",
        one_of(CHOICES),
    )
    kv_disk: str | Path | None = option(  # noqa: RUF009 - a field
        None,
        "keep KV blocks in this folder, too, which engines of this machine may share: "
        "known prompts need not be computed again after a restart (default: none)",
        FOLDER,
    )
    kv_disk_size: int | None = option(
        None,
        "what the blocks in that folder may take, such as 200G: the least recently used "
        "are removed (default: 64G, or a quarter of the file system)",
        BYTES,
    )
    kv_disk_choice: str = option(
        BY_COST,
        "whether blocks on disk are loaded, as --kv-host-choice (default: cost)",
        one_of(CHOICES),
    )
    enable_prefix_caching: bool = option(
        True, "keep the KV of prompts for those that begin alike (default: yes)"
    )
    scheduling_policy: str | Policy = option(  # noqa: RUF009 - a field
        "fcfs",
        "who goes first: fcfs (first come), priority, ageing, deadline, shortest, fair, "
        "window or static, with options as in ageing:seconds=5 (default: fcfs; of "
        "minfer serve: fair)",
        POLICY,
    )
    steps_in_flight: int = option(
        2, "steps that are planned before the first has ended (default: 2)", COUNT
    )
    speculative_config: Speculative = option(  # noqa: RUF009 - a field
        None,
        "speculative decoding, with vLLM's keys, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 4}\': method (ngram, suffix, '
        "draft_model, mtp, eagle3), model, num_speculative_tokens, prompt_lookup_min, "
        "prompt_lookup_max, disable_by_batch_size, adaptive, rejection_sample_method; "
        'answers stay the same, or with the last one "standard" their distribution',
        SPECULATION,
    )
    kv_events_config: KvEvents = option(  # noqa: RUF009 - a field
        None,
        "publish which blocks the prefix cache stores and removes; vLLM's keys, such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\': '
        "enable_kv_cache_events, publisher (zmq, null), endpoint, replay_endpoint, "
        "buffer_steps, hwm, max_queue_size, topic; for routers such as Dynamo's, llm-d's "
        "and AIBrix's; they have the token ids of prompts, and are not encrypted (extra "
        "kv-events)",
        KV_EVENTS,
    )
    enforce_eager: bool = option(
        False, "launch each GPU kernel by itself: no CUDA graphs (slower)"
    )
    disable_log_stats: bool = option(
        False, "a server does not log a line about its load every 10 s while requests run"
    )
    journal: str | Path | None = option(  # noqa: RUF009 - a field
        None,
        "record every input of the engine in this folder, for minfer replay",
        FOLDER,
    )
    journal_redact: bool = option(
        False, "keep token ids out of the journal: decisions replay, text does not"
    )
    journal_size: int = option(
        2**30, "what a run's journal may take (default: 1G)", BYTES
    )
    seed: int = option(0, "for all that is random (default: 0)", whole_number(-(2**63)))
    # Conversations: the template, variables that it gets with each, and the formats of
    # tool calls and reasoning (`Parsers`).
    chat_template: str | Path | CustomTemplate | None = field(
        default=None, validator=TEMPLATE
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = field(
        default=None, validator=OBJECT
    )
    tool_call_parser: str = field(default="auto", validator=WORD)
    reasoning_parser: str = field(default="auto", validator=WORD)
    # Adapters that it is started with, as words of the command line; and the folder of
    # names, which all processes of a server share (`live/adapters/registry.py`).
    lora_modules: Sequence[str] = field(default=(), validator=LORA_MODULES)
    lora_registry: str = ""
    # Signs the files in `kv_disk`, so that those of others are refused.
    kv_disk_secret: str = field(default="", repr=False)
    # Other engines that it sends KV blocks to, or gets them from.
    kv_peers: PeerPlan | None = field(default=None, repr=False)
    # Token ids in, token ids out.
    skip_tokenizer_init: bool = field(default=False, validator=FLAG)
    max_waiting: int = field(default=2**20, validator=COUNT)  # waiting samples
    executor: str = field(default="torch", validator=one_of(EXECUTORS))
    streaming: bool = False  # outputs are streamed: no step may take long
    check_steps: bool = False  # a decode step that waits for the GPU, or allocates, fails

    @property
    def adapter_slots(self) -> int:
        """Adapters on the device at once."""
        return self.max_loras if self.enable_lora else 0

    @property
    def host_adapters(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or CPU_LORAS_FACTOR * self.max_loras

    @property
    def parallel(self) -> Parallel:
        """The ranks that share the model."""
        return Parallel(
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.enable_expert_parallel,
        )

    def numbered(self, number: int) -> "EngineArgs":
        """Returns the settings of engine `number` of several, with addresses of its own.
        Raises ConfigError if it has none.
        """
        events = kv_events_config(self.kv_events_config)
        return evolve(self, kv_events_config=events and events.of_engine(number))

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Add an option for each setting that has one, with the setting's default."""
        group = parser.add_argument_group("model and engine")
        add_engine_options(group)
        defaults = {
            setting.name: setting.default for setting in fields(cls) if setting.metadata
        }
        parser.set_defaults(**defaults)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Returns the settings among parsed arguments. Raises ConfigError."""
        return engine_args(args)

    def with_blocks(self, count: int) -> "EngineArgs":
        """Returns these settings for an engine that replaces one with `count` KV blocks:
        requests that it served, or that API servers accepted, need them, and free memory
        differs each time.
        """
        return evolve(self, num_gpu_blocks_override=count, kv_cache_memory_bytes=None)


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Add an option for each setting of an engine that has one."""
    for setting in fields(EngineArgs):
        if setting.metadata:
            group.add_argument(f"--{setting.name.replace('_', '-')}", **setting.metadata)
    refuse(
        group, {f"--{name.replace('_', '-')}": reason for name, reason in REMOVED.items()}
    )


def engine_args(options: argparse.Namespace, **overrides: Any) -> EngineArgs:
    """Returns the given settings; others keep their defaults."""
    names = {setting.name for setting in fields(EngineArgs)}
    set_options = {
        key: value for key, value in vars(options).items() if value is not None
    }
    return EngineArgs(
        **{key: set_options[key] for key in set_options.keys() & names}, **overrides
    )
