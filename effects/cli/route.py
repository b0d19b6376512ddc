"""`minfer route`: a router in front of other servers."""

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from minfer.effects.cli.options import template_options
from minfer.effects.cli.serve import (
    listen_options,
    parser_options,
    preparers_option,
    tls_options,
)
from minfer.effects.net.secret_variables import remove_secrets
from minfer.effects.setup.option_values import read_bytes, read_seconds
from minfer.extras import how_to_install
from minfer.routing.policies import ROUTING_POLICIES
from minfer.values.checks import ConfigError

DESCRIPTION: Final = (
    "Pass requests on to several servers, of minfer or vLLM, each to the one where it "
    "costs least: most of its prompt is cached there, or little waits there. Clients use "
    "it as they use a server. Ctrl-C ends it."
)
COMMON: Final = (
    "--backend",
    "--routing",
    "--host",
    "--port",
    "--api-key",
    "--api-keys-file",
    "--cache-tokens",
    "--access-log",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--journal",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer route`."""
    for title, group in (
        ("routing", _routing_options),
        ("server", _server_options),
        ("bounds", _bound_options),
        ("HTTPS", tls_options),
    ):
        group(parser.add_argument_group(title).add_argument)


def _routing_options(add: Callable[..., Any]) -> None:
    add(
        "--backend",
        action="append",
        default=[],
        metavar="URL",
        help="a server, as http://HOST:PORT; give it once for each",
    )
    add(
        "--routing",
        default="prefix",
        choices=tuple(ROUTING_POLICIES),
        help="the policy (default: %(default)s)",
    )
    add(
        "--cache-tokens",
        type=int,
        default=2**20,
        metavar="N",
        help="tokens that the prefix cache of each server is assumed to hold (default: "
        "%(default)s)",
    )
    add(
        "--kv-events",
        action="append",
        default=[],
        metavar="URL[,REPLAY]",
        help="where a server publishes what it caches, as vLLM does, tcp://HOST:PORT, "
        "and where missed events are sent again; give one for each --backend, in order, "
        "or - for one without; needs --model, and the extra kv-events",
    )
    add(
        "--model",
        help="the checkpoint whose tokenizer and chat template the servers use, for "
        "--kv-events; the options of conversations below are to be as theirs",
    )
    template_options(add)
    parser_options(add)
    add(
        "--kv-block-size",
        type=int,
        default=16,
        metavar="N",
        help="tokens of a block of these servers (default: %(default)s)",
    )
    add(
        "--journal",
        metavar="FOLDER",
        help="record all decisions and what they depend on in a file in this folder, for "
        "minfer replay",
    )
    add(
        "--journal-size",
        type=read_bytes,
        default=2**30,
        metavar="BYTES",
        help="end the journal before it is larger (default: 1G)",
    )


def _server_options(add: Callable[..., Any]) -> None:
    listen_options(add, 8080)
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must send; may be given several times (default: the "
        "environment's MINFER_API_KEY; without any, nothing). It is passed on to the "
        "server, which may check it, too",
    )
    add("--api-keys-file", metavar="FILE", help="more keys, as of minfer serve")
    add(
        "--forwarded-allow-ips",
        default="",
        metavar="ADDRESSES",
        help="proxies before the router, as addresses or networks with commas between "
        "them, whose X-Forwarded-For names the client, for fair shares (default: none)",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests may have as their Host, as of minfer serve",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages of these origins may use the router",
    )
    add(
        "--access-log",
        nargs="?",
        const="text",
        default="off",
        choices=("json", "text", "off"),
        help="write a line for each request to standard output (default: %(default)s)",
    )


def _bound_options(add: Callable[..., Any]) -> None:
    add(
        "--max-body-size",
        type=read_bytes,
        metavar="BYTES",
        help="most bytes of a request (default: what minfer serve has for the longest "
        "context of the servers, at least 4M)",
    )
    preparers_option(add)
    for name, default, meaning in (
        ("max-waiting", 1024, "most requests that wait for a server, for fair shares"),
        ("max-connections", 4096, "most connections of clients at once"),
    ):
        text = f"{meaning} (default: %(default)s)"
        add(f"--{name}", type=int, default=default, metavar="N", help=text)
    for name, seconds, meaning in (
        ("header-timeout", 10.0, "that a request's head may take to come"),
        ("backend-timeout", 600.0, "that a server may take to its next bytes"),
        ("shutdown-timeout", 30.0, "that requests have to end after a SIGTERM"),
    ):
        text = f"seconds {meaning} (default: %(default)g)"
        add(f"--{name}", type=read_seconds, default=seconds, metavar="SECONDS", help=text)


def run(options: argparse.Namespace) -> int:
    """Route until a signal comes; returns the exit code. Raises ConfigError."""
    needed = {"aiohttp": "route", **({"zmq": "kv-events"} if options.kv_events else {})}
    for module, extra in needed.items():
        if find_spec(module) is None:
            raise ConfigError(f"minfer route needs {module}: {how_to_install(extra)}")
    # It imports the HTTP server.
    from minfer.effects.proxy.route_server import serve_router

    if options.api_key is None:
        options.api_key = [os.environ.get("MINFER_API_KEY", "")]
    remove_secrets()
    return serve_router(options)
