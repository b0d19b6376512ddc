"""All options of `vllm serve` 0.33.0, and what minfer makes of each.

Theory. The facts are that release's: an option's names, what follows it (nothing, a flag;
a value; many), and its default. The outcomes are minfer's:

- same: minfer has an option of that name;
- alias: minfer has one of that meaning under another name (`ALIASES`);
- always: minfer does that, and cannot do otherwise;
- hint: it can change speed or looks, but no answer, and has no effect here;
- refused: it has a reason and a remedy.

An option at vLLM's own default asks for nothing, and is taken whatever its outcome. The
first two follow from minfer's own options, so that this table cannot contradict them.
`python -m minfer.effects.cli.vllm_page` prints it all as a page.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Final

from attrs import frozen

RELEASE: Final = "0.33.0"
ON, OFF = "on", "off"  # values of flags
FLAG: Final = "flag"


class Outcome(StrEnum):
    """What becomes of an option."""

    SAME = "same"
    ALIAS = "alias"
    ALWAYS = "always"
    HINT = "hint"
    REFUSED = "refused"


@frozen(kw_only=True)
class VllmOption:
    """An option of that release."""

    names: tuple[str, ...]  # the first one, others, and its negations
    kind: str  # "flag", "value", "many", or "optional": one value, or none
    default: str  # as a word; empty if there is none
    outcome: Outcome = Outcome.REFUSED
    text: str = ""  # why, and what would do
    accepts: tuple[str, ...] = ()  # other words at which it asks for nothing else

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def setting(self) -> str:
        """The name as a keyword argument in Python."""
        return self.name.removeprefix("--").replace("-", "_")

    def is_neutral(self, word: str) -> bool:
        """Whether a value, as a word, asks for nothing."""
        if word == OFF and self.kind == FLAG:
            return self.default == OFF or self.outcome is not Outcome.ALWAYS
        return word in ("", self.default)


# Options whose meaning one of minfer's has, by vLLM's name.
ALIASES: Final[Mapping[str, str]] = {
    "--api-server-count": "--api-processes",
    "--data-parallel-size": "--replicas",
    "--enable-log-requests": "--access-log",
    "--kv-offloading-size": "--kv-host-memory",
    "--max-num-queued-reqs": "--max-waiting",
    "--mamba-ssm-cache-dtype": "--state-dtype",
    "--spec-method": "--speculative-config",
    "--spec-model": "--speculative-config",
    "--spec-tokens": "--speculative-config",
    "--uvicorn-log-level": "--log-level",
}


# Options of earlier releases that users still type, and what would do.
FORMER: Final[Mapping[str, str]] = {
    "--disable-log-requests": "requests are logged only with --access-log; leave it out",
    "--enable-reasoning": "--reasoning-parser says how a model writes reasoning; leave "
    "it out",
    "--guided-decoding-backend": "llguidance compiles all constraints; leave it out",
    "--max-seq-len-to-capture": "decode steps of all lengths are CUDA graphs; leave it "
    "out",
    "--num-scheduler-steps": "steps are planned ahead (--steps-in-flight); leave it out",
    "--num-speculative-tokens": "use --speculative-config",
    "--speculative-model": "use --speculative-config",
    "--swap-space": "--kv-host-memory keeps KV blocks in host memory; use that",
    "--task": "every model generates, and makes vectors of prompts; leave it out",
    "--use-v2-block-manager": "there is one block manager; leave it out",
    "--worker-use-ray": "use --distributed ray for replicas on a cluster",
}


@frozen
class _Group:
    outcome: Outcome
    text: str
    names: str  # without dashes
    accepts: str = ""


_R, _H, _A = Outcome.REFUSED, Outcome.HINT, Outcome.ALWAYS
_KERNELS: Final = "kernels are chosen by a table that was measured"
_ONE_HOST: Final = (
    "a model runs on the GPUs of one machine; use --replicas, or --distributed ray for "
    "replicas on several"
)
_GROUPS: Final = (
    # --- always so --------------------------------------------------------------------
    _Group(
        _A,
        "prompts are computed in chunks; a larger --max-num-batched-tokens makes "
        "them fewer",
        "enable-chunked-prefill",
        "on",
    ),
    _Group(
        _A,
        "steps are planned while others run; --steps-in-flight 1 plans each after "
        "the last",
        "async-scheduling",
        "on",
    ),
    _Group(
        _A,
        "clients may let the model choose tools; tool_choice of a request says otherwise",
        "enable-auto-tool-choice",
        "on",
    ),
    _Group(
        _A,
        "usage says how many tokens of a prompt were cached",
        "enable-prompt-tokens-details",
        "on",
    ),
    _Group(_A, "answers are the assistant's", "response-role", "assistant"),
    _Group(_A, "block keys are SHA-256 digests", "prefix-caching-hash-algo", "sha256"),
    _Group(
        _A,
        "log-probabilities are the model's own, before temperature and filters",
        "logprobs-mode",
        "raw_logprobs",
    ),
    _Group(
        _A,
        "checkpoints are those of Hugging Face, or GGUF files",
        "config-format",
        "hf mistral auto",
    ),
    _Group(
        _A,
        "every model generates, and makes vectors of prompts",
        "runner",
        "auto generate pooling",
    ),
    _Group(
        _A,
        "vectors are the model's hidden states; models with a classification head "
        "are not supported",
        "convert",
        "auto none embed",
    ),
    _Group(_A, "outputs come as steps end", "stream-interval", "1"),
    _Group(
        _A,
        "there is no log of uvicorn's; --access-log has one line a request",
        "disable-uvicorn-access-log",
        "on",
    ),
    _Group(_A, "models run as text models", "language-model-only mm-encoder-only", "on"),
    _Group(
        _A,
        "images, audio and video are not supported; a limit above 0 would be of no use",
        "limit-mm-per-prompt",
        '{"image":0} {"video":0} {"audio":0} '
        '{"image":0,"video":0} {"image":0,"video":0,"audio":0}',
    ),
    _Group(
        _A,
        "an answer has the request's id in x-request-id",
        "enable-request-id-headers",
        "on",
    ),
    _Group(
        _A,
        "the API is described at /openapi.json, without pages of FastAPI's",
        "disable-fastapi-docs",
        "on",
    ),
    _Group(
        _A,
        "requests of any method that an endpoint has are allowed",
        "allowed-methods",
        '["*"] *',
    ),
    _Group(_A, "all headers are allowed", "allowed-headers", '["*"] *'),
    _Group(
        _A,
        "a prompt is admitted when its blocks are free",
        "scheduler-reserve-full-isl",
        "on",
    ),
    _Group(
        _A,
        "groups of layers have block tables of their own over one pool",
        "disable-hybrid-kv-cache-manager",
        "off",
    ),
    _Group(
        _A, "KV blocks in host memory are minfer's own", "kv-offloading-backend", "native"
    ),
    _Group(
        _A,
        "tool calls may be required, and follow their schemas then",
        "tool-strict-level",
        "auto",
    ),
    _Group(
        _A,
        "ranks are processes of this machine; use --distributed ray for replicas on "
        "a cluster, or torchrun",
        "distributed-executor-backend",
        "mp uni",
    ),
    # --- hints ------------------------------------------------------------------------
    _Group(
        _H,
        "no code of a checkpoint is ever run; a model that needs it is refused",
        "trust-remote-code code-revision",
    ),
    _Group(_H, "the tokenizer's files say how it is read", "tokenizer-mode"),
    _Group(
        _H,
        "minfer's own forward pass runs where there is one, else transformers'",
        "model-impl",
    ),
    _Group(
        _H,
        "the chat template decides whether contents are texts or lists",
        "chat-template-content-format",
    ),
    _Group(
        _H,
        "whole decode steps are CUDA graphs; --enforce-eager makes none",
        "compilation-config optimization-level performance-mode "
        "cudagraph-capture-sizes "
        "max-cudagraph-capture-size monokernel",
    ),
    _Group(
        _H,
        _KERNELS,
        "attention-backend attention-config mamba-backend "
        "mamba-ssu-algorithm moe-backend linear-backend kernel-config ir-op-priority "
        "sparse-indexer-topk-backend gdn-prefill-backend kda-prefill-backend "
        "kda-decode-backend disable-cascade-attn enable-flashinfer-autotune "
        "all2all-backend enable-dbo ubatch-size dbo-decode-token-threshold "
        "dbo-prefill-token-threshold enable-batch-sharded-sampling dcp-comm-backend "
        "disable-nccl-for-dp-synchronization dp-sync-interval enable-hc-sp",
    ),
    _Group(
        _H,
        "sums over ranks use peer memory where they can, else NCCL",
        "disable-custom-all-reduce",
    ),
    _Group(_H, "progress of loading is logged", "use-tqdm-on-load"),
    _Group(
        _H,
        "weights are read by as many threads as pay",
        "max-parallel-loading-workers safetensors-prefetch-num-threads "
        "safetensors-prefetch-block-size",
    ),
    _Group(
        _H,
        "processes are bound by the system; use numactl",
        "numa-bind numa-bind-nodes numa-bind-cpus",
    ),
    _Group(
        _H,
        "large requests are read in processes of their number: --preparers",
        "renderer-num-workers",
    ),
    _Group(
        _H,
        "nothing is profiled or traced; use Nsight Systems, or --journal",
        "profiler-config enable-layerwise-nvtx-tracing ray-workers-use-nsight "
        "collect-detailed-traces",
    ),
    _Group(
        _H,
        "metrics are those of GET /metrics",
        "kv-cache-metrics "
        "kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics "
        "show-hidden-metrics-for-version custom-histogram-buckets "
        "enable-server-load-tracking enable-per-request-metrics "
        "per-request-spec-decode-metrics aggregate-engine-logging "
        "enable-logging-iteration-details",
    ),
    _Group(
        _H,
        "no log has texts of requests; --journal records token ids",
        "max-log-len enable-log-deltas",
    ),
    _Group(
        _H,
        "an engine without a heartbeat is restarted: --engine-timeout",
        "watchdog-config distributed-timeout-seconds cpu-distributed-timeout-seconds",
    ),
    _Group(
        _H,
        "there are no images, audio or video",
        "media-io-kwargs "
        "mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type "
        "mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-tp-mode "
        "mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path "
        "mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin "
        "interleave-mm-strings skip-mm-profiling video-pruning-rate "
        "video-pruning-method mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb "
        "mm-device-do-normalize disable-chunked-mm-input allowed-local-media-path "
        "allowed-media-domains trust-request-mm-kwargs",
    ),
    _Group(
        _H,
        "states of recurrent layers are kept at ends of prompts, at branches and "
        "at a stride",
        "mamba-cache-mode mamba-block-size prefix-match-unit "
        "enable-mamba-shared-prefix-checkpoint use-replayssm replayssm-buffer-len "
        "swa-bounded-replay prefix-cache-retention-interval "
        "enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds",
    ),
    _Group(
        _H,
        "variables of the environment are not checked; minfer has few",
        "fail-on-environ-validation jit-monitor-mode jit-monitor-verbose",
    ),
    _Group(
        _H,
        "errors say what was wrong, and the server's log has the rest",
        "log-error-stack",
    ),
    _Group(
        _H,
        "requests are read by minfer's own bounds: --max-body-size",
        "h11-max-incomplete-event-size h11-max-header-count",
    ),
    _Group(
        _H,
        "a checkpoint's safetensors are read in parallel; nothing else is downloaded",
        "safetensors-load-strategy ignore-patterns pt-load-map-location",
    ),
    # --- refused ----------------------------------------------------------------------
    _Group(
        _R,
        "a secret on the command line is seen by all users; set HF_TOKEN, or run "
        "`hf auth login`",
        "hf-token",
    ),
    _Group(
        _R,
        "clients send token ids and get text; leave it out, and pass prompts as "
        "token ids",
        "skip-tokenizer-init",
    ),
    _Group(
        _R,
        "weights stay on the GPU; use --quantization, a smaller model, or more "
        "GPUs (--tensor-parallel-size)",
        "cpu-offload-gb cpu-offload-params "
        "offload-backend offload-group-size offload-num-in-group "
        "offload-prefetch-step offload-params",
    ),
    _Group(
        _H,
        "adapters of all ranks and forms are read as they are; each rank of the engine "
        "has its part",
        "fully-sharded-loras specialize-active-lora enable-mixed-moe-lora-format",
    ),
    _Group(
        _R,
        "adapters are computed in the model's dtype, and change the matrices that their "
        "own target_modules name; leave it out",
        "lora-dtype lora-target-modules enable-moe-shared-loras",
    ),
    _Group(
        _R,
        "images, audio and classification are not supported, nor their adapters; leave "
        "it out",
        "enable-tower-connector-lora default-mm-loras max-lora-cls-labels",
    ),
    _Group(
        _R,
        "an engine that is not needed is stopped, and started again when it is; "
        "--kv-disk keeps its prefixes",
        "enable-sleep-mode sleep-mode-backend "
        "sleep-mode-offload-cudagraph sleep-preserve-parameter-names "
        "enable-cumem-allocator enable-nccl-comm-suspend",
    ),
    _Group(
        _R,
        "no code of a user's runs on logits; requests have logit_bias, "
        "allowed_token_ids, bad_words and structured_outputs",
        "logits-processors",
    ),
    _Group(
        _R,
        "no code of a user's runs in the server but policies (--policies); put a "
        "proxy before it",
        "middleware tool-parser-plugin reasoning-parser-plugin "
        "io-processor-plugin worker-cls worker-extension-cls scheduler-cls "
        "model-class-overrides",
    ),
    _Group(
        _R,
        "vectors are of the last token, or the mean; a request's pooling says which",
        "pooler-config",
    ),
    _Group(
        _R,
        _ONE_HOST,
        "nnodes node-rank master-addr master-port headless "
        "data-parallel-rank data-parallel-start-rank data-parallel-size-local "
        "data-parallel-address data-parallel-rpc-port data-parallel-backend "
        "data-parallel-hybrid-lb data-parallel-external-lb "
        "data-parallel-multi-port-external-lb data-parallel-supervisor-port "
        "dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s "
        "dp-supervisor-probe-failure-threshold",
    ),
    _Group(_R, "set CUDA_VISIBLE_DEVICES instead", "device-ids"),
    _Group(
        _R,
        "a sequence is on one GPU, or divided by heads; use --tensor-parallel-size",
        "decode-context-parallel-size "
        "prefill-context-parallel-size dcp-q-replicate dcp-kv-cache-interleave-size "
        "cp-kv-cache-interleave-size",
    ),
    _Group(
        _R,
        "experts are divided evenly; --enable-expert-parallel divides them by "
        "whole experts",
        "enable-eplb eplb-config expert-placement-strategy "
        "enable-elastic-ep elastic-ep-max-dp-size enable-ep-weight-filter",
    ),
    _Group(
        _R,
        "a failed engine is restarted and its requests resume; --engine-timeout "
        "says after what time",
        "enable-fault-tolerance fault-tolerance-config",
    ),
    _Group(
        _R,
        "prefill and decode are set apart by --prefill, --decode and --prefill-at",
        "kv-transfer-config ec-transfer-config ec-manager-config",
    ),
    _Group(
        _R,
        "speculation is by lookups (ngram, suffix), a draft model or a draft head "
        "(mtp, eagle3); see --speculative-config",
        "diffusion-config engram-config",
    ),
    _Group(_R, "noise is drawn in 32 bits; leave it out", "use-fp64-gumbel"),
    _Group(_R, "outputs have no watermark; leave it out", "watermark-config"),
    _Group(_R, "one block in 100 stays free at an admission; leave it out", "watermark"),
    _Group(
        _R, "weights do not change while it runs; start it anew", "weight-transfer-config"
    ),
    _Group(
        _R,
        "experts of tokens, masks and traces are not returned; --journal records "
        "what was decided",
        "enable-return-routed-experts return-sampling-mask "
        "enable-trace-replay aux-output-config",
    ),
    _Group(
        _R,
        "llguidance compiles all constraints; a request's structured_outputs say "
        "the rest",
        "structured-outputs-config",
    ),
    _Group(
        _R,
        "a request's reasoning_effort and thinking budget say how long; "
        "--default-chat-template-kwargs sets the template's variables",
        "reasoning-config reasoning-effort-map anthropic-disabled-thinking-effort",
    ),
    _Group(
        _R,
        "use --quantization with a name; a checkpoint's own format is in its config.json",
        "quantization-config allow-deprecated-quantization",
    ),
    _Group(
        _R,
        "the tokens of a step are bounded by --max-num-batched-tokens, and those of "
        "prompts beside running sequences by --itl-target",
        "max-num-scheduled-tokens long-prefill-token-threshold "
        "long-prefill-token-threshold-adaptive prefill-schedule-interval "
        "max-num-active-seqs",
    ),
    _Group(_R, "the queue is bounded by samples: --max-waiting", "max-num-queued-tokens"),
    _Group(
        _R,
        "windows are the checkpoint's, or narrower (--attention-window); they "
        "cannot be turned off",
        "disable-sliding-window",
    ),
    _Group(
        _R,
        "all layers have one type of KV (--kv-cache-dtype)",
        "kv-cache-dtype-skip-layers kv-sharing-fast-prefill",
    ),
    _Group(_R, "--state-dtype is the type of states", "mamba-cache-dtype"),
    _Group(
        _R,
        "prompts are texts or token ids; leave it out",
        "enable-prompt-embeds enable-mm-embeds",
    ),
    _Group(
        _R,
        "the configuration is in the checkpoint; change it by --hf-overrides",
        "hf-config-path model-loader-extra-config additional-config",
    ),
    _Group(
        _R,
        "the API is HTTP and WebSocket; leave it out",
        "grpc grpc-port tokens-only enable-scale-out",
    ),
    _Group(
        _R, "OpenAI's hosted tools are not run here; the client runs tools", "tool-server"
    ),
    _Group(
        _R,
        "a request's stream_options.include_usage asks for it",
        "enable-force-include-usage",
    ),
    _Group(_R, "a request's return_token_ids asks for ids", "return-tokens-as-token-ids"),
    _Group(
        _R,
        "with tool_choice none, the template decides whether tools are shown; "
        "clients leave them out",
        "exclude-tools-when-tool-choice-none",
    ),
    _Group(
        _R,
        "a comment every few seconds is sent by proxies; leave it out",
        "sse-keep-alive-interval",
    ),
    _Group(
        _R,
        "texts of requests are never logged; --journal records token ids",
        "enable-log-outputs",
    ),
    _Group(
        _R,
        "an answer's system_fingerprint says version and model; leave it out",
        "fingerprint-mode fingerprint-value",
    ),
    _Group(_R, "pages may not use cookies here; send an API key", "allow-credentials"),
    _Group(
        _R,
        "health is left out of the access log; leave it out, or filter the log",
        "disable-access-log-for-endpoints",
    ),
    _Group(
        _R,
        "certificates are read at the start; restart it, or put a proxy before it",
        "enable-ssl-refresh",
    ),
    _Group(
        _R,
        "with --ssl-ca-certs a client needs a certificate; else it needs none",
        "ssl-cert-reqs",
    ),
    _Group(
        _R, "Python's own choice of ciphers is used; put a proxy before it", "ssl-ciphers"
    ),
    _Group(
        _R,
        "the description needs no other host: GET /openapi.json",
        "enable-offline-docs",
    ),
    _Group(
        _R,
        "late interaction is not supported; leave it out",
        "enable-flash-late-interaction",
    ),
    _Group(
        _R,
        "Cohere's own API is not served; use OpenAI's",
        "cohere-format cohere-is-reasoning-model",
    ),
    _Group(
        _R,
        "logs go to standard error; --log-level says which",
        "logging-config log-config-file",
    ),
    _Group(
        _R, "there is no shared arena of tensors; leave it out", "enable-shm-tensor-arena"
    ),
)
_FACTS: Final = """
--headless flag off
--api-server-count -asc value
--config value
--grpc flag off
--lora-modules many
--chat-template value
--chat-template-content-format value auto
--trust-request-chat-template --no-trust-request-chat-template flag off
--trust-request-mm-kwargs --no-trust-request-mm-kwargs flag off
--default-chat-template-kwargs value
--reasoning-effort-map value
--response-role value assistant
--return-tokens-as-token-ids --no-return-tokens-as-token-ids flag off
--enable-auto-tool-choice --disable-auto-tool-choice flag off
--exclude-tools-when-tool-choice-none --no-exclude-tools-when-tool-choice-none flag off
--tool-call-parser value
--tool-parser-plugin value
--tool-strict-level value
--tool-server value
--max-log-len value
--enable-prompt-tokens-details --disable-prompt-tokens-details flag off
--enable-per-request-metrics --disable-per-request-metrics flag off
--enable-server-load-tracking --disable-server-load-tracking flag off
--enable-force-include-usage --disable-force-include-usage flag off
--sse-keep-alive-interval value 0
--enable-tokenizer-info-endpoint --disable-tokenizer-info-endpoint flag off
--enable-log-outputs --disable-log-outputs flag off
--enable-log-deltas --disable-log-deltas flag on
--cohere-is-reasoning-model --no-cohere-is-reasoning-model flag on
--cohere-format value cmd4
--anthropic-disabled-thinking-effort value auto
--log-error-stack --no-log-error-stack flag off
--tokens-only --no-tokens-only flag off
--enable-scale-out --disable-scale-out flag off
--fingerprint-mode value full
--fingerprint-value value
--host value
--port value 8000
--grpc-port value
--data-parallel-supervisor-port value 9256
--dp-supervisor-probe-interval-s value 5.0
--dp-supervisor-probe-timeout-s value 5.0
--dp-supervisor-probe-failure-threshold value 3
--uds value
--uvicorn-log-level value info
--disable-uvicorn-access-log --enable-uvicorn-access-log flag off
--disable-access-log-for-endpoints value
--allow-credentials --no-allow-credentials flag off
--allowed-origins value
--allowed-methods value ['*']
--allowed-headers value ['*']
--api-key many
--ssl-keyfile value
--ssl-certfile value
--ssl-ca-certs value
--enable-ssl-refresh --disable-ssl-refresh flag off
--ssl-cert-reqs value 0
--ssl-ciphers value
--root-path value
--middleware value
--enable-request-id-headers --disable-request-id-headers flag off
--disable-fastapi-docs --enable-fastapi-docs flag off
--h11-max-incomplete-event-size value 4194304
--h11-max-header-count value 256
--enable-offline-docs --disable-offline-docs flag off
--enable-flash-late-interaction --disable-flash-late-interaction flag on
--model value Qwen/Qwen3-0.6B
--runner value auto
--convert value auto
--tokenizer value
--tokenizer-mode value auto
--trust-remote-code --no-trust-remote-code flag off
--dtype value auto
--seed value 0
--hf-config-path value
--allowed-local-media-path value
--allowed-media-domains many
--revision value
--code-revision value
--tokenizer-revision value
--max-model-len value
--quantization -q value
--quantization-config value
--allow-deprecated-quantization --no-allow-deprecated-quantization flag off
--enforce-eager --no-enforce-eager flag off
--enable-return-routed-experts --disable-return-routed-experts flag off
--return-sampling-mask --no-return-sampling-mask flag off
--max-logprobs value 20
--logprobs-mode value raw_logprobs
--use-fp64-gumbel --no-use-fp64-gumbel flag off
--enable-trace-replay --disable-trace-replay flag off
--disable-sliding-window --enable-sliding-window flag off
--disable-cascade-attn --enable-cascade-attn flag
--skip-tokenizer-init --no-skip-tokenizer-init flag off
--enable-prompt-embeds --disable-prompt-embeds flag off
--served-model-name many
--config-format value auto
--hf-token optional
--hf-overrides value
--model-class-overrides value
--pooler-config value
--generation-config value auto
--override-generation-config value
--enable-sleep-mode --disable-sleep-mode flag off
--sleep-mode-backend value cumem
--sleep-mode-offload-cudagraph --no-sleep-mode-offload-cudagraph flag off
--sleep-preserve-parameter-names many
--enable-cumem-allocator --disable-cumem-allocator flag off
--enable-nccl-comm-suspend --disable-nccl-comm-suspend flag off
--model-impl value auto
--logits-processors many
--io-processor-plugin value
--renderer-num-workers value 1
--load-format value auto
--download-dir value
--safetensors-load-strategy value
--safetensors-prefetch-num-threads value 8
--safetensors-prefetch-block-size value 16777216
--model-loader-extra-config value
--ignore-patterns many ['original/**/*']
--use-tqdm-on-load --no-use-tqdm-on-load flag on
--pt-load-map-location value cpu
--attention-backend value
--mamba-backend value
--mamba-ssu-algorithm value
--enable-mamba-cache-stochastic-rounding --disable-mamba-cache-stochastic-rounding flag off
--mamba-cache-philox-rounds value 0
--reasoning-parser value
--reasoning-parser-plugin value
--distributed-executor-backend value
--pipeline-parallel-size -pp value 1
--master-addr value 127.0.0.1
--master-port value 29501
--nnodes -n value 1
--node-rank -r value 0
--distributed-timeout-seconds value
--cpu-distributed-timeout-seconds value
--numa-bind --no-numa-bind flag off
--numa-bind-nodes many
--numa-bind-cpus many
--device-ids value
--tensor-parallel-size -tp value 1
--decode-context-parallel-size -dcp value 1
--dcp-comm-backend value
--dcp-q-replicate --no-dcp-q-replicate flag
--dcp-kv-cache-interleave-size value 1
--cp-kv-cache-interleave-size value
--prefill-context-parallel-size -pcp value 1
--data-parallel-size -dp value 1
--data-parallel-rank -dpn value
--data-parallel-start-rank -dpr value
--data-parallel-size-local -dpl value
--data-parallel-address -dpa value
--data-parallel-rpc-port -dpp value
--data-parallel-backend -dpb value mp
--data-parallel-hybrid-lb --no-data-parallel-hybrid-lb -dph flag off
--data-parallel-external-lb --no-data-parallel-external-lb -dpe flag off
--data-parallel-multi-port-external-lb -dpm flag off
--enable-hc-sp --disable-hc-sp flag off
--enable-expert-parallel -ep --disable-expert-parallel flag off
--enable-batch-sharded-sampling --disable-batch-sharded-sampling flag
--enable-ep-weight-filter --disable-ep-weight-filter flag off
--all2all-backend value allgather_reducescatter
--enable-dbo --disable-dbo flag off
--enable-shm-tensor-arena --disable-shm-tensor-arena flag off
--ubatch-size value 0
--enable-elastic-ep --disable-elastic-ep flag off
--elastic-ep-max-dp-size value
--dbo-decode-token-threshold value 32
--dp-sync-interval value 16
--dbo-prefill-token-threshold value 512
--disable-nccl-for-dp-synchronization --enable-nccl-for-dp-synchronization flag
--enable-eplb --disable-eplb flag off
--eplb-config value
--expert-placement-strategy value linear
--max-parallel-loading-workers value
--ray-workers-use-nsight --no-ray-workers-use-nsight flag off
--disable-custom-all-reduce --enable-custom-all-reduce flag off
--worker-cls value auto
--worker-extension-cls value
--enable-fault-tolerance --disable-fault-tolerance flag off
--fault-tolerance-config value
--block-size value
--gpu-memory-utilization --device-memory-utilization value 0.92
--kv-cache-memory-bytes value
--kv-cache-dtype value auto
--num-gpu-blocks-override value
--enable-prefix-caching --disable-prefix-caching flag
--prefix-caching-hash-algo value sha256
--prefix-cache-retention-interval value 0
--kv-cache-dtype-skip-layers many
--kv-sharing-fast-prefill --no-kv-sharing-fast-prefill flag off
--swa-bounded-replay --no-swa-bounded-replay flag on
--mamba-cache-dtype value auto
--mamba-ssm-cache-dtype value auto
--mamba-block-size value
--prefix-match-unit value
--mamba-cache-mode value
--enable-mamba-shared-prefix-checkpoint --disable-mamba-shared-prefix-checkpoint flag off
--replayssm-buffer-len value 16
--use-replayssm --no-use-replayssm flag off
--kv-offloading-size value
--kv-offloading-backend value native
--offload-backend value auto
--cpu-offload-gb value 0
--cpu-offload-params many
--offload-group-size value 0
--offload-num-in-group value 1
--offload-prefetch-step value 1
--offload-params many
--language-model-only --no-language-model-only flag off
--limit-mm-per-prompt value
--enable-mm-embeds --disable-mm-embeds flag off
--media-io-kwargs value
--mm-processor-kwargs value
--mm-processor-cache-gb value 4
--mm-processor-cache-type value lru
--mm-hasher-algorithm value blake3
--mm-shm-cache-max-object-size-mb value 128
--mm-encoder-only --no-mm-encoder-only flag off
--mm-encoder-tp-mode value weights
--mm-encoder-attn-backend value
--mm-encoder-attn-dtype value
--mm-encoder-fp8-scale-path value
--mm-encoder-fp8-scale-save-path value
--mm-encoder-fp8-scale-save-margin value 1.5
--interleave-mm-strings --no-interleave-mm-strings flag off
--skip-mm-profiling --no-skip-mm-profiling flag off
--video-pruning-rate value
--video-pruning-method value evs
--mm-tensor-ipc value direct_rpc
--mm-processor-device value auto
--mm-ipc-gpu-memory-gb value 0
--mm-device-do-normalize --no-mm-device-do-normalize flag
--enable-lora --disable-lora flag
--max-loras value 1
--max-lora-rank value 16
--lora-dtype value auto
--enable-tower-connector-lora --disable-tower-connector-lora flag off
--max-cpu-loras value
--fully-sharded-loras --no-fully-sharded-loras flag off
--lora-target-modules many
--default-mm-loras value
--specialize-active-lora --no-specialize-active-lora flag off
--enable-mixed-moe-lora-format --disable-mixed-moe-lora-format flag off
--enable-moe-shared-loras --disable-moe-shared-loras flag off
--max-lora-cls-labels value
--logging-config value
--log-level value
--log-config-file value
--show-hidden-metrics-for-version value
--otlp-traces-endpoint value
--collect-detailed-traces many
--per-request-spec-decode-metrics value none
--kv-cache-metrics --no-kv-cache-metrics flag off
--kv-cache-metrics-sample value 0.01
--custom-histogram-buckets value
--cudagraph-metrics --no-cudagraph-metrics flag off
--enable-layerwise-nvtx-tracing --disable-layerwise-nvtx-tracing flag off
--enable-mfu-metrics --disable-mfu-metrics flag off
--enable-logging-iteration-details --disable-logging-iteration-details flag off
--jit-monitor-mode value warn
--jit-monitor-verbose --no-jit-monitor-verbose flag off
--max-num-batched-tokens value
--max-num-scheduled-tokens value
--max-num-seqs value
--max-num-active-seqs value
--max-num-queued-reqs value
--max-num-queued-tokens value
--long-prefill-token-threshold value 0
--long-prefill-token-threshold-adaptive --no-long-prefill-token-threshold-adaptive flag off
--scheduling-policy value fcfs
--enable-chunked-prefill --disable-chunked-prefill flag
--disable-chunked-mm-input --enable-chunked-mm-input flag off
--scheduler-cls value
--scheduler-reserve-full-isl --no-scheduler-reserve-full-isl flag on
--watermark value 0.0
--prefill-schedule-interval value 1
--disable-hybrid-kv-cache-manager --enable-hybrid-kv-cache-manager flag
--async-scheduling --no-async-scheduling flag
--stream-interval value 1
--cudagraph-capture-sizes many
--max-cudagraph-capture-size value
--ir-op-priority value
--enable-flashinfer-autotune --disable-flashinfer-autotune flag
--monokernel --no-monokernel flag off
--moe-backend value auto
--linear-backend value auto
--sparse-indexer-topk-backend value auto
--speculative-config -sc value
--spec-method value
--spec-model value
--spec-tokens value
--watermark-config value
--diffusion-config -dc value
--kv-transfer-config value
--kv-events-config value
--ec-transfer-config value
--ec-manager-config value
--compilation-config -cc value
--attention-config -ac value
--engram-config value
--reasoning-config value
--kernel-config value
--additional-config value
--structured-outputs-config value
--aux-output-config value
--profiler-config value
--watchdog-config value
--optimization-level value
--performance-mode value balanced
--weight-transfer-config value
--disable-log-stats flag off
--aggregate-engine-logging flag off
--fail-on-environ-validation --no-fail-on-environ-validation flag off
--shutdown-timeout value 0
--gdn-prefill-backend value
--kda-prefill-backend value
--kda-decode-backend value
--enable-log-requests --disable-log-requests flag off
"""  # noqa: E501 - names are not broken


@cache
def vllm_options() -> Mapping[str, VllmOption]:
    """Returns all options by each of their names."""
    outcomes: dict[str, _Group] = {}
    for group in _GROUPS:
        for name in group.names.split():
            outcomes[f"--{name}"] = group
    options = {}
    for line in _FACTS.strip().splitlines():
        words = line.split()
        names = tuple(word for word in words if word.startswith("-"))
        kind, *default = words[len(names) :]
        found = outcomes.pop(names[0], None)
        outcome = Outcome.SAME if found is None else found.outcome
        if names[0] in ALIASES:
            outcome = Outcome.ALIAS
        option = VllmOption(
            names=names,
            kind=kind,
            default=" ".join(default),
            outcome=outcome,
            text="" if found is None else found.text,
            accepts=() if found is None else tuple(found.accepts.split()),
        )
        options.update(dict.fromkeys(names, option))
    if outcomes:
        raise AssertionError(f"not options of {RELEASE}: {', '.join(outcomes)}")
    return options
