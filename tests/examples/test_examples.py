"""The examples do what they say, against one server of the bundled model."""

import ast
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from attrs import frozen

from tests.effects.optional import lacking
from tests.effects.served import Serving, serving

HERE: Final = Path(__file__).parent
APPLICATION: Final = "ray_serve_app.py"  # no program: `test_ray_serve_app` runs it
PROGRAMS: Final = sorted(
    path.name
    for path in (*HERE.glob("*.py"), *HERE.glob("*.sh"))
    if path.name not in ("__init__.py", APPLICATION) and not path.name.startswith("test_")
)
MAX_LINES: Final = 44  # lines


@frozen
class Example:
    """What a program must print, and what has to be there."""

    prints: str  # a regular expression
    needs: tuple[str, ...] = ()  # packages, and modules of minfer


# Of the small model's text, what it is sure of.
EXAMPLES: Final = {
    "anthropic_messages.py": Example(
        r"42\n(end_turn|max_tokens) \d+\n3, 7, 19, 42",
        ("anthropic", "minfer.effects.serving.anthropic"),
    ),
    "compare_policies.py": Example(
        r"TTFT p50: -0\.\d+ s .* differs\nTTFT p99: \+.* s .*\npolicy overrides: 0"
    ),
    "curl.sh": Example(r'(?s)"id":"bundled".*"text_completion".*data: \[DONE\]'),
    "journal_replay.py": Example(
        r"(?s)verified +every decision.*Request '4'.*waiting for a free row"
    ),
    "langchain_chat.py": Example(
        r"(?s)^3 hours = 180 minutes.*\n--\n.*240 minutes",
        ("langchain_openai", "langchain_core"),
    ),
    "litellm_chat.py": Example(r"^3, 7, 19, 42 \d+ tokens\n3, 7, 19, 42", ("litellm",)),
    "openai_async.py": Example(
        r"(?s)^def is_prime\(.*def gcd\(.*return a\n.*def reverse_string\("
    ),
    "openai_chat.py": Example(r"(?s)42\n.*47\n.*completion_tokens=\d+"),
    "openai_logprobs.py": Example(r"^'1' +of '1' \d+%, '.+' \d+%"),
    "openai_reproducible.py": Example(r"^5 seeds, [2-5] texts"),
    "openai_stream.py": Example(r"(?s)^```python\ndef .*```\n[1-9]\d* tokens$"),
    "openai_tools.py": Example(r'(?s)^get_weather \{"city": "Paris"\}\n.*cloudy.*Paris'),
    "own_policy.py": Example(r"no law is broken\nended in this order: \['2', '1', '0'\]"),
    "python_async.py": Example(
        r"(?s)^def gcd\(.*return a\n.*class Queue:.*left after '.+'"
    ),
    "python_batch.py": Example(r"(?s)^def is_prime\(.*first token after 0\.\d+ s"),
    "requests_http.py": Example(
        r"(?s)\n400 prompt: must be .*\n.*    [\w\"]", ("requests",)
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(names=("bundled",), num_gpu_blocks_override=128) as running:
        yield running


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # theirs are not ours
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example(
    name: str,
    server: Serving,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = EXAMPLES[name]
    if reason := lacking(example.needs):
        pytest.skip(reason)
    if name.endswith(".sh"):
        emitted = in_shell(HERE / name, server.url)
    else:
        monkeypatch.setenv("MINFER_URL", server.url)
        runpy.run_path(str(HERE / name), run_name="__main__")
        emitted = capsys.readouterr().out
    assert re.search(example.prints, emitted.strip("\n")), emitted


def in_shell(path: Path, url: str) -> str:
    """What a script prints."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not there")
    env = {**os.environ, "MINFER_URL": url}
    result = subprocess.run(
        ["sh", str(path)], check=True, capture_output=True, text=True, env=env, timeout=60
    )
    return result.stdout


def test_each_has_its_expectation_and_is_named_in_the_readme() -> None:
    assert list(EXAMPLES) == PROGRAMS
    readme = (HERE / "README.md").read_text("utf-8")
    for name in (*PROGRAMS, APPLICATION):
        assert f"[{name}]({name})" in readme


@pytest.mark.parametrize(
    "name", [program for program in PROGRAMS if program.endswith(".py")]
)
def test_it_is_short_and_says_what_it_shows(name: str) -> None:
    text = (HERE / name).read_text("utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    assert first.endswith(".")
