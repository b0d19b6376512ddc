"""`minfer serve`: a model over HTTP."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from minfer.effects.cli.commands import MODEL_WORD
from minfer.effects.cli.config_file import add_config_option
from minfer.effects.cli.exit_codes import guarded
from minfer.effects.cli.options import (
    TOY,
    TOY_LIMITS,
    dry_run_option,
    engine_options,
    template_options,
)
from minfer.effects.cli.standard_streams import print_message
from minfer.effects.live.errors import REQUEST_TEMPLATE_OPTION
from minfer.effects.net.secret_variables import remove_secrets
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.option_values import read_bytes, read_seconds
from minfer.effects.text.tools.formats import AUTO, NONE
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.thinking import REASONING
from minfer.routing.policies import ROUTING_POLICIES
from minfer.values.checks import ConfigError
from minfer.version import __version__

DESCRIPTION: Final = (
    "Serve a model over HTTP, so that programs written for OpenAI's API can use it: "
    f"their base URL is http://HOST:PORT/v1. Ctrl-C ends it. {TOY_LIMITS}"
)
# What `--help` shows; `--help-all` shows all.
COMMON: Final = (
    "--host",
    "--port",
    "--served-model-name",
    "--api-key",
    "--api-keys-file",
    "--tool-call-parser",
    "--reasoning-parser",
    "--access-log",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--model",
    "--dtype",
    "--device",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--enable-prefix-caching",
    "--scheduling-policy",
    "--speculative-config",
    "--enforce-eager",
    "--journal",
    "--dry-run",
)
WAITING_PER_SEQ: Final = 16  # waiting samples for each of --max-num-seqs
POLICY: Final = "fair"  # between keys or addresses; a library's default is another
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
MAX_PREPARERS: Final = 4  # at most, by default
_HOST, _PORT, _ROUTING = "127.0.0.1", 8000, "prefix"  # by default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer serve`."""
    parser.add_argument(
        MODEL_WORD,
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="model",
        help="the same as --model",
    )
    add = parser.add_argument_group("server").add_argument
    for group in (
        _address_options,
        _conversation_options,
        _key_options,
        _adapter_options,
        _bound_options,
        _time_options,
        _process_options,
        _web_options,
        tls_options,
    ):
        group(add)
    engine_options(parser)
    add_config_option(parser)
    dry_run_option(parser)


def listen_options(add: Callable[..., Any], port: int) -> None:
    """Add the options of the address to listen on, by default this port."""
    add(
        "--host",
        default=_HOST,
        help="address to listen on; 0.0.0.0 lets other machines in (default: "
        "%(default)s, this machine alone)",
    )
    add("--port", type=int, default=port, help="0: any free one (default: %(default)s)")


