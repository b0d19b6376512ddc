"""Single files of vLLM's models, imported without the rest of vLLM.

All other modules of vLLM are stand-ins, whose names are empty classes. So the classes of
a file can be made without `__init__`, given modules as attributes, and called: their
`forward` is vLLM's own code. A path leads to the folder `vllm` of a source distribution.
"""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

MODELS: Final = "vllm.model_executor.models"


class _Empty(type):
    """The class of classes that have any attribute: None."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StandIn(ModuleType):
    """A module whose names are empty classes, but for those that are called at import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "support_torch_compile":
            return _undecorated
        if name == "init_logger":
            return logging.getLogger
        return _Empty(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


def _undecorated(*classes: Any, **_: Any) -> Any:
    """A decorator that changes nothing, with options or without."""
    return classes[0] if classes else lambda decorated: decorated


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname.split(".")[0] != "vllm":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def load_file(folder: Path, name: str) -> ModuleType:
    """The module of a file of vLLM's models."""
    path = folder / "model_executor" / "models" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{MODELS}.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _stand_ins():
        spec.loader.exec_module(module)
    return module


def made_of(module_class: type[nn.Module], **attributes: Any) -> Any:
    """An instance that has these attributes, without its class's `__init__`."""
    instance = module_class.__new__(module_class)
    nn.Module.__init__(instance)
    for name, value in attributes.items():
        setattr(instance, name, value)
    return instance.eval()
