"""A person at a terminal: line editing, and what Ctrl-C ends."""

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.effects.cli.test_chat import DRY, DRY_TEXT
from tests.effects.cli.test_chat import folder as folder


class Terminal:
    """A process with a terminal of its own, typed at and read as a person would."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minfer", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self, seconds: float) -> bool:
        """Take what there is; False if nothing came, or nothing more will."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other side is closed
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def expect(self, text: str, seconds: float = 20) -> str:
        """Read until `text` has come, and forget all up to its end; returns what came
        before.
        """
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} not in {self.seen[-500:]!r}"
            self.read(0.2)
        before, self.seen = self.seen.split(text, 1)
        return before

    def prompted(self) -> None:
        """Read the prompt, and give it the moment that a person takes.

        Python overlooks an interrupt between readline's prompt and its wait, until the
        next key.
        """
        self.expect("> ")
        time.sleep(0.3)

    def ends(self) -> int:
        """The exit code, once it has ended."""
        while self.read(1) and self.process.poll() is None:
            pass
        return self.process.wait(20)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)


@pytest.mark.long
def test_ctrl_c_ends_the_answer_and_not_the_program(folder: str) -> None:
    options = [
        "--num-gpu-blocks-override",
        "2000",
        "--max-num-seqs",
        "4",
        "--max-tokens",
        "0",
    ]
    with terminal(*DRY, "--model", folder, *options, "--stats") as person:
        person.expect("listens; /help tells more")
        person.prompted()
        for _ in range(2):
            person.type("hello\n")
            person.expect(DRY_TEXT)  # it streams: the answer has 100,000 tokens
            person.type("\x03\x03\x03")  # impatience does no harm
            person.expect("output  ")
            person.prompted()
        person.type("x" * 20 + "\x03")  # what was typed is dropped
        person.expect("Ctrl-C again leaves, as Ctrl-D does")
        person.prompted()
        person.type("/undo\n")
        person.prompted()
        person.type("\x03")
        person.expect("Ctrl-C again leaves")
        person.prompted()
        person.type("\x03")
        assert person.ends() == 130


@pytest.mark.long
def test_a_cut_answer_stays_in_the_conversation_and_ctrl_d_ends_it(folder: str) -> None:
    options = [
        "--num-gpu-blocks-override",
        "2000",
        "--max-num-seqs",
        "4",
        "--max-tokens",
        "0",
    ]
    with terminal(*DRY, "--model", folder, *options, "--stats") as person:
        person.prompted()
        person.type("hello\n")
        person.expect(DRY_TEXT)
        person.type("\x03")
        person.expect("output ")
        cut = int(person.expect(" tokens"))
        assert len(DRY_TEXT) <= cut < 99_000
        person.prompted()
        person.type("again\n")
        person.expect(DRY_TEXT)
        person.type("\x03")
        person.expect("prompt ")
        expected = len("<user>hello<assistant>") + cut + len("<user>again")
        assert int(person.expect(" tokens")[-8:]) == expected
        person.prompted()
        person.type("\x04")
        assert person.ends() == 0
