"""Secrets of the environment, which processes that do not read them do not have."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minfer.effects.net.secret_variables import (
    SECRET_VARIABLES,
    environment_without_secrets,
    remove_secrets,
)
from tests.circles import claimed, long
from tests.effects.serving.process_deaths import processes, server

READ = """
import os
from pathlib import Path
from minfer.effects.net.secret_variables import remove_secrets
remove_secrets()
if not os.fork():
    print(Path("/proc/self/environ").read_bytes())
else:
    os.wait()
    print(sorted(os.environ))
"""


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, f"secret-{name}")


def test_secrets_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(os.environ) - set(environment_without_secrets()) == set(SECRET_VARIABLES)
    monkeypatch.delenv(SECRET_VARIABLES[0])
    remove_secrets()
    assert set(os.environ) == set(environment_without_secrets())


@pytest.mark.long
def test_forked_processes_do_not_show_them() -> None:
    result = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "PATH" in result.stdout
    assert "secret-" not in result.stdout
    assert not any(name in result.stdout.splitlines()[1] for name in SECRET_VARIABLES)


def family(number: int) -> Iterator[int]:
    """A process, and all that it and its children have started."""
    yield number
    for child, process in processes().items():
        if process.parent == number:
            yield from family(child)


@pytest.mark.parametrize(
    "options",
    [
        *long([(("--dry-run", "--api-processes=1", "--preparers=2"),)]),
        *claimed([(("--api-processes=0", "--dry-run", "--preparers=2"),)]),
        *claimed([(("--replicas=2", "--dtype=float32", "--preparers=2"),)]),
        *claimed([(("--tensor-parallel-size=2", "--dtype=float32"),)]),
    ],
)
def test_no_process_of_a_server_has_a_secret(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINFER_SSL_KEYFILE_PASSWORD")  # it needs a key
    with server(*options) as served:
        numbers = set(family(served.process.pid))
        assert len(numbers) >= 3
        for number in numbers:
            environment = Path(f"/proc/{number}/environ").read_bytes()
            assert b"PATH=" in environment
            assert b"secret-" not in environment, processes()[number]
        url = f"{served.url}/v1/models"
        assert httpx.get(url).status_code == 401
        head = {"authorization": f"Bearer secret-{SECRET_VARIABLES[0]}"}
        assert httpx.get(url, headers=head).status_code == 200
