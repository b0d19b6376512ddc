"""GuideLLM and aiperf put load on a server, with the commands that `minfer bench` shows.

pip installs each into a virtual environment in pytest's cache, once.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from minfer.effects.cli.main import REMOVED
from minfer.effects.setup.folders import bundled_folder
from tests.effects.served import Serving, serving

pytestmark = pytest.mark.long
MODEL: Final = "Qwen/Qwen2.5-0.5B-Instruct"  # as the commands name it
URL: Final = "http://127.0.0.1:8000"  # likewise
REQUESTS, PROMPT, OUTPUT = 64, 512, 128  # likewise
INSTALL_SECONDS: Final = 900
RUN_SECONDS: Final = 300
TOKENIZER: Final = str(bundled_folder())
# Where one of these has a value, aiperf takes no tokenizer from a folder.
ONLINE: Final = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
COUNTER: Final = re.compile(r"^minfer_(\w+)_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(names=(MODEL,), executor="dry", num_gpu_blocks_override=1024) as server:
        yield server


def installed(config: pytest.Config, requirement: str) -> Path:
    """The folder of programs of an environment that has a package."""
    assert config.cache is not None
    folder = config.cache.mkdir("load_generators") / requirement
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # It also finds the packages of this environment, behind its own: torch, which
    # GuideLLM needs, is gigabytes.
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    command = [str(folder / "bin" / "pip"), "install", "--quiet", requirement]
    install = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if install.returncode:
        pytest.skip(f"pip cannot install {requirement}: {install.stderr[-500:]}")
    return folder / "bin"


def run(programs: Path, server: Serving, folder: Path, *options: str) -> None:
    """Run a program's command on a server, in a folder."""
    _, *texts = REMOVED["bench"].replace("\\\n", " ").split("\n\n")
    commands = map(shlex.split, texts)
    [words] = [command for command in commands if (programs / command[0]).exists()]
    words = [word.replace(URL, server.url) for word in words]
    result = subprocess.run(
        [str(programs / words[0]), *words[1:], *options],
        cwd=folder,
        env={**os.environ, **ONLINE},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert result.returncode == 0, (result.stdout[-3000:], result.stderr[-3000:])


def counts(server: Serving) -> dict[str, float]:
    """The server's counters, each the sum over its labels."""
    totals = dict[str, float]()
    for name, value in COUNTER.findall(server.get("/metrics").text):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def test_guidellm(
    server: Serving, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    programs = installed(request.config, "guidellm==0.8.1")
    tokenizer = f"kind=hf_auto,model={TOKENIZER}"
    output = "kind=json,path=found.json"
    run(programs, server, tmp_path, "--tokenizer", tokenizer, "--output", output)
    report = json.loads((tmp_path / "found.json").read_text("utf-8"))
    metrics = report["benchmarks"][0]["metrics"]
    ends = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["request_totals"] == ends
    tokens = {
        name: metrics[f"{name}_token_count"]["successful"]["total_sum"]
        for name in ("prompt", "output")
    }
    check_counts(server, tokens["prompt"], tokens["output"])


def test_aiperf(server: Serving, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    programs = installed(request.config, "aiperf==0.13.0")
    folder = tmp_path / "found"
    run(
        *(programs, server, tmp_path, "--tokenizer", TOKENIZER),
        *("--output-artifact-dir", str(folder), "--ui", "none"),
    )
    report = read(folder, "profile_export_aiperf.json")
    assert report["completed_request_count"]["avg"] == REQUESTS
    assert report["request_error_rate"]["avg"] == 0
    tokens = [
        report[f"total_usage_{kind}_tokens"]["avg"] for kind in ("prompt", "completion")
    ]
    check_counts(server, *tokens)
    # It reads the server's metrics, too.
    names = read(folder, "server_metrics_export.json")["metrics"]
    assert {"minfer_generation_tokens", "minfer_time_to_first_token_seconds"} <= {*names}


def read(folder: Path, name: str) -> Any:
    [path] = folder.rglob(name)
    return json.loads(path.read_text("utf-8"))


def check_counts(server: Serving, prompt: float, output: float) -> None:
    """Whether the server counted as many tokens, and no request that failed."""
    totals = counts(server)
    assert totals["request_success"] == REQUESTS
    assert totals["prompt_tokens"] == prompt
    assert totals["generation_tokens"] == output == REQUESTS * OUTPUT
    assert prompt >= REQUESTS * PROMPT  # a chat template adds some
