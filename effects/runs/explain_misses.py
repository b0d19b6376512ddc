"""Prefixes that missed though most of their tokens were there: why, and what to do."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.runs.explain_words import MORE_CACHE

MIN_LOST_SHARE: Final = 0.25  # of the computed tokens
MIN_BLOCK_SIZE: Final = 8  # that is advised; from the next one on, if it helps as well
USUAL_BLOCK_SIZE: Final = 16
SAME_BEGINNING: Final = (
    "keep the beginning of prompts the same, token for token: put what changes (a date, "
    "an id, a name) after what stays the same"
)


@frozen
class Miss:
    """Why a prefix missed, in words, and what to do."""

    because: str
    remedy: str


def lost_tokens(prefix: Mapping[str, Any]) -> int:
    """The tokens of a prompt that could have been cached, by the figures of its prefix,
    if that is worth a word: they are most of what was computed, or of a block. They are
    whole blocks after an edit or an eviction, and else the shared part of a block.
    """
    most, hit, size = prefix["known"] - 1, prefix["hit"], prefix["size"]
    end = _cacheable_end(prefix)
    if end is not None:
        lost = whole_blocks(min(end, most), size) - hit
        return lost if 2 * lost >= most - hit else 0
    lost = min(prefix["shared"], most) - hit
    is_whole = prefix["known"] % size == 0  # its last block is full
    is_equal = not prefix["why"] and prefix["shared"] >= prefix["known"] and is_whole
    is_close = 2 * lost >= size and lost >= MIN_LOST_SHARE * (
        prefix["known"] - prefix["hit"]
    )
    return lost if (is_equal or prefix["why"] == "differs") and is_close else 0


def whole_blocks(tokens: int, size: int) -> int:
    """The tokens of the whole blocks among so many: only these are ever cached."""
    return tokens // size * size


def _cacheable_end(prefix: Mapping[str, Any]) -> int | None:
    """Where the prefix ends that would have been there but for an edit or an eviction."""
    if (edit := prefix["edit"]) is not None:
        return int(edit["at"] + edit["alike"])
    return int(prefix["cached"]) if prefix["why"] in ("evicted", "passed") else None


def miss_words(prefix: Mapping[str, Any]) -> Miss:
    """The words for a prefix that lost tokens."""
    if prefix["edit"] is not None:
        return _edited(prefix)
    hit, known = prefix["hit"], prefix["known"]
    if prefix["why"] in ("evicted", "passed"):
        because = (
            f"its first {hit + lost_tokens(prefix):,} tokens had been cached, and were "
            f"evicted: only {hit:,} of {known:,} were cached then"
        )
        remedy = f"{MORE_CACHE}; or keep evicted blocks (--kv-host-memory, --kv-disk)"
        return Miss(because, remedy)
    return _within_a_block(prefix)


def _edited(prefix: Mapping[str, Any]) -> Miss:
    """Of a prompt that is another's but for one token."""
    edit = prefix["edit"]
    theirs, own = prefix["edit_tokens"]
    change = {
        "differs": f"has id {own} instead of {theirs}",
        "is inserted": f"is inserted (its id is {own})",
        "is left out": f"is left out (the other has id {theirs})",
    }[edit["kind"]]
    because = (
        f"its prompt differs from that of {prefix['edit_with'][0]!r} in one token: token "
        f"{edit['at']:,}, counted from 0, {change}, and the {edit['alike']:,} behind it "
        f"are alike. Only {prefix['hit']:,} of "
        f"{prefix['known']:,} tokens were cached, without it up to "
        f"{prefix['hit'] + lost_tokens(prefix):,}"
    )
    return Miss(because, SAME_BEGINNING)


def _smaller_blocks(prefix: Mapping[str, Any]) -> str:
    """The remedy for a miss within a block."""
    for least in (USUAL_BLOCK_SIZE, MIN_BLOCK_SIZE):
        hits = {
            block: count
            for block, count in prefix["would"].items()
            if least <= block < prefix["size"] and count > prefix["hit"]
        }
        if hits:
            best = max(hits, key=lambda block: (hits[block], block))
            return (
                f"use smaller blocks: with --block-size {best}, {hits[best]:,} tokens "
                "would have been cached"
            )
    return "make the beginning that prompts share longer"


def _within_a_block(prefix: Mapping[str, Any]) -> Miss:
    """Of a prompt that shares more than was cached, but no whole block more."""
    size, hit, known = prefix["size"], prefix["hit"], prefix["known"]
    other, shared = prefix["shared_with"][0], min(prefix["shared"], known)
    remedy = _smaller_blocks(prefix)
    if not prefix["why"]:
        because = (
            f"its prompt misses a block by one token: all its {known:,} tokens are those "
            f"of {other!r}, but the last one is always computed, and with it the rest of "
            f"its block (of {size}). Only {hit:,} tokens were cached"
        )
        return Miss(because, remedy)
    missing = hit + size - shared
    tokens = "one token" if missing == 1 else f"{missing:,} tokens"
    because = (
        f"its prompt misses a block by {tokens}: it shares {shared:,} tokens with "
        f"{other!r}, and the block ends at {hit + size:,} (blocks have {size} tokens). "
        f"Only {hit:,} of {known:,} tokens were cached"
    )
    return Miss(because, remedy)
