"""A model double for agents: each request is answered with the next of given texts,
through the whole path of HTTP, templates, engine and parsers.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.effects.scripted import TEMPLATE, say, write_talker
from tests.effects.served import Serving, serving

CONTEXT: Final = 2**19  # tokens, which are bytes: agents send 50 kB and more
_BLOCKS: Final = 3 * CONTEXT // 64


@contextlib.contextmanager
def agent_server(
    folder: Path,
    template: str = TEMPLATE,
    names: tuple[str, ...] = ("tiny",),
    **service: Any,
) -> Iterator[Serving]:
    """Serve a scripted model, with room for the prompts of agents; `service` are
    settings of the Application.
    """
    path = write_talker(folder, template)
    lengthen_context(Path(path))
    settings: dict[str, Any] = {"num_gpu_blocks_override": _BLOCKS, "service": service}
    with serving(path, names=names, executor="dry", **settings) as server:
        yield server


def lengthen_context(path: Path) -> None:
    """Give a talker's checkpoint a long context."""
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (path / "config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def script(server: Serving, texts: Iterable[str]) -> Iterator[list[str]]:
    """Answer the next requests with these texts, one request after the other. Yields the
    texts that are left.
    """
    left = list(texts)
    generate = server.llm.generate_deltas

    def next_answer(*args: Any, **kwargs: Any) -> Any:
        assert left, "the script has no answer to this request"
        say(server.llm, left.pop(0))
        return generate(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        server.llm.generate_deltas = next_answer  # type: ignore[method-assign]
        stack.callback(partial(server.llm.__dict__.pop, "generate_deltas", None))
        yield left
