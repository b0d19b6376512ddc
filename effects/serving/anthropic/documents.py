"""Documents in messages of Anthropic's API, as text: a source that is text, or content of
texts. A document that is a file or an address is refused.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from minfer.effects.serving.request_parsing.bodies import HINT, StrictObject
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    read_by_type,
    text_or_parts,
)

MAX_ITEMS: Final = 4096  # messages; blocks of one
ItemLimit = Field(fail_fast=True, max_length=MAX_ITEMS)


class TextBlock(TypedObject):
    """A piece of text."""

    kinds = ("text",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "citations": ([],),
    }
    text: str


TextContent = Annotated[str | list[TextBlock], text_or_parts(TextBlock, ItemLimit)]


class TextSource(StrictObject):
    """A document's text itself."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class ContentSource(StrictObject):
    """A document's text in blocks."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        """The text, a block a line."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join([block.text for block in self.content])


_SOURCES: Final[Mapping[str, type[TextSource | ContentSource]]] = {
    "text": TextSource,
    "content": ContentSource,
}

DocumentSource = Annotated[
    TextSource | ContentSource,
    BeforeValidator(
        partial(read_by_type, _SOURCES), json_schema_input_type=TextSource | ContentSource
    ),
]


class DocumentBlock(TypedObject):
    """A document with text."""

    kinds = ("document",)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "cache_control": (HINT,),
        "citations": ({}, {"enabled": False}),
    }
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The document as the model reads it."""
        title = [] if self.title is None else [f"<title>{self.title}</title>"]
        context = [] if self.context is None else [f"<context>{self.context}</context>"]
        lines = ["<document>", *title, *context, self.source.text, "</document>"]
        return "\n".join(lines)
