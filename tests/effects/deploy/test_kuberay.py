"""The manifests for KubeRay: options that there are, a Ray that the image has, and pods
that fit what runs in them.
"""

import shlex
import tomllib
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import minfer
from minfer.effects.cli.main import parser
from tests.effects.deploy.room import PORT, ROOT, USER, read_all_yaml, whole

JOB = read_all_yaml("kuberay-job.yaml")
CLUSTERS = {
    "job": JOB["RayJob"]["spec"]["rayClusterSpec"],
}
EVERY_CLUSTER = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of the head and of the engines."""
    (workers,) = cluster["workerGroupSpecs"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]


@EVERY_CLUSTER
def test_the_image_has_this_minfer_and_this_ray(cluster: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["ray"]
    assert SpecifierSet(requirement.removeprefix("ray")).contains(cluster["rayVersion"])
    for pod in pods(cluster):
        (container,) = pod["containers"]
        assert container["image"] == f"minfer:{minfer.__version__}-gpu"
    assert "wget" in " ".join(whole("gpu").of("RUN"))  # of KubeRay's probes


@EVERY_CLUSTER
def test_engines_have_a_gpu_and_all_the_model(cluster: dict[str, Any]) -> None:
    head, engine = pods(cluster)
    limits = [pod["containers"][0]["resources"]["limits"] for pod in (head, engine)]
    assert [limit.get("nvidia.com/gpu") for limit in limits] == [None, 1]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for pod in (head, engine):
        assert pod["securityContext"]["runAsUser"] == USER
        mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
        assert mounts["models"]["mountPath"] == "/models"


def test_the_job_has_options_that_there_are_and_a_pod_for_each_engine() -> None:
    spec = JOB["RayJob"]["spec"]
    options = parser().parse_args(shlex.split(spec["entrypoint"])[1:])
    assert (options.distributed, options.device) == ("ray", "cuda")
    assert (options.host, options.port) == ("0.0.0.0", PORT)  # noqa: S104  # inside
    assert options.model.startswith("/models/")
    (workers,) = CLUSTERS["job"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == options.replicas
    service = JOB["Service"]["spec"]
    head = CLUSTERS["job"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["selector"] == head
    assert service["ports"][0]["targetPort"] == options.port
