"""The error of a broken law."""


class InvariantError(AssertionError):
    """A law of the engine is broken: `law` is its name."""

    def __init__(self, law: str, detail: object) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


def require(holds: object, law: str, detail: object) -> None:
    """Raise InvariantError unless `holds`."""
    if not holds:
        raise InvariantError(law, detail)
