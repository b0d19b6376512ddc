"""Which engines a server has, what they do, and which engines of other machines it uses.

--replicas N                 N engines, each of which prefills and decodes
--prefill P --decode D       P engines compute prompts, and send their KV to D others
--distributed ray            the same on a cluster, where KV goes to free ports of nodes

one machine                              another one
--prefill-listen HOST:PORT  <-- links -- --prefill-at HOST:PORT    API servers
engines alone               --- KV ----> --kv-listen HOST:PORT     engines that decode
"""

import argparse
import contextlib
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen

from minfer.effects.execution.tiers.peers.peer_plan import DECODE, PREFILL, PeerPlan
from minfer.effects.execution.tiers.peers.remote_memory import PACKAGE, is_installed
from minfer.effects.net.addresses import (
    Address,
    Port,
    listen_at,
    port_text,
    read_port,
)
from minfer.effects.net.handshake import secret_key
from minfer.effects.setup.engine_args import EngineArgs
from minfer.extras import how_to_install
from minfer.values.checks import ConfigError

_SECRET_BYTES: Final = 32


@frozen(kw_only=True)
class Deployment:
    """The engines of a server."""

    replicas: int = 1  # engines on this machine
    prefillers: int = 0  # of these, the first compute prompts for the others
    prefill_ranks: int | None = None  # tensor parallel size of these; None: of all
    routing: str = "prefix"  # the policy by which API servers choose among several
    # Engines on other machines that compute prompts, too.
    prefill_at: tuple[Port, ...] = ()
    kv_listen: Port | None = None  # where the first that decodes receives KV from those
    # Where the first engine accepts links of API servers on other machines; then this
    # server has no API servers of its own.
    prefill_listen: Port | None = None
    distributed: str = ""  # what places the engines on machines; empty: all are here
    nixl: bool = False  # engines on other machines write KV through NIXL, if they have it
    secret: bytes = field(default=b"", repr=False)  # of links between machines

    @property
    def routed(self) -> bool:
        """Whether API servers choose among several engines."""
        return self.replicas + len(self.prefill_at) > 1 or self.serves_others

    @property
    def prefills(self) -> bool:
        """Whether some engines compute prompts for others."""
        return self.prefillers > 0 or bool(self.prefill_at)

    @property
    def serves_others(self) -> bool:
        """Whether its engines are for API servers of other machines."""
        return self.prefill_listen is not None

    def listens(self, number: int) -> Port | None:
        """Returns where an engine that decodes receives KV from other machines, if it
        does.
        """
        return _port_after(self.kv_listen, number - self.prefillers)

    def settings(self, args: EngineArgs) -> list[EngineArgs]:
        """Returns the settings of each engine, by number, without its peer plan."""
        prefill = evolve(
            args, tensor_parallel_size=self.prefill_ranks or args.tensor_parallel_size
        )
        decode = self.replicas - self.prefillers
        return [prefill] * self.prefillers + [args] * decode

    def peer_plans(self, paths: Sequence[Path], ranks: int) -> list[PeerPlan | None]:
        """Returns the part of each engine, by number, in sending KV; `paths` are their
        sockets, beside which those for KV are, and `ranks` the tensor parallel size of
        those that decode.
        """
        if self.serves_others:
            name = socket.gethostname()
            plan = PeerPlan(name=name, role=PREFILL, dials=True, secret=self.secret)
            return [plan] * len(paths)
        if not self.prefills:
            return [None] * len(paths)
        if self.distributed:
            return [self._placed_plan(number) for number in range(len(paths))]
        local_paths = {
            str(number): path.with_name("kv")
            for number, path in enumerate(paths)
            if number >= self.prefillers
        }
        make_plan = partial(
            PeerPlan,
            secret=self.secret,
            prefill_ranks=self.prefill_ranks or ranks,
            decode_ranks=ranks,
        )
        senders = [
            make_plan(name=str(number), role=PREFILL, sends=local_paths)
            for number in range(self.prefillers)
        ]
        receivers = [
            make_plan(
                name=name,
                role=DECODE,
                listens=self._kv_addresses(int(name), path),
                nixl=self.nixl,
            )
            for name, path in local_paths.items()
        ]
        return [*senders, *receivers]

    def _placed_plan(self, number: int) -> PeerPlan:
        """Returns the plan of an engine that gets its addresses where it is placed."""
        sends = number < self.prefillers
        role = PREFILL if sends else DECODE
        return PeerPlan(name=str(number), role=role, dials=sends, secret=self.secret)

    def _kv_addresses(self, number: int, path: Path) -> tuple[Address, ...]:
        port = self.listens(number)
        local_paths = (path,) if self.prefillers else ()
        return local_paths if port is None else (*local_paths, port)

    def link_sockets(self, stack: contextlib.ExitStack) -> list[socket.socket]:
        """Returns sockets that listen for API servers of other machines, one for each
        engine, if there are such API servers. Raises ConfigError if that, or listening
        where KV is to be received later, is impossible.
        """
        sockets = []
        for number in range(self.replicas):
            kv = self.listens(number)
            if kv is not None and number >= self.prefillers:
                _listen_at(kv, "--kv-listen").close()
            if (port := _port_after(self.prefill_listen, number)) is not None:
                sock = _listen_at(port, "--prefill-listen")
                sockets.append(stack.enter_context(sock))
        return sockets


