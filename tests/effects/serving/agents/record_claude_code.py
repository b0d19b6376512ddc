"""Records the requests of a session of Claude Code, without its prose.

    python -m tests.effects.serving.agents.record_claude_code

runs the program with a scripted model and writes claude_code_session.json: fields,
structure and lengths are as the program sent them; texts are filler of the same length,
and equal texts have equal filler.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from attrs import frozen

from minfer.effects.serving.anthropic.conversation import BILLING_PREFIX
from minfer.effects.serving.wire.post import Post
from minfer.effects.serving.wire.transport import Watcher
from tests.effects.scripted import Script, hermes, write_talker
from tests.effects.served import serving
from tests.effects.serving.agents.claude_code import VERSION, ClaudeCode, install

FILE: Final = Path(__file__).with_name("claude_code_session.json")
_WORDS: Final = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heath")
# Fields whose values are part of the structure.
_KEPT: Final = frozenset(
    {
        *("type", "role", "id", "tool_use_id", "name", "tool_name", "model", "display"),
        *("effort", "keep", "$schema", "format", "required", "enum", "const", "default"),
    }
)


@frozen
class Session:
    """The bodies of a session, in order."""

    version: str
    bodies: list[dict[str, Any]]

    @classmethod
    def load(cls) -> "Session":
        """The recorded session."""
        stored = json.loads(FILE.read_text())
        items = stored["parts"]
        bodies = [
            {
                **body,
                **{name: [items[index] for index in body[name]] for name in _LISTS},
            }
            for body in stored["bodies"]
        ]
        return cls(stored["version"], bodies)

    def save(self) -> None:
        """Write the session; equal items of lists are written once."""
        items: list[Any] = []

        def index_of(item: Any) -> int:
            if item not in items:
                items.append(item)
            return items.index(item)

        bodies = [
            {**body, **{name: list(map(index_of, body[name])) for name in _LISTS}}
            for body in self.bodies
        ]
        stored = {"version": self.version, "parts": items, "bodies": bodies}
        FILE.write_text(json.dumps(stored, indent=1) + "\n")


_LISTS: Final = ("system", "messages", "tools")


def without_prose(value: Any, name: str = "") -> Any:
    """A value of a body with filler in place of its texts."""
    if name in _KEPT:
        return value
    if isinstance(value, dict):
        # Names of properties in schemas are not fields of their own meaning.
        kind = "" if name == "properties" else None
        return {
            key: without_prose(field_value, key if kind is None else kind)
            for key, field_value in value.items()
        }
    if isinstance(value, list):
        return [without_prose(item, name) for item in value]
    return filler(value) if isinstance(value, str) else value


def filler(text: str) -> str:
    """Words of the same length as a text, which follow from it."""
    prefix = BILLING_PREFIX if text.startswith(BILLING_PREFIX) else ""
    words = random.Random(text)
    words_so_far = prefix
    while len(words_so_far) < len(text):
        words_so_far += f"{words.choice(_WORDS)} "
    return words_so_far[: len(text) - 1] + "." if text else ""


def scripts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Prompts, and the model's answers to each of them."""
    path = str(folder / "a.py")
    run = ("Bash", {"command": "python3 a.py", "description": "Run it"})
    wrong = {"file_path": path, "old_string": "three", "new_string": "four"}
    right = {"file_path": path, "old_string": "one", "new_string": "two"}
    change = {"command": "echo '# changed' >> a.py", "description": "Change it"}
    yield (
        "Write a program.",
        [
            "<think>I begin with a file.</think>"
            + hermes(("Write", {"file_path": path, "content": "print('one')\n"})),
            "Now I read it and run it." + hermes(("Read", {"file_path": path}), run),
            "<think>A wrong edit.</think>" + hermes(("Edit", wrong)),
            hermes(("ToolSearch", {"query": "select:CronList,NotebookEdit"})),
            hermes(("CronList", {})),
            "It is written.",
        ],
    )
    yield (
        "Change the program.",
        [
            "<think>Now the right edit.</think>" + hermes(("Edit", right)),
            hermes(("Bash", change)),
            hermes(run, ("Read", {"file_path": path})),
            "It is changed.",
        ],
    )


def main() -> None:
    """Record."""
    bodies: list[dict[str, Any]] = []
    read = Post.read

    async def reading(post: Post, max_bytes: int, watch: Watcher) -> bytes:
        data = await read(post, max_bytes, watch)
        bodies.append(json.loads(data))
        return data

    with (
        patch.object(Post, "read", reading),
        tempfile.TemporaryDirectory() as temporary,
    ):
        folder = Path(temporary)
        binary = install(Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "npm")
        claude = ClaudeCode(binary, folder / "home", folder / "work")
        model = write_talker(folder / "talker", context=400_000)
        with serving(model, executor="dry", num_gpu_blocks_override=60_000) as server:
            script = list(scripts(claude.folder))
            Script(server.llm, *(text for _, texts in script for text in texts))
            claude.run(server.url, script[0][0])
            claude.run(server.url, script[1][0], "--continue")
    Session(VERSION, [without_prose(body) for body in bodies]).save()


if __name__ == "__main__":
    main()
