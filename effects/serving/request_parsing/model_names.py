"""GET /v1/models: the names of the served model, and its adapters."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from minfer.effects.live.adapters.registry import AdapterEntry
from minfer.effects.serving.client_errors import ApiError

MAX_NAMES_SHOWN: Final = 20  # in an error


@frozen
class Models:
    """One model under its names; the first is the default."""

    names: Sequence[str]
    created: int  # Unix time
    max_model_len: int  # tokens
    chat: bool = True  # whether it has a chat template
    bundled: bool = False  # whether it is the toy that comes with minfer
    # Whether other names may be adapters', which are looked up later.
    takes_adapters: bool = False

    def resolve(self, requested: str | None) -> str:
        """The name under which a model, or perhaps an adapter, was requested. Raises
        ApiError if it is neither.
        """
        name = requested or self.names[0]
        return name if self.takes_adapters else self.check_name(name)

    def card(self, name: str) -> dict[str, object]:
        """The description of the model under one of its names. Raises ApiError."""
        return self._card(self.check_name(name), self.created, name, None)

    def adapter_card(self, entry: AdapterEntry) -> dict[str, object]:
        """The description of an adapter of the model."""
        return self._card(entry.name, entry.created, entry.origin, entry.parent)

    def _card(
        self, name: str, created: int, root: str, parent: str | None
    ) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "minfer",
            "root": root,
            "parent": parent,
            "max_model_len": self.max_model_len,
            "chat": self.chat,
            "bundled": self.bundled,
        }

    def list_json(self, adapters: Sequence[AdapterEntry] = ()) -> dict[str, object]:
        """All cards, of the model and of these adapters."""
        cards = [self.card(name) for name in self.names]
        cards += [self.adapter_card(entry) for entry in adapters]
        return {"object": "list", "data": cards}

    def check_name(self, name: str, adapters: Sequence[AdapterEntry] = ()) -> str:
        """A name that the model has. Raises ApiError for another, which names these
        adapters.
        """
        if name not in self.names:
            known = [*self.names, *(entry.name for entry in adapters)]
            names = ", ".join(known[:MAX_NAMES_SHOWN])
            more = ", ..." if len(known) > MAX_NAMES_SHOWN else ""
            message = f"there is no model {name[:200]!r} here; there is {names}{more}"
            raise ApiError(message, "model", "model_not_found", 404)
        return name
