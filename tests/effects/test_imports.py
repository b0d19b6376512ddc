"""What imports what, and how long it takes: `import minfer` and `--help` load nothing
heavy.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.effects.tiny_model import write_checkpoint

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "tqdm",
    "llguidance",
    "starlette",
    "aiohttp",
    "pydantic",
}
# The promises are 0.15 s and 0.4 s on an idle machine. A test may run beside others on a
# busy one, where everything takes several times as long; a torch import would still be
# far beyond.
SLACK = 4.0


def loaded_by(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after running `code`."""
    program = (
        f"import sys\n{code}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return HEAVY & set(result.stdout.splitlines()[-1].split())


def seconds(*arguments: str) -> float:
    """Least time of a fresh interpreter with these arguments."""
    times = []
    for _ in range(5):
        started = time.monotonic()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        times.append(time.monotonic() - started)
    return min(times)


@pytest.mark.long
def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import minfer") == set()
    modules = (
        "minfer.engine",
        "minfer.effects.live.engine.driver",
        "minfer.simulation.oracle",
    )
    assert loaded_by(f"import {', '.join(modules)}") == set()


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["plan", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
from minfer.effects.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
"""
    assert loaded_by(code) == set()


def test_commands_without_a_model_load_little() -> None:
    """One after the other, in one process."""
    code = """
import minfer.effects.runs.view_command
from minfer.effects.cli.main import main
assert main(["simulate", "poisson:rate=12,requests=20,prompt=700,output=30"]) == 0
assert main(["status", "http://127.0.0.1:9"]) == 2
"""
    assert loaded_by(code) <= {"jinja2", "tokenizers", "tqdm"}


@pytest.mark.long
def test_a_memory_plan_loads_nothing_heavy(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path))
    code = (
        f"from minfer.effects.cli.main import main\nmain(['plan', '--model', {folder!r}])"
    )
    assert loaded_by(code) == set()


@pytest.mark.long
def test_generating_loads_no_transformers_and_no_grammars(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path))
    code = f"""
from minfer import LLM, SamplingParams
with LLM({folder!r}, num_gpu_blocks_override=64) as llm:
    llm.generate("a", SamplingParams(max_tokens=2))
"""
    loaded = loaded_by(code)
    assert "torch" in loaded
    # torch itself loads tqdm.
    assert not {"transformers", "jinja2", "llguidance"} & loaded


@pytest.mark.long
def test_a_constraint_loads_the_library_of_grammars() -> None:
    code = """
from minfer import LLM, SamplingParams, StructuredOutputs
with LLM(executor="oracle") as llm:
    choice = StructuredOutputs(choice=["yes"])
    llm.generate("a", SamplingParams(max_tokens=2, structured_outputs=choice))
"""
    assert "llguidance" in loaded_by(code)


@pytest.mark.long
def test_importing_takes_little_more_than_an_interpreter() -> None:
    bare = seconds("-c", "pass")
    assert seconds("-c", "import minfer") - bare < 0.15 * SLACK


@pytest.mark.long
def test_help_is_quick() -> None:
    assert seconds("-m", "minfer", "--help") < 0.4 * SLACK
