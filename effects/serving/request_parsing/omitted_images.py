"""Images in results of tools, which are left out.

A user's image is refused: the answer would be about it. An agent's tools return images
unasked, and its history keeps them: were they refused, no later request of the session
could be answered. The model reads that there was one, and the header of ignored fields
names it.
"""

from typing import Final

from minfer.effects.serving.request_parsing.ignored_hints import note_ignored

OMITTED_IMAGE: Final = "[image omitted: this model reads text only]"


def omit_image(field: str) -> str:
    """The text in place of an image, which is noted as ignored under this name."""
    note_ignored(field)
    return OMITTED_IMAGE
