"""What a format of tool calls declares: how calls are read, and how they are written."""

import secrets
import string
from collections.abc import Sequence
from typing import Final, Protocol

from attrs import frozen

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.source import Reading, StreamedText

_LETTERS: Final = string.ascii_letters + string.digits


class Dialect(Protocol):
    """The notation of calls, with the markers of one family of models."""

    @property
    def opens(self) -> Sequence[str]:
        """The markers that begin calls."""

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""


@frozen(kw_only=True)
class CallForm:
    """The form in which the model was trained to write calls.

    In the texts, `{name}` is a call's name, `{arguments}` are its arguments, `{index}` is
    a number, `{id}` an id that the model chooses, and `{gap}` a space or nothing.
    """

    call: str
    begins: str = ""  # before the first call of an answer, or of a group
    between: str | None = ""  # two calls; None: there is only one
    ends: str = ""  # after the last call
    optional: str = ""  # may come before, where the model has it as a token
    lone: bool = False  # one call alone may lack `begins` and `ends`
    content: str = ""  # before an answer that is no call
    # Around a value in tags: `{key}`, `{value}`, and `{kind}`, which is `true` for texts
    # and `false` for others.
    parameter: str = ""


@frozen(kw_only=True)
class ToolFormat:
    """The format of tool calls of a family of models."""

    dialect: Dialect
    written: CallForm | None = None
    # The form of models that do not have this marker as a token.
    older: tuple[str, CallForm] | None = None
    markers: tuple[str, ...] = ()  # which may be special tokens
    # The beginning of a call's id, and the number of letters and digits after it.
    prefix: str = "call_"
    letters: int = 24
    # Texts of chat templates that have this format, any of them; each is several texts
    # that are all there.
    signs: tuple[tuple[str, ...], ...] = ()
    # A sign is enough for templates that do not render calls.
    specific: bool = True

    @property
    def opens(self) -> Sequence[str]:
        """The markers that begin calls."""
        return self.dialect.opens

    @property
    def around(self) -> Sequence[str]:
        """The markers around answers, which are left out."""
        return getattr(self.dialect, "drops", ())

    @property
    def begins_with_marker(self) -> bool:
        """Whether calls begin with a marker, wherever they are."""
        if self.written is None:
            return False
        first = self.written.begins or self.written.call
        return any(map(first.startswith, self.opens))

    def shown_in(self, template: str) -> bool:
        """Whether a chat template has one of the signs."""
        return any(all(text in template for text in sign) for sign in self.signs)

    def new_id(self) -> str:
        """A unique id for a call."""
        return new_id(self.prefix, self.letters)


def new_id(prefix: str, letters: int) -> str:
    """A unique id: this many letters and digits after the prefix."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(letters))
