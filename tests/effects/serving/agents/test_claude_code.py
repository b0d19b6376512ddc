"""Claude Code does its tasks with a model behind POST /v1/messages.

The model is scripted: which tools it calls is fixed. All else is as in a real run: the
program's own prompts and tools, HTTP, the chat template, the parser of calls.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.effects.scripted import Script, hermes, write_talker
from tests.effects.served import Serving, serving
from tests.effects.serving.agents.claude_code import (
    CONTEXT,
    VERSION,
    ClaudeCode,
    NotInstalledError,
    finish,
    install,
)

pytestmark = pytest.mark.long
DONE = "All is done."


@pytest.fixture
def claude(request: pytest.FixtureRequest, tmp_path: Path) -> ClaudeCode:
    assert request.config.cache is not None
    cache = request.config.cache.mkdir("agents") / f"claude-code-{VERSION}"
    try:
        binary = install(cache)
    except NotInstalledError as error:
        pytest.skip(str(error))
    return ClaudeCode(binary, tmp_path / "home", tmp_path / "work")


def bash(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "run it"}


def blocks_of(messages: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The blocks of a kind in what the program reports."""
    contents = [
        message["message"]["content"] for message in messages if "message" in message
    ]
    lists = [content for content in contents if isinstance(content, list)]
    return [block for content in lists for block in content if block["type"] == kind]


def check_result(messages: list[dict[str, Any]]) -> None:
    result = messages[-1]
    assert (result["type"], result["is_error"]) == ("result", False)
    assert result["result"] == DONE


def test_three_calls(talker: Serving, claude: ClaudeCode) -> None:
    path = claude.folder / "a.txt"
    edit = {"file_path": str(path), "old_string": "one", "new_string": "two"}
    Script(
        talker.llm,
        "<think>First I write it.</think>"
        + hermes(("Write", {"file_path": str(path), "content": "one\n"})),
        "Now I change it." + hermes(("Edit", edit)),
        hermes(bash("cat a.txt")),
        DONE,
    )
    messages = claude.run(talker.url, "Write one, and make it two.")
    check_result(messages)
    assert path.read_text() == "two\n"
    assert [block["name"] for block in blocks_of(messages, "tool_use")] == [
        "Write",
        "Edit",
        "Bash",
    ]
    assert [block["thinking"] for block in blocks_of(messages, "thinking")] == [
        "First I write it."
    ]
    assert blocks_of(messages, "tool_result")[-1]["content"] == "two"
    assert messages[-1]["usage"]["cache_read_input_tokens"] > 0


def test_two_calls_at_once(talker: Serving, claude: ClaudeCode) -> None:
    calls = (bash("echo a > a.txt"), bash("echo b > b.txt"))
    Script(talker.llm, hermes(*calls), DONE)
    messages = claude.run(talker.url, "Write both.")
    check_result(messages)
    assert len(blocks_of(messages, "tool_result")) == 2
    assert (claude.folder / "a.txt").read_text() == "a\n"
    assert (claude.folder / "b.txt").read_text() == "b\n"


def test_a_tool_that_fails(talker: Serving, claude: ClaudeCode) -> None:
    unknown = ("Unheard", {"a": 1})
    Script(talker.llm, hermes(bash("exit 3")), hermes(unknown), DONE)
    messages = claude.run(talker.url, "Try it.")
    check_result(messages)
    assert [block["is_error"] for block in blocks_of(messages, "tool_result")] == [
        True,
        True,
    ]


def test_a_tool_that_is_found_by_a_search(talker: Serving, claude: ClaudeCode) -> None:
    search = ("ToolSearch", {"query": "select:CronList"})
    Script(talker.llm, hermes(search), hermes(("CronList", {})), DONE)
    messages = claude.run(talker.url, "What is scheduled?")
    check_result(messages)
    assert not any(block.get("is_error") for block in blocks_of(messages, "tool_result"))


def test_a_conversation_is_resumed(talker: Serving, claude: ClaudeCode) -> None:
    Script(
        talker.llm, hermes(bash("echo a > a.txt")), DONE, hermes(bash("cat a.txt")), DONE
    )
    check_result(claude.run(talker.url, "Write it."))
    messages = claude.run(talker.url, "Read it.", "--continue")
    check_result(messages)
    assert blocks_of(messages, "tool_result")[-1]["content"] == "a"
    usage = messages[-1]["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def test_a_cancelled_answer(tmp_path: Path, claude: ClaudeCode) -> None:
    path = write_talker(tmp_path / "talker", context=CONTEXT)
    with serving(
        path, executor="dry", num_gpu_blocks_override=60_000, step=0.005
    ) as slow:
        Script(slow.llm, "word " * 5000)
        program = claude.start(slow.url, "-p", "Write for long.")
        slow.until(lambda: bool(slow.llm.worker.driver.state.running.seqs))
        program.send_signal(signal.SIGINT)
        finish(program)
        slow.idle()
        assert all(slow.cancelled())
        assert slow.cancelled()
        Script(slow.llm, DONE)
        check_result(claude.run(slow.url, "Go on.", "--continue"))
