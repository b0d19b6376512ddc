"""Fields that are hints without effect, and whose values are checked all the same."""

from pydantic import AfterValidator

from minfer.effects.serving.request_parsing.ignored_hints import note_ignored


def hint(name: str, *neutral: object) -> AfterValidator:
    """A validator of a field with this name in the API: it notes values other than the
    neutral ones as ignored.
    """

    def note(value: object) -> object:
        if value not in neutral:
            note_ignored(name)
        return value

    return AfterValidator(note)
