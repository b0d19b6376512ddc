"""Builds the Ray Serve application, for `serve run`, configuration files, and Python:

    serve run minfer.effects.cli.ray_serve:build model=MODEL num_replicas=4

Arguments are options of `minfer serve`, such as `max_num_seqs` for `--max-num-seqs`, and
options of Ray Serve for the deployment of engines.
"""

import argparse
import json
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NoReturn

from minfer.effects.cli import serve
from minfer.effects.cli.options import dry_run_option, engine_options
from minfer.extras import how_to_install
from minfer.routing.policies import ROUTING_POLICIES
from minfer.values.checks import ConfigError

RAY: Final = "2.60."  # prefix of the versions that have the router interface in use
RAY_ROUTER: Final = "ray"  # in place of a routing policy: Ray Serve's own router
# Options of Ray Serve that are passed on to the deployment of engines.
DEPLOYMENT: Final = frozenset(
    {
        "autoscaling_config",
        "graceful_shutdown_timeout_s",
        "health_check_period_s",
        "health_check_timeout_s",
        "logging_config",
        "max_ongoing_requests",
        "max_queued_requests",
        "max_replicas_per_node",
        "num_replicas",
        "ray_actor_options",
    }
)
# Options of `minfer serve` that are taken here beside those of the engine. All others are
# refused: Ray Serve has settings of its own in their place.
SERVER_OPTIONS: Final = frozenset(
    {
        "api_key",
        "api_keys_file",
        "cache_secret",
        "chat_template",
        "default_chat_template_kwargs",
        "enable_tokenizer_info_endpoint",
        "enforce_deadlines",
        "max_body_size",
        "max_waiting",
        "preparers",
        "reasoning_parser",
        "refuse_hosted_tools",
        "request_timeout",
        "served_model_name",
        "tool_call_parser",
        "trust_request_chat_template",
    }
)
_NOT_HERE: Final = (
    "{key} is no option here: Ray Serve speaks HTTP, and starts and stops engines, with "
    "options of its own: num_replicas, autoscaling_config, graceful_shutdown_timeout_s..."
)


def build(args: Mapping[str, Any]) -> Any:
    """The application for these arguments: a deployment `engine`, and the ingress
    `front` in front of it. Raises ConfigError for arguments, nodes or a version of Ray
    that cannot be used.
    """
    if not isinstance(args, Mapping) or not all(isinstance(key, str) for key in args):
        raise ConfigError("arguments are options by their names, as in model=MODEL")
    _check_ray()
    from minfer.effects.serving.distributed import serve_deployment

    engines = {key: _read(value) for key, value in args.items() if key in DEPLOYMENT}
    own = {
        key: value
        for key, value in args.items()
        if key not in DEPLOYMENT and key not in ("routing", "fronts")
    }
    routing = args.get("routing", "prefix")
    if routing not in (*ROUTING_POLICIES, RAY_ROUTER):
        names = ", ".join((*ROUTING_POLICIES, RAY_ROUTER))
        raise ConfigError(f"routing must be one of {names}, not {routing!r}")
    fronts = _read(args.get("fronts", 1))
    if type(fronts) is not int or fronts < 1:
        raise ConfigError(f"fronts must be a whole number from 1 on, not {fronts!r}")
    parser = _Parser(add_help=False, allow_abbrev=False)
    serve.add_options(parser)
    options = parser.read(own)
    serve.complete(options)
    policy = None if routing == RAY_ROUTER else routing
    return serve_deployment.application(options, policy, engines, fronts)


def _check_ray() -> None:
    """Raise ConfigError if Ray Serve is not installed, or has another version."""
    how = how_to_install("ray-serve")
    try:
        found = version("ray")
        import ray.serve  # noqa: F401 - whether it can be imported, with what it needs
    except (ImportError, PackageNotFoundError) as error:
        raise ConfigError(f"Ray Serve cannot be used ({error}): {how}") from None
    if not found.startswith(RAY):
        wanted = f"{RAY}*, whose interface for request routers minfer uses"
        raise ConfigError(f"Ray is {found}, not {wanted}: {how}")


class _Parser(argparse.ArgumentParser):
    """A parser of options from a mapping of their names to values of any type."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(message)

    def read(self, given: Mapping[str, Any]) -> argparse.Namespace:
        """The given options, and the defaults of all others. Raises ConfigError."""
        taken = SERVER_OPTIONS | _engine_options()
        words = list[str]()
        for key, value in given.items():
            words += self._words(key, value, taken)
        return self.parse_args(words)

    def _words(self, key: str, value: Any, taken: Collection[str]) -> list[str]:
        """The command line for an option, if it is one of those that are `taken`. Raises
        ConfigError.
        """
        flag = f"--{key.replace('_', '-')}"
        action = self._option_string_actions.get(flag)
        if action is None:
            self.error(
                f"there is no option {key!r}: it must be one of `minfer serve`, or of "
                f"{', '.join(sorted((*DEPLOYMENT, 'fronts', 'routing')))}"
            )
        if action.dest not in taken:
            self.error(_NOT_HERE.format(key=key))
        if value is None:
            return []
        if action.nargs == 0:
            wanted = _read(value)
            if not isinstance(wanted, bool):
                self.error(f"{key} must be true or false, not {value!r}")
            no = f"--no-{flag[2:]}"
            return [flag] if wanted else [no] if no in action.option_strings else []
        if isinstance(value, list | tuple):
            if action.nargs is None:
                repeated = isinstance(action, argparse._AppendAction)
                if len(value) != 1 and not repeated:
                    self.error(f"{key} takes one value, not {value!r}")
                return [f"{flag}={one}" for one in value]
            return [flag, *map(str, value)]
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        return [f"{flag}={text}"]


def _engine_options() -> frozenset[str]:
    """The names of the options of `minfer serve` that are those of the engine."""
    parser = argparse.ArgumentParser(add_help=False)
    engine_options(parser)
    dry_run_option(parser)
    return frozenset(action.dest for action in parser._actions)


def _read(value: Any) -> Any:
    """A value; `serve run` gives all as text, which is read as JSON if it is that."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
