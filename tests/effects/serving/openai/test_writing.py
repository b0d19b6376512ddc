"""What answers look like, to the byte: clients may rely on the order of fields."""

from tests.effects.serving.openai.asked import (
    chat,
    completion,
    delta,
    read,
    served,
    writer_of,
)


def test_whole_answers() -> None:
    writer = writer_of(chat())
    assert writer.write(1, delta("b", "stop")) == []
    assert writer.write(0, delta("a", "length")) == []
    (found,) = read(writer.end(served(3, 2, 1)))
    assert [c["message"]["content"] for c in found["choices"]] == ["a", "b"]
    assert [c["finish_reason"] for c in found["choices"]] == ["length", "stop"]
    assert found["object"] == "chat.completion"
    writer = writer_of(completion())
    assert writer.write(0, delta("a", "stop")) == []
    (found,) = read(writer.end(served(3, 2, 1)))
    assert found["choices"][0]["text"] == "a"
    assert found["usage"]["total_tokens"] == 5
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