def _address_options(add: Callable[..., Any]) -> None:
    listen_options(add, _PORT)
    add(
        "--uds",
        metavar="PATH",
        help="listen at a Unix socket, in place of --host and --port",
    )
    add(
        "--root-path",
        default="",
        metavar="PATH",
        help="path that a proxy puts before all addresses, such as /llm; they are served "
        "with it and without it",
    )
    add(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model (default: its folder's name, or its name on "
        "the hub)",
    )


def parser_options(add: Callable[..., Any]) -> None:
    """Add the formats of tool calls and reasoning."""
    for name, formats, meaning in (
        ("--tool-call-parser", TOOLS, "calls of tools"),
        ("--reasoning-parser", REASONING, "reasoning"),
    ):
        add(
            name,
            default=AUTO,
            choices=(AUTO, NONE, *formats),
            help=f"how the model writes {meaning} (default: %(default)s, what its chat "
            "template shows; none: they stay text)",
        )
    add(
        "--tool-parser",
        dest="tool_call_parser",
        default=argparse.SUPPRESS,
        choices=(AUTO, NONE, *TOOLS),
        help=argparse.SUPPRESS,  # the earlier name of --tool-call-parser
    )


def _conversation_options(add: Callable[..., Any]) -> None:
    parser_options(add)
    template_options(add)
    add(
        REQUEST_TEMPLATE_OPTION,
        action="store_true",
        help="let a request bring a chat_template of its own, which is rendered in "
        "processes with limits of time and memory (default: such requests are refused)",
    )


def _process_options(add: Callable[..., Any]) -> None:
    add(
        "--api-processes",
        type=int,
        metavar="N",
        help="processes that speak HTTP, beside the engine's; 0: one process for all "
        "(default: by the number of cores)",
    )
    add(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="engines, each a process with a copy of the model: on the first N GPUs, or "
        "on the CPU, whose threads and memory they divide; other options hold for each "
        "(default: %(default)s)",
    )
    add(
        "--distributed",
        choices=("ray",),
        default="",
        help="have Ray start these engines on the nodes of its cluster, and restart "
        "them; each node needs minfer and the model (extra ray; the cluster: that of "
        "RAY_ADDRESS, or one on this machine; default: all run here)",
    )
    for name, meaning in (
        ("prefill", "compute prompts, and send their KV"),
        ("decode", "get it, and decode"),
    ):
        add(
            f"--{name}",
            type=int,
            default=0,
            metavar="N",
            help=f"engines that {meaning}, as --replicas that do both (default: none)",
        )
    add(
        "--prefill-tensor-parallel-size",
        type=int,
        metavar="N",
        help="ranks of each engine that computes prompts (default: "
        "--tensor-parallel-size, which is that of engines that decode)",
    )
    for name, meaning in (
        ("listen", "only compute prompts, for servers on other machines that dial it"),
        ("at", "an engine there computes prompts; may be given several times"),
    ):
        add(
            f"--prefill-{name}",
            action="append" if name == "at" else "store",
            default=[] if name == "at" else None,
            metavar="HOST:PORT",
            help=f"{meaning} (needs --cache-secret; default: none)",
        )
    add(
        "--kv-listen",
        metavar="HOST:PORT",
        help="where engines of --prefill-at send KV to; 0.0.0.0: whatever address they "
        "are dialled from; with --decode, each engine has the next port",
    )
    add(
        "--kv-nixl",
        action="store_true",
        help="have them write it through NIXL, over RDMA or what else UCX finds, if they "
        "have it, too (extra nixl; default: TCP)",
    )
    add(
        "--routing",
        choices=tuple(ROUTING_POLICIES),
        default=_ROUTING,
        help="how a request's replica is chosen: prefix, by what is cached and waits "
        "there; prefix_hash, by its first tokens; least_loaded; round_robin (default: "
        "%(default)s)",
    )
    add(
        "--shutdown-timeout",
        type=read_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long requests that run may take to end after a SIGTERM; a second one "
        "stops them (default: %(default)g)",
    )
    add(
        "--engine-timeout",
        type=read_seconds,
        default=60.0,
        metavar="SECONDS",
        help="kill the engine's process, and start it again, when for so long no step "
        "ended and a request waited, and a process that speaks HTTP when it did nothing "
        "for so long; 0: never (default: %(default)g; ten times that while it loads)",
    )


def _web_options(add: Callable[..., Any]) -> None:
    add(
        "--access-log",
        nargs="?",
        const="text",
        default="off",
        choices=("json", "text", "off"),
        help="write a line for each request to standard output; probes of health are "
        "left out (default: %(default)s; text, if the option stands alone)",
    )
    add(
        "--log-level",
        type=str.lower,
        default="warning",
        choices=LOG_LEVELS,
        help="least severe lines of the log (default: %(default)s)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages of these origins may use the server too, such as "
        "https://example.com, or a list of them in JSON; *: all pages (default: its own "
        "page alone)",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests may have as their Host, as behind a proxy; may be "
        "given several times; *: any (default: without keys, at a loopback address, "
        "this machine's own; else any)",
    )
    add(
        "--vllm-metrics",
        action="store_true",
        help="have /metrics write vLLM's names, too, such as vllm:num_requests_waiting: "
        "for gateways and dashboards that read these",
    )
    add(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send a span for each answer to this collector of OpenTelemetry's, as "
        "http://localhost:4318/v1/traces; needs the extra otel",
    )


def tls_options(add: Callable[..., Any]) -> None:
    """Add the options of HTTPS."""
    for name, meaning in (
        ("certfile", "certificate, and those between it and its root: speak HTTPS"),
        ("keyfile", "its key (default: in the same file)"),
        ("ca-certs", "certificates of who signs clients': only theirs are let in"),
    ):
        add(f"--ssl-{name}", default="", metavar="FILE", help=f"PEM: {meaning}")
    add(
        "--ssl-keyfile-password",
        default=os.environ.get("MINFER_SSL_KEYFILE_PASSWORD", ""),
        metavar="PASSWORD",
        help="of the key (default: the environment's MINFER_SSL_KEYFILE_PASSWORD)",
    )


def _key_options(add: Callable[..., Any]) -> None:
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must send; may be given several times (default: the "
        "environment's MINFER_API_KEY; without any, nothing)",
    )
    add(
        "--api-keys-file",
        metavar="FILE",
        help="JSON or TOML with more keys: name, key and, where wanted, priority, "
        "tenant, admin and adapters of each",
    )
    add(
        "--cache-secret",
        default=os.environ.get("MINFER_CACHE_SECRET", ""),
        metavar="SECRET",
        help="what keeps the prefix caches of tenants apart, and encrypts reasoning that "
        "clients of /v1/responses keep; the same for all servers of a deployment "
        "(default: the environment's MINFER_CACHE_SECRET, or else random)",
    )


def _adapter_options(add: Callable[..., Any]) -> None:
    """Add where adapters come from; those of an engine say how many, and how large."""
    add(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="adapters to start with, by the names under which clients request them; "
        "PATH is a folder in PEFT's form, or its name on the hub; also vLLM's JSON "
        "objects with name, path and base_model_name",
    )
    add(
        "--lora-folders",
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="let requests name adapters that are folders below these: DIR/NAME is "
        "loaded on first use (default: none)",
    )
    add(
        "--lora-hub",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=ORG/REPOSITORY@REVISION",
        help="let requests name these adapters of the hub, which are downloaded on first "
        "use (default: none)",
    )
    add(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let keys with admin = true load adapters of these folders and names, and "
        "unload any, at /v1/load_lora_adapter and /v1/unload_lora_adapter",
    )


def _bound_options(add: Callable[..., Any]) -> None:
    add(
        "--max-body-size",
        type=read_bytes,
        metavar="BYTES",
        help="most bytes of a request (default: 4M, or more where the context is longer)",
    )
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help="answer 503 to a request that comes while N samples wait (default: "
        f"{WAITING_PER_SEQ} times --max-num-seqs)",
    )
    add(
        "--max-connections",
        type=int,
        default=1024,
        metavar="N",
        help="most connections at once; who comes then gets a 503 (default: %(default)s)",
    )
    preparers_option(add)


