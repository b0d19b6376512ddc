"""Codex completes tasks on a server whose model follows a script."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lark import Lark

from tests.effects.scripted import TEMPLATE, hermes
from tests.effects.served import Serving
from tests.effects.serving.codex.program import NEEDS_CODEX, Codex
from tests.effects.serving.codex.recording import Recording, recorded
from tests.effects.serving.scripted_model import agent_server, script
from tests.effects.text.grammars.test_lark_terminals import PATCH, for_lark

pytestmark = [pytest.mark.long, NEEDS_CODEX]
SESSION = Path(__file__).parent / "session.json"
CUSTOM_MODEL = "gpt-5.5"  # Codex offers a custom tool to models of this name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    folder = tmp_path_factory.mktemp("codex") / "m"
    with agent_server(folder, template, names=("tiny", CUSTOM_MODEL)) as server:
        yield server


@pytest.fixture
def codex(server: Serving, tmp_path: Path) -> Codex:
    return Codex.at(tmp_path, server.url)


def thought(number: int) -> str:
    return f"<think>\nStep {number} of it.\n</think>\n\n"


def ten_turns() -> list[str]:
    """What the model writes in ten turns, of two answers each."""
    return [
        text
        for number in range(10)
        for text in (
            f"{thought(number)}I do it.{hermes(run(f'echo {number} >> a.txt'))}",
            f"{thought(number)}Done, {number}.",
        )
    ]


def shape(value: Any) -> Any:
    """The structure of a value: texts are left out."""
    if isinstance(value, dict):
        return {key: shape(field_value) for key, field_value in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value)


def run(command: str) -> tuple[str, dict[str, Any]]:
    return ("exec_command", {"cmd": command})


def commands(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The commands that were run, with their exit codes."""
    items = [e["item"] for e in events if e["type"] == "item.completed"]
    return [
        (item["aggregated_output"], item["exit_code"])
        for item in items
        if item["type"] == "command_execution"
    ]


def test_three_calls(server: Serving, codex: Codex) -> None:
    texts = [
        thought(1) + "I write it." + hermes(run("echo one > a.txt")),
        thought(2) + hermes(run("echo two >> a.txt")),
        hermes(run("cat a.txt")),
        thought(4) + "Done.",
    ]
    with script(server, texts) as left:
        events = codex.run("Write two lines.")
    assert not left
    assert commands(events) == [("", 0), ("", 0), ("one\ntwo\n", 0)]
    assert (codex.work / "a.txt").read_text() == "one\ntwo\n"
    usage = events[-1]["usage"]
    assert usage["reasoning_output_tokens"] == 3 * len("Step 1 of it.")
    assert usage["cached_input_tokens"] > 0.7 * usage["input_tokens"]


def test_two_parallel_calls(server: Serving, codex: Codex) -> None:
    two_calls = hermes(run("echo a > a.txt; cat a.txt"), run("echo b > b.txt; cat b.txt"))
    with script(server, [two_calls, "Done."]) as left:
        events = codex.run("Write two files.")
    assert not left
    assert sorted(commands(events)) == [("a\n", 0), ("b\n", 0)]


def test_a_call_that_fails(server: Serving, codex: Codex) -> None:
    texts = [
        hermes(run("cat missing.txt; exit 3")),
        hermes(("no_such_tool", {"x": 1})),
        hermes(("exec_command", {"wrong": "argument"})),
        hermes(run("echo ok")),
        "Done.",
    ]
    with script(server, texts) as left:
        events = codex.run("Read the file.")
    assert not left
    assert [code for _, code in commands(events)] == [3, 0]


def test_a_call_that_is_cancelled_and_a_session_that_is_resumed(
    server: Serving, codex: Codex
) -> None:
    with script(server, [hermes(run("touch begun; sleep 300"))]):
        process = codex.start("Wait.")
        server.until((codex.work / "begun").exists)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    texts = [thought(1) + hermes(run("echo on")), "Done."]
    with script(server, texts) as left:
        events = codex.run("Go on.", "resume", "--last")
    assert not left
    assert commands(events) == [("on\n", 0)]


def test_an_answer_that_is_cancelled(server: Serving, codex: Codex) -> None:
    with script(server, ["word " * 50_000]):
        process = codex.start("Talk.")
        server.until(lambda: server.llm.worker.driver.busy)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        server.idle()
    with script(server, ["Done."]) as left:
        codex.run("Go on.", "resume", "--last")
    assert not left


def test_a_custom_tool_and_one_in_a_namespace(server: Serving, tmp_path: Path) -> None:
    patch = '*** Begin Patch\n*** Add File: a.txt\n+é "one"\n*** End Patch\n'
    custom = Codex.at(tmp_path / "custom", server.url, CUSTOM_MODEL)
    with script(server, [hermes(("apply_patch", {"input": patch})), "Done."]) as left:
        custom.run("Write a file.")
    assert not left
    assert (custom.work / "a.txt").read_text() == 'é "one"\n'
    spaced = Codex.at(tmp_path / "spaced", server.url)
    call = hermes(("multi_agent_v1__close_agent", {"target": "no-agent"}))
    with recorded(server) as bodies, script(server, [call, "Done."]) as left:
        spaced.run("Close it.")
    assert not left
    called, output = bodies[-1]["input"][-2:]
    assert (called["namespace"], called["name"]) == ("multi_agent_v1", "close_agent")
    assert "unsupported call" not in output["output"]


def test_a_patch_keeps_to_the_grammar_that_codex_sends(
    server: Serving, tmp_path: Path
) -> None:
    custom = Codex.at(tmp_path, server.url, CUSTOM_MODEL)
    with recorded(server) as bodies, script(server, ["Done."]):
        custom.run("Write a file.")
    broken = "*** Begin Patch\n*** Add File a.txt\n+x\n*** End Patch\n"
    fields = {**bodies[0], "stream": False, "max_output_tokens": 300}
    with script(server, [hermes(("apply_patch", {"input": broken}))]):
        response = server.post("responses", **fields)
    assert "tools.format" not in response.headers["x-minfer-ignored"]
    (call,) = response.json()["output"]
    assert call["type"] == "custom_tool_call"
    assert call["input"].startswith("*** Begin Patch\n*** Add File: ")
    Lark(for_lark(PATCH)).parse(call["input"])


def test_ten_turns(server: Serving, codex: Codex) -> None:
    """The session that is recorded; with MINFER_TEST_RECORD set, again."""
    texts = ten_turns()
    with recorded(server) as bodies, script(server, texts) as left:
        codex.run("Turn 0.")
        for number in range(1, 10):
            codex.run(f"Turn {number}.", "resume", "--last")
    assert not left
    recording = Recording.of(bodies, texts)
    if os.environ.get("MINFER_TEST_RECORD"):
        recording.write(SESSION)
    old = Recording.read(SESSION)
    assert recording.counts == old.counts
    assert shape(recording.fields) == shape(old.fields)
    assert shape(recording.items) == shape(old.items)
