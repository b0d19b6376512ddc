"""A model that says what a test wants: the dry executor reads out a text of ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from minfer.effects.live.async_llm import AsyncLLM
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
    folder: Path, template: str = TEMPLATE, special: Sequence[str] = ()
) -> str:
    """Write a model whose tokens are bytes, and these special tokens."""
    path = write_checkpoint(folder, vocab_size=300, max_position_embeddings=4096)
    made = Tokenizer.from_file(str(path / "tokenizer.json"))
    made.add_special_tokens([AddedToken(one, special=True) for one in special])
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    return str(path)


def say(llm: AsyncLLM, text: str) -> None:
    """Have answers at temperature 0 be this text."""
    assert llm.tokenizer is not None
    executor: Any = llm.worker.driver.executor
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    executor.sentences = [tuple(ids)]


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls in Hermes' format."""
    # Grammars of JSON take letters as themselves, and no escapes of them.
    emitted = [
        json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
        for name, given in calls
    ]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in emitted)