def read_deployment(options: argparse.Namespace) -> Deployment:
    """Returns the engines of the command line. Raises ConfigError."""
    prefill, decode = options.prefill, options.decode
    listen = _port(options.prefill_listen, "--prefill-listen")
    kv_listen = _port(options.kv_listen, "--kv-listen")
    prefill_at = tuple(
        port for text in options.prefill_at if (port := _port(text, "--prefill-at"))
    )
    _check_distributed(options)
    _check_adapters(options)
    if options.replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, not {options.replicas}")
    if bool(prefill_at) is not (kv_listen is not None):
        raise ConfigError("--prefill-at and --kv-listen need each other")
    if (prefill_at or listen) and not options.cache_secret:
        raise ConfigError(
            "engines of other machines need a --cache-secret (or MINFER_CACHE_SECRET), "
            "which is the same on all of them"
        )
    if options.kv_nixl and not kv_listen:
        raise ConfigError("--kv-nixl is for --kv-listen; leave it out")
    if options.kv_nixl and not is_installed():
        raise ConfigError(f"--kv-nixl needs {PACKAGE}: {how_to_install('nixl')}")
    if listen and (prefill_at or decode):
        raise ConfigError(
            "--prefill-listen is for engines that compute prompts alone; leave --decode, "
            "--prefill-at and --kv-listen to the machine that decodes"
        )
    is_divided = prefill or decode or prefill_at or listen
    if is_divided and options.replicas > 1:
        raise ConfigError(
            "--replicas are engines that do both; leave it or --prefill and --decode out"
        )
    if min(prefill, decode) < 0 or (
        not (prefill_at or listen) and (prefill > 0) is not (decode > 0)
    ):
        raise ConfigError("--prefill and --decode need each other, with at least 1 each")
    ranks = options.prefill_tensor_parallel_size
    if ranks is not None and (ranks < 1 or prefill_at or not prefill):
        raise ConfigError(
            f"--prefill-tensor-parallel-size {ranks} must be at least 1, and is for "
            "--prefill and --decode of one machine"
        )
    if listen:
        decode, prefill = 0, max(prefill, 1)
    elif prefill_at:
        decode = max(decode, 1)
    return Deployment(
        replicas=prefill + decode if is_divided else options.replicas,
        prefillers=prefill,
        prefill_ranks=ranks,
        routing=options.routing,
        prefill_at=prefill_at,
        kv_listen=kv_listen,
        nixl=options.kv_nixl,
        prefill_listen=listen,
        distributed=options.distributed,
        secret=_link_secret(options, between_servers=bool(prefill_at or listen)),
    )


def _check_distributed(options: argparse.Namespace) -> None:
    """Raise ConfigError if engines cannot be placed by what is asked to."""
    package = options.distributed
    if package and options.kv_events_config:
        raise ConfigError(
            f"--kv-events-config is for engines of this machine, not of --distributed "
            f"{package}; leave one of them out"
        )
    if package and find_spec(package) is None:
        raise ConfigError(
            f"--distributed {package} needs {package}: {how_to_install('ray')}"
        )
    if package and any((options.prefill_at, options.prefill_listen, options.kv_listen)):
        raise ConfigError(
            f"--distributed {package} places all engines of a server; leave "
            "--prefill-at, --prefill-listen and --kv-listen out"
        )
    sizes = (options.tensor_parallel_size or 1, options.prefill_tensor_parallel_size or 1)
    if package and options.prefill and max(sizes) > 1:
        raise ConfigError(
            f"--prefill and --decode with --distributed {package} are for engines of one "
            "rank; leave --tensor-parallel-size and --prefill-tensor-parallel-size out"
        )


def _check_adapters(options: argparse.Namespace) -> None:
    """Raise ConfigError for engines with adapters on other machines, which would have to
    have the same files.
    """
    elsewhere = {
        "--distributed": options.distributed,
        "--prefill-at": options.prefill_at,
        "--prefill-listen": options.prefill_listen,
    }
    for name, value in elsewhere.items():
        if value and options.enable_lora:
            raise ConfigError(
                f"--enable-lora is for engines of this machine, and {name} has some on "
                "others; leave one of the two out"
            )


def _link_secret(options: argparse.Namespace, *, between_servers: bool) -> bytes:
    """Returns the secret of links between machines; one that no other server has, if
    there are none to other servers.
    """
    if between_servers:
        return secret_key(options.cache_secret)
    return secrets.token_bytes(_SECRET_BYTES) if options.distributed else b""


def _port(text: str | None, name: str) -> Port | None:
    try:
        return None if text is None else read_port(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _port_after(first: Port | None, count: int) -> Port | None:
    """Returns the port that follows `first` by `count`."""
    return None if first is None else (first[0], first[1] + count)


def _listen_at(port: Port, name: str) -> socket.socket:
    try:
        return listen_at(port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {port_text(port)}: {error}; choose with {name}, from "
            "which on each engine has a port"
        ) from None