def preparers_option(add: Callable[..., Any]) -> None:
    """Add the number of worker processes."""
    add(
        "--preparers",
        type=int,
        default=min(MAX_PREPARERS, max(2, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help="processes that read and tokenize large requests; 0: threads of the server "
        "(default: %(default)s here)",
    )


def _time_options(add: Callable[..., Any]) -> None:
    for name, default, meaning in (
        ("header-timeout", 10.0, "that a request's head may take to come"),
        ("body-timeout", 60.0, "that its body may take to come"),
        ("request-timeout", None, "that an answer may take; what is there by then is it"),
    ):
        add(
            f"--{name}",
            type=read_seconds,
            default=default,
            metavar="SECONDS",
            help=f"seconds {meaning} (default: {default or 'any'})",
        )
    add(
        "--enforce-deadlines",
        action="store_true",
        help="end requests whose own deadline has passed, too",
    )
    add(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="serve GET /tokenizer_info, which has the chat template",
    )
    add(
        "--refuse-hosted-tools",
        action="store_true",
        help="answer 400 to requests with tools that run on OpenAI's servers, such as "
        "web_search, instead of leaving these tools out",
    )


def complete(options: argparse.Namespace) -> None:
    """Set, in place, the defaults of options whose default is another one for a library:
    API keys, --max-waiting and --scheduling-policy. Raises ConfigError for an empty key
    or name, as of a variable that is not set.
    """
    for option, texts in (
        ("--api-key", options.api_key),
        ("--served-model-name", options.served_model_name),
    ):
        if "" in (texts or ()):
            raise ConfigError(f"{option} is empty; give a text, or leave it out")
    if options.api_key is None:
        options.api_key = [os.environ.get("MINFER_API_KEY", "")]
    if options.max_waiting is None:
        max_num_seqs = options.max_num_seqs or EngineArgs().max_num_seqs
        options.max_waiting = WAITING_PER_SEQ * max_num_seqs
    if options.scheduling_policy is None:
        options.scheduling_policy = POLICY


def unused_options(options: argparse.Namespace) -> list[str]:
    """Returns a note about each option that has no effect beside the others."""
    notes = list[str]()
    if options.uds is not None and (options.host, options.port) != (_HOST, _PORT):
        notes.append("--host and --port have no effect: --uds is in their place")
    has_one_engine = options.replicas == 1 and not (
        options.prefill or options.prefill_at or options.prefill_listen
    )
    if options.routing != _ROUTING and has_one_engine:
        notes.append("--routing has no effect: there is one engine; add --replicas")
    return notes


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    # At once: what follows takes seconds, and tens of seconds for a large model.
    note = f"minfer {__version__}: loading {options.model or TOY}"
    print(note, file=sys.stderr, flush=True)
    # They import the HTTP server.
    from minfer.effects.cluster.processes.deployment import read_deployment
    from minfer.effects.live.logs import set_level
    from minfer.effects.serving.processes import server
    from minfer.effects.serving.processes.serve_processes import serve_in_processes
    from minfer.effects.serving.wire.descriptors import raise_limit
    from minfer.effects.serving.wire.unix_sockets import PREFIX

    complete(options)
    for note in unused_options(options):
        print_message(note)
    set_level(options.log_level)
    remove_secrets()
    args, http = server.read_options(options)
    raise_limit()
    host, port, api_servers = options.host, options.port, options.api_processes
    if options.uds is not None:
        host = f"{PREFIX}{options.uds}"
    if api_servers is None:
        api_servers = server.api_servers_by_cores()
    deployment = read_deployment(options)
    if api_servers:
        keep = None
        if deployment.distributed:
            from minfer.effects.cluster.ray.engine_keeper import RayEngines

            keep = RayEngines(
                args=args,
                deployment=deployment,
                api_servers=api_servers,
                timeout=http.engine_timeout,
            ).keep
        return serve_in_processes(
            args, http, host, port, api_servers, guarded, deployment, keep
        )
    if deployment.routed or deployment.distributed:
        raise ConfigError(
            "--api-processes 0 is a single process, which has one engine and no links to "
            "other machines; leave it out"
        )
    (listener,) = server.listen_at(host, port)
    with listener:
        return server.serve_in_process(args, listener, http)
