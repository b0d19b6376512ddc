"""GET /v1/models: the names of the served model."""

from collections.abc import Sequence

from attrs import frozen

from minfer.effects.serving.client_errors import ApiError


@frozen
class Models:
    """One model under its names; the first is the default."""

    names: Sequence[str]
    created: int  # Unix time
    max_model_len: int  # tokens
    chat: bool = True  # whether it has a chat template
    bundled: bool = False  # whether it is the toy that comes with minfer

    def resolve(self, requested: str | None) -> str:
        """The name under which a model was requested. Raises ApiError if unknown."""
        return self.check_name(requested or self.names[0])

    def card(self, name: str) -> dict[str, object]:
        """The description of the model under one of its names. Raises ApiError."""
        return {
            "id": self.check_name(name),
            "object": "model",
            "created": self.created,
            "owned_by": "minfer",
            "max_model_len": self.max_model_len,
            "chat": self.chat,
            "bundled": self.bundled,
        }

    def list_json(self) -> dict[str, object]:
        """All cards."""
        return {"object": "list", "data": [self.card(name) for name in self.names]}

    def check_name(self, name: str) -> str:
        """A name that the model has. Raises ApiError for another."""
        if name not in self.names:
            names = ", ".join(self.names)
            message = f"there is no model {name[:200]!r} here; there is {names}"
            raise ApiError(message, "model", "model_not_found", 404)
        return name
