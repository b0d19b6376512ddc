"""The Dockerfile: what it is made from, who runs in it, and that it needs no more than
it copies.
"""

import fnmatch
import json
import re
import tomllib

import pytest

import minfer
from minfer.effects.cli.main import parser
from tests.effects.deploy.room import PORT, ROOM, ROOT, USER, stages, whole

IMAGES = ("cpu", "gpu")
BUILDS = ("build-cpu", "build-gpu")


@pytest.mark.parametrize("name", IMAGES)
def test_no_process_runs_as_root(name: str) -> None:
    stage = whole(name)
    assert stage.of("USER")[-1] == f"{USER}:{USER}"
    commands = " ".join(stage.of("RUN"))
    assert f"--gid {USER} minfer" in commands
    assert f"--uid {USER} --gid {USER}" in commands
    assert f"install -d -o {USER} -g {USER} /models" in commands


@pytest.mark.parametrize("name", IMAGES)
def test_a_container_serves_by_default(name: str) -> None:
    stage = whole(name)
    (entry,) = map(json.loads, stage.of("ENTRYPOINT"))
    (command,) = map(json.loads, stage.of("CMD"))
    assert entry == ["minfer"]
    options = parser().parse_args(command)
    assert (options.host, options.port) == ("0.0.0.0", PORT)  # noqa: S104  # inside
    assert stage.of("EXPOSE") == [str(PORT)]
    assert stage.of("VOLUME") == ["/models"]
    assert "HF_HOME=/models" in " ".join(stage.of("ENV"))


@pytest.mark.parametrize("name", IMAGES)
def test_its_health_is_probed_where_it_listens(name: str) -> None:
    (check,) = whole(name).of("HEALTHCHECK")
    program = json.loads(check.split(" CMD ")[1])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{PORT}/health'" in program[2]


def test_base_images_are_pinned_and_one() -> None:
    bases = {stage.image for stage in stages().values()} - stages().keys()
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", bases.pop())


def test_nothing_is_left_of_what_an_image_was_built_with() -> None:
    for name in IMAGES:
        stage = stages()[name]
        copied = f"--from=build-{name} /opt/minfer /opt/minfer"
        assert stage.of("COPY") == [copied]
        for run in stage.of("RUN"):
            if "apt-get install" in run:
                assert "--no-install-recommends" in run
                assert run.endswith("rm -rf /var/lib/apt/lists/*")
    assert next(reversed(stages())) == "cpu"  # what a build without a target makes


@pytest.mark.parametrize("name", BUILDS)
def test_another_commit_installs_dependencies_from_the_cache(name: str) -> None:
    words = [(step.word, step.rest) for step in stages()[name].steps]
    code = words.index(("COPY", "minfer minfer"))
    before = " ".join(rest for word, rest in words[:code] if word == "RUN")
    after = " ".join(rest for word, rest in words[code:] if word == "RUN")
    assert ".txt" in before
    assert ".txt" not in after
    copied = {rest.split()[0] for word, rest in words[:code] if word == "COPY"}
    assert copied <= {"pyproject.toml", "README.md"}


def test_a_cpu_needs_no_cuda() -> None:
    installs = " ".join(stages()["build-cpu"].of("RUN"))
    assert "--index-url https://download.pytorch.org/whl/cpu -r torch.txt" in installs
    assert "all.txt" not in installs
    assert "--no-deps ." in installs  # which would ask for Triton


def test_the_requirements_are_minfers_own() -> None:
    """The lines of pyproject.toml are divided by the words that the Dockerfile looks
    for.
    """
    (divide,) = whole("build").of("RUN")
    assert "grep '^torch' all.txt > torch.txt" in divide
    assert "grep -v -e '^torch' -e '^triton' all.txt > others.txt" in divide
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]  # type: ignore[index]  # else: fails
    assert [name for name in names if name.startswith("torch")] == ["torch"]
    assert [name for name in names if name.startswith("triton")] == ["triton"]
    assert "flash" in project["optional-dependencies"]  # what EXTRAS is for


def test_what_is_copied_is_there_and_not_ignored() -> None:
    rules = (ROOM / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    lines = [line for line in rules if line and not line.startswith("#")]
    assert lines[0] == "*"
    patterns = [line.removeprefix("!") for line in lines if line.startswith("!")]
    for name in BUILDS:
        for copy in whole(name).of("COPY"):
            *sources, _ = copy.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(source, pattern) for pattern in patterns), (
                    source
                )


def test_images_are_named_after_this_version() -> None:
    for name in ("Dockerfile", "README.md", "compose.yaml", "kubernetes.yaml"):
        versions = re.findall(r"\bminfer:(\S+?)-(?:cpu|gpu)\b", (ROOM / name).read_text())
        assert set(versions) == {minfer.__version__}, name
