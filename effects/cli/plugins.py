"""Scheduling policies of a user's own: `--policies MODULE`, before the command or after.

The module's policies can then be named wherever a policy can, and its attrs records can
be read from journals that were recorded with them.
"""

import argparse
import inspect
import os
import sys
from importlib import import_module
from typing import Any

import attrs

from minfer.journal.codec import RECORDS
from minfer.policies.builtin import INCOMPLETE, POLICIES
from minfer.policies.mistakes import METHODS, misnamed_methods


def policies_option(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--policies`."""
    parser.add_argument(
        "--policies",
        type=register_policies,
        metavar="MODULE",
        default=default,
        help="a Python module with scheduling policies of your own, found as if it were "
        "imported here; options that take a policy, and journals, then know them by "
        "their class names",
    )


def register_policies(module: str) -> str:
    """Register a module's classes by their names; returns the module's name.

    Raises ArgumentTypeError if it cannot be imported, or has a class with the name of one
    of minfer's.
    """
    sys.path.append(os.getcwd())
    try:
        members = vars(import_module(module))
    except Exception as error:  # any error of the import
        raise argparse.ArgumentTypeError(
            f"{module} cannot be imported: {error!r}"
        ) from None
    for member in members.values():
        if not isinstance(member, type):
            continue
        if attrs.has(member):
            _register(member, module)
        if member.__module__ == module and member not in POLICIES.values():
            _note_incomplete(member)
    return module


def _note_incomplete(kind: type) -> None:
    """Remember a class that is no policy but has methods of one, for the error that names
    it.
    """
    if any(inspect.isfunction(vars(kind).get(method)) for method in METHODS):
        INCOMPLETE[kind.__name__] = kind


def _register(policy_class: type, module: str) -> None:
    kind: Any = attrs.resolve_types(policy_class)
    name = kind.__name__
    if RECORDS.setdefault(name, kind) is not kind:
        raise argparse.ArgumentTypeError(
            f"{module}: minfer has a class {name} of its own; give yours another name"
        )
    if hasattr(kind, "victim"):  # which every policy has
        POLICIES[name] = kind
        for sentence in misnamed_methods(kind).values():
            print(f"minfer: {sentence}", file=sys.stderr)
