"""Random texts that a grammar allows, byte by byte."""

from random import Random

from minfer.effects.text.grammars.grammar_library import Matcher
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.random_texts import allowed_bytes, compiler, token_of

MAX_BYTES = 5000
MARKS = b'"\\n<>*-@'  # bytes that begin or end something


def matcher(grammar: str) -> Matcher:
    """A matcher of a grammar in Lark's form."""
    return compiler().compile(StructuredOutputs(grammar=grammar)).matcher()


def draw(
    walk: Matcher, random: Random, *, min_bytes: int = 40, closing: bytes = b'"*\\'
) -> bytes:
    """A text that a matcher allows: of little more than `min_bytes` bytes, if those
    that are `closing` lead to its end.
    """
    walk.restart()
    text = bytearray()
    while not walk.must_end:
        if walk.may_end and (len(text) > min_bytes or random.random() < 0.2):
            break
        allowed = [byte for byte in allowed_bytes(walk.mask()).every if byte < 128]
        marks = [byte for byte in allowed if byte in MARKS]
        last = b"n" if text.endswith(b"\\") else closing  # a line break ends most words
        ends = [byte for byte in allowed if byte in last]
        if ends and len(text) > min_bytes and random.random() < 0.6:
            byte = random.choice(ends)
        else:
            byte = random.choice(marks if marks and random.random() < 0.5 else allowed)
        text.append(byte)
        walk.advance([token_of(byte)])
        assert len(text) < MAX_BYTES, bytes(text)
    return bytes(text)


def takes(walk: Matcher, text: bytes) -> bool:
    """Whether a matcher allows a whole text."""
    walk.restart()
    for byte in text:
        if byte not in allowed_bytes(walk.mask()).every:
            return False
        walk.advance([token_of(byte)])
    return walk.may_end
