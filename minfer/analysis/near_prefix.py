"""Prompts that are alike but for one token.

A prefix cache matches tokens from the first on, so one token that differs, is inserted or
left out makes everything after it miss: a date in a system prompt, a space, a different
first message. This module finds such pairs.
"""

from array import array
from typing import Final

from attrs import frozen

Tokens = tuple[int, ...]
_ITEM_BYTES: Final = 4
_CHANGED: Final = "differs"
_INSERTED: Final = "is inserted"
_REMOVED: Final = "is left out"


@frozen
class OneTokenEdit:
    """How a prompt differs from an earlier one: by one token at position `at`, after
    which `alike` tokens are the same again.
    """

    at: int
    kind: str  # what the token does: differs, is inserted or left out
    alike: int

    @property
    def end(self) -> int:
        """The leading tokens that a cache could have had, but for the edit."""
        return self.at + self.alike


def packed(tokens: Tokens) -> bytes:
    """Token ids in four bytes each, for the functions below."""
    return array("I", tokens).tobytes()


def num_common(first: bytes, second: bytes) -> int:
    """The number of equal leading tokens."""
    low, high = 0, min(len(first), len(second)) // _ITEM_BYTES
    # Most prompts differ early: the step doubles from the first token on, then halves.
    step = 1
    while low < high:
        end = min(high, low + step)
        begin_byte, end_byte = low * _ITEM_BYTES, end * _ITEM_BYTES
        if first[begin_byte:end_byte] == second[begin_byte:end_byte]:
            low, step = end, 2 * step
        elif end == low + 1:
            return low
        else:
            high, step = end, max(1, step // 2)
    return low


def one_token_edit(tokens: bytes, earlier: bytes) -> OneTokenEdit:
    """The edit of one token at the first place where packed `tokens` differ from
    `earlier` ones, after which most tokens are alike.
    """
    at = num_common(tokens, earlier)
    here, behind = at * _ITEM_BYTES, (at + 1) * _ITEM_BYTES
    edits = (
        (_CHANGED, tokens[behind:], earlier[behind:]),
        (_INSERTED, tokens[behind:], earlier[here:]),
        (_REMOVED, tokens[here:], earlier[behind:]),
    )
    found = [OneTokenEdit(at, kind, num_common(a, b)) for kind, a, b in edits]
    return max(found, key=lambda edit: edit.alike)


def is_costlier(
    edit: OneTokenEdit, best: OneTokenEdit | None, *, known: int, hit: int, size: int
) -> bool:
    """Whether an edit cost a prompt of `known` tokens, of which `hit` were cached, a
    block of `size` tokens or more, and leaves more tokens alike than the `best` so far.
    """
    num_lost = min(edit.end, known - 1) // size - hit // size
    least = max(size - 1, best.alike if best else 0)
    return num_lost > 0 and edit.alike > least
