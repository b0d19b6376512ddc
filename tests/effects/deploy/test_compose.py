"""The compose files: what is started, with which files, and who can reach it."""

import re
import shlex
from typing import Any

import pytest

from minfer.effects.cli.main import parser
from minfer.effects.cluster.processes.supervisor import END_SECONDS
from tests.effects.deploy.room import PORT, ROOM, option, read_yaml, stages

WHOLE = read_yaml("compose.yaml")
SERVICES: dict[str, Any] = WHOLE["services"]
MINFER = SERVICES["minfer"]
COMMAND = shlex.split(re.sub(r"\$\{MINFER_ARGS:-\}", "", MINFER["command"]))


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_the_server_is_started_with_options_that_it_has() -> None:
    options = parser().parse_args(COMMAND)
    assert (options.host, options.port) == ("0.0.0.0", PORT)  # noqa: S104  # inside
    more = shlex.split("--model Qwen/Qwen2.5-0.5B-Instruct")  # as its comment says
    assert parser().parse_args([*COMMAND, *more]).model == "Qwen/Qwen2.5-0.5B-Instruct"


def test_answers_may_end_before_it_is_killed() -> None:
    longest = int(option(COMMAND, "--shutdown-timeout"))
    assert seconds(MINFER["stop_grace_period"]) >= longest + END_SECONDS


def test_the_server_may_do_little() -> None:
    assert MINFER["read_only"] is True
    assert MINFER["cap_drop"] == ["ALL"]
    assert MINFER["security_opt"] == ["no-new-privileges:true"]
    assert MINFER["volumes"] == ["models:/models"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_listens_only_to_this_machine(name: str) -> None:
    for port in SERVICES[name]["ports"]:
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", SERVICES)
def test_images_have_versions(name: str) -> None:
    _, _, tag = SERVICES[name]["image"].partition(":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+(-cpu)?", tag)


@pytest.mark.parametrize("name", SERVICES)
def test_volumes_and_files_are_there(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOM / source).is_file(), source
            assert volume.endswith(":ro")
        else:
            assert source in WHOLE["volumes"]


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_it_builds_what_the_dockerfile_has(file: str) -> None:
    service = read_yaml(file)["services"]["minfer"]
    target = service["build"]["target"]
    assert target in stages()
    assert service["image"].endswith(f"-{target}")
    build = MINFER["build"]
    assert (ROOM / build["context"] / build["dockerfile"]).samefile(ROOM / "Dockerfile")


def test_the_second_file_adds_a_gpu() -> None:
    service = read_yaml("compose.gpu.yaml")["services"]["minfer"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert device["count"] == "${MINFER_GPUS:-1}"


def test_it_says_how_to_use_several_gpus() -> None:
    text = (ROOM / "compose.gpu.yaml").read_text("utf-8")
    said = re.search(r'MINFER_GPUS=(\d+) MINFER_ARGS="(.*)"', text)
    assert said
    options = parser().parse_args([*COMMAND, *shlex.split(said[2])])
    assert options.tensor_parallel_size == int(said[1]) > 1
    assert read_yaml("compose.gpu.yaml")["services"]["minfer"]["shm_size"] == "8gb"


def test_prometheus_asks_the_server_and_grafana_prometheus() -> None:
    (job,) = read_yaml("prometheus.yml")["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"minfer:{PORT}"]}]
    (source,) = read_yaml("grafana-datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in SERVICES["prometheus"]["ports"]


def test_grafana_finds_the_dashboard_where_it_looks() -> None:
    (provider,) = read_yaml("grafana-provider.yaml")["providers"]
    grafana = SERVICES["grafana"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert f"./grafana-dashboard.json:{home}:ro" in grafana["volumes"]
