"""A benchmark's worker with the core of any tree of the repository: two trees in one
comparison.

A worker is a process that imports `minfer` and the benchmark's script from one tree: the
script has to know where that tree has its modules, so it must not measure otherwise than
this one's. It answers a call, one line of JSON, with another. While it is not asked it
does nothing: two workers asked in alternation share the machine's noise.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

HERE = Path(__file__).resolve().parents[1]


class EngineWorker:
    """A process that runs `python -m module --serve` with the core of `tree`."""

    def __init__(self, tree: Path, module: str) -> None:
        self.folder = TemporaryDirectory()
        path = Path(self.folder.name)
        (path / "minfer").symlink_to(tree.resolve() / "minfer")
        (path / "bench").symlink_to(tree.resolve() / "bench")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--serve"],
            cwd=path,
            env={**os.environ, "PYTHONPATH": str(path), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, question: str, **arguments: Any) -> Any:
        """Ask for `question`; raises RuntimeError if the worker has ended."""
        pipes = self.process.stdin, self.process.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("a worker without pipes")
        pipes[0].write(json.dumps([question, arguments]) + "\n")
        pipes[0].flush()
        line = pipes[1].readline()
        if not line:
            raise RuntimeError(f"the worker has ended while asked for {question}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def serve(answers: dict[str, Callable[..., Any]]) -> None:
    """Be a worker: answer calls by name until there are no more."""
    for line in sys.stdin:
        question, arguments = json.loads(line)
        print(json.dumps(answers[question](**arguments)), flush=True)
