"""The manifest: objects that fit each other, probes of paths that there are, and time to
end in.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import minfer
from minfer.effects.cli.main import parser
from minfer.effects.cluster.processes.supervisor import END_SECONDS
from tests.effects.deploy.room import (
    PORT,
    ROOM,
    USER,
    option,
    read_all_yaml,
    whole,
)
from tests.effects.served import Serving, serving

OBJECTS = read_all_yaml("kubernetes.yaml")
POD: dict[str, Any] = OBJECTS["Deployment"]["spec"]["template"]
SPEC: dict[str, Any] = POD["spec"]
(CONTAINER,) = SPEC["containers"]
PROBES = {
    name: CONTAINER[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")
}


def test_the_objects_fit_each_other() -> None:
    assert set(OBJECTS) == {"PersistentVolumeClaim", "Deployment", "Service"}
    labels = POD["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": PORT}
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
    mounted = {each["name"] for each in CONTAINER["volumeMounts"]}
    assert {each["name"] for each in SPEC["volumes"]} == mounted
    claim = SPEC["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert OBJECTS["PersistentVolumeClaim"]["metadata"]["name"] == claim


def test_it_is_started_with_options_that_it_has() -> None:
    options = parser().parse_args(CONTAINER["args"])
    assert (options.host, options.port) == ("0.0.0.0", PORT)  # noqa: S104  # inside
    variables = {each["name"] for each in CONTAINER["env"]}
    assert variables == {"MINFER_API_KEY", "HF_TOKEN"}


def test_it_may_do_little() -> None:
    pod = SPEC["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert {pod[who] for who in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    here = CONTAINER["securityContext"]
    assert here["readOnlyRootFilesystem"] is True
    assert here["allowPrivilegeEscalation"] is False
    assert here["capabilities"] == {"drop": ["ALL"]}
    # What is written goes where a volume is.
    paths = {each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert paths == {"/models", "/tmp", "/dev/shm"}  # noqa: S108  # volumes of its own
    settings = " ".join(whole("gpu").of("ENV"))
    assert {"HF_HOME=/models", "TRITON_CACHE_DIR=/models/triton"} <= set(settings.split())


def test_it_has_a_gpu_and_an_image_with_a_version() -> None:
    resources = CONTAINER["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 1
    assert {"cpu", "memory"} <= resources["requests"].keys()
    assert re.fullmatch(r"(\S+/)?minfer:(\S+)-gpu", CONTAINER["image"])
    assert f":{minfer.__version__}-" in CONTAINER["image"]


def test_several_gpus_need_more_arguments_and_shared_memory() -> None:
    text = (ROOM / "kubernetes.yaml").read_text("utf-8")
    more = yaml.safe_load("\n".join(re.findall(r"^#   (- .*)$", text, re.MULTILINE)))
    options = parser().parse_args([*CONTAINER["args"], *more])
    assert options.tensor_parallel_size > 1
    mounts = {each["mountPath"]: each["name"] for each in CONTAINER["volumeMounts"]}
    volumes = {each["name"]: each for each in SPEC["volumes"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]  # noqa: S108  # a volume of its own
    assert shared == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_probes_ask_what_they_mean() -> None:
    paths = {name: probe["httpGet"]["path"] for name, probe in PROBES.items()}
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    for probe in PROBES.values():
        assert probe["httpGet"]["port"] == "http"
    start = PROBES["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(executor="dry") as made:
        yield made


REQUESTED = {probe["httpGet"]["path"] for probe in PROBES.values()}


@pytest.mark.parametrize(
    "path", [*sorted(REQUESTED), POD["metadata"]["annotations"]["prometheus.io/path"]]
)
def test_what_is_queried_is_there(server: Serving, path: str) -> None:
    assert server.get(path).status_code == 200


def test_answers_may_end_before_it_is_killed() -> None:
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    longest = int(option(CONTAINER["args"], "--shutdown-timeout"))
    assert SPEC["terminationGracePeriodSeconds"] >= before + longest + END_SECONDS


def test_the_second_never_waits_for_the_first() -> None:
    """One GPU and one volume: the old one has to go before the new one can come."""
    assert OBJECTS["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert OBJECTS["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
