"""A model that says what a test wants: the dry executor reads out a text of ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from minfer.effects.live.async_llm import AsyncLLM
from minfer.sampling.reference_sampler import RowSampling
from tests.effects.tiny_model import write_checkpoint

# A template in the manner of those that know tools: all it is given can be read in it.
TEMPLATE: Final = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_talker(
    folder: Path,
    template: str = TEMPLATE,
    special: Sequence[str] = (),
    context: int = 4096,
) -> str:
    """Write a model whose tokens are bytes, and these special tokens."""
    path = write_checkpoint(folder, vocab_size=300, max_position_embeddings=context)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return str(path)


def say(llm: AsyncLLM, text: str) -> None:
    """Have answers at temperature 0 be this text."""
    assert llm.tokenizer is not None
    executor: Any = llm.worker.driver.executor
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    executor.sentences = [tuple(ids)]


class Script:
    """Answers in the order of their requests, whatever their sampling parameters.

    A prompt is known by its length: each request of a conversation is longer than those
    before. When all texts were given, the last one is again.
    """

    def __init__(self, llm: AsyncLLM, *texts: str) -> None:
        assert llm.tokenizer is not None
        self._texts = [
            tuple(llm.tokenizer.encode(text, add_special_tokens=False)) for text in texts
        ]
        self._by_prompt: dict[int, tuple[int, ...]] = {}
        executor: Any = llm.worker.driver.executor
        executor = getattr(executor, "inner", executor)  # of one that is slowed down
        executor.token = self._token

    def _token(self, sampling: RowSampling, prompt: int, position: int) -> int:
        if prompt not in self._by_prompt:
            number = min(len(self._by_prompt), len(self._texts) - 1)
            self._by_prompt[prompt] = self._texts[number]
        text = self._by_prompt[prompt]
        place = position - prompt
        return text[place] if place < len(text) else min(sampling.stop_ids)


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls in Hermes' format."""
    # Grammars of JSON take letters as themselves, and no escapes of them.
    emitted = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in emitted)
