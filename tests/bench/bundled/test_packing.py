"""Tokens, and which of them are learnt."""

from random import Random

import numpy
from tokenizers import Tokenizer

from bench.bundled.dialogues import CLOSED, OPENED, Dialogue, any_dialogue
from bench.bundled.packing import (
    HEAVY,
    LEARNT,
    WINDOW,
    Conversations,
    Pack,
    behind,
    circles,
    halves,
    texts,
)
from bench.bundled.shards import make
from bench.bundled.tasks.tasks import Stage

ASKED = {"role": "user", "content": "What is 1 + 2?"}
SAID = {"role": "assistant", "content": "1 + 2 = 3"}


def learnt(tokenizer: Tokenizer, dialogue: Dialogue) -> str:
    (tokens,) = Conversations(tokenizer).tokens([dialogue])
    own = tokens[(tokens & LEARNT) > 0] & (LEARNT - 1)
    return tokenizer.decode(own.tolist(), skip_special_tokens=False)


def test_what_the_assistant_says_is_learnt(tokenizer: Tokenizer) -> None:
    assert learnt(tokenizer, Dialogue([ASKED, SAID])) == "1 + 2 = 3<|im_end|>"
    assert (
        learnt(tokenizer, Dialogue([ASKED, SAID, ASKED, SAID]))
        == "1 + 2 = 3<|im_end|>" * 2
    )


def test_what_the_template_gives_is_not(tokenizer: Tokenizer) -> None:
    thought = {**SAID, "reasoning_content": "Easy."}
    whole = "<think>\nEasy.\n</think>\n\n1 + 2 = 3<|im_end|>"
    assert learnt(tokenizer, Dialogue([ASKED, thought])) == whole
    assert learnt(
        tokenizer, Dialogue([ASKED, thought], (), OPENED)
    ) == whole.removeprefix(OPENED)
    assert learnt(tokenizer, Dialogue([ASKED, SAID], (), CLOSED)) == "1 + 2 = 3<|im_end|>"


def test_of_python_everything_is(tokenizer: Tokenizer) -> None:
    (tokens,) = texts(tokenizer, ["def f():\n    pass\n"])
    assert (tokens & LEARNT).all()
    assert tokens[-1] == LEARNT  # the end's id is 0
    assert (
        tokenizer.decode((tokens[:-1] & (LEARNT - 1)).tolist()) == "def f():\n    pass\n"
    )


def test_of_circles_only_their_end(tokenizer: Tokenizer) -> None:
    written = texts(tokenizer, ["import os\nimport sys\nprint(os.name)\n"])
    for tokens in circles(Random(0), written, 50):
        assert (tokens[:-1] < LEARNT).all()
        assert tokens[-1] == LEARNT | HEAVY
        assert len(tokens) > 4


def test_a_window_may_begin_anywhere() -> None:
    pack = Pack.of(
        [numpy.array([5, 0], numpy.int16), numpy.array([6, 7, 0], numpy.int16)]
    )
    assert pack.starts.tolist() == [0, 2]
    assert len(pack.tokens) >= WINDOW + 5


def test_joined_packs_have_the_documents_of_all() -> None:
    first = [numpy.array([1, 2, 0], numpy.int16), numpy.array([3, 0], numpy.int16)]
    second = [numpy.array([4, 5, 6, 0], numpy.int16)]
    joined = Pack.joined([Pack.of(first), Pack.of(second)])
    for start, one in zip(joined.starts[:2], first, strict=True):
        assert joined.tokens[start : start + len(one)].tolist() == one.tolist()
    begin = joined.starts[2]
    assert joined.tokens[begin : begin + 4].tolist() == [4, 5, 6, 0]
    assert len(joined.tokens) >= begin + WINDOW


def test_a_shard_is_made_of_seed_and_number(tokenizer: Tokenizer) -> None:
    one, again, other = (
        make(tokenizer, 3, number, 2000, Stage.FIRST) for number in (4, 4, 5)
    )
    assert numpy.array_equal(one.tokens, again.tokens)
    assert not numpy.array_equal(one.tokens[:2000], other.tokens[:2000])


def test_conversations_end_their_turns(tokenizer: Tokenizer) -> None:
    rng = Random(2)
    for tokens in Conversations(tokenizer).tokens(
        [any_dialogue(rng) for _ in range(200)]
    ):
        ends = (tokens & (LEARNT - 1)) == tokenizer.token_to_id("<|im_end|>")
        assert (tokens[ends] & LEARNT).any()


def test_of_halves_the_first_is_a_prompts_tokens(tokenizer: Tokenizer) -> None:
    text = "def add(a, b):\n    return a + b\n"
    whole = texts(tokenizer, [text])[0]
    found = halves(tokenizer, [text] * 40, Random(2), 0.5)
    different = [one for one in found if not numpy.array_equal(one, whole)]
    assert 4 < len(different) < 30
    ids = [one[:-1] & (LEARNT - 1) for one in found]
    assert {tokenizer.decode(one.tolist()) for one in ids} == {text}
    assert all((one & LEARNT).all() and one[-1] == LEARNT for one in found)
    typed = tokenizer.encode("def add(a, b):", add_special_tokens=False).ids
    assert any(one[: len(typed)].tolist() == typed for one in ids)


def test_of_what_comes_before_a_value_nothing_is_learnt(tokenizer: Tokenizer) -> None:
    (head,) = texts(tokenizer, ["def add(a, b):\n    return a + b\n"])
    (value,) = texts(tokenizer, ['{"a": 1}'])
    found = behind(Random(3), [head], [value] * 60, 0.5)
    longer = [one for one in found if len(one) > len(value)]
    assert 15 < len(longer) < 45
    for one in found:
        before, own = one[: -len(value)], one[-len(value) :]
        assert numpy.array_equal(own, value)
        assert before.tolist() == (head[: len(before)] & (LEARNT - 1)).tolist()
