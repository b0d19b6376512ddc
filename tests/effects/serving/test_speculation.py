"""`minfer serve --speculative-config`: clients get what they get without, and operators
see what becomes of drafts.
"""

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minfer.effects.cli.main import main
from tests.effects.served import Serving, events
from tests.effects.serving.test_server import process

CONFIG = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}
REQUESTED: tuple[dict[str, Any], ...] = (
    {"prompt": "import os\nimport ", "temperature": 0, "max_tokens": 40},
    {"prompt": "def read(self", "temperature": 1, "seed": 7, "max_tokens": 40, "n": 2},
    {"prompt": "class Node:", "temperature": 0.8, "seed": 3, "stop": ["\n\n"]},
)


def streamed(url: str, body: dict[str, Any]) -> dict[int, str]:
    """The text of each choice of a completion, put together from its stream."""
    texts = dict[int, str]()
    post = f"{url}/v1/completions"
    with httpx.stream("POST", post, json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for event in events(answer.iter_lines()):
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
    return texts


def metrics(url: str) -> dict[str, dict[str, float]]:
    """What is said of drafts: values by the place that they are of, or by nothing."""
    by_name = dict[str, dict[str, float]]()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if "spec_decode" in sample.name:
                name = sample.name.removeprefix("minfer_spec_decode_")
                place = sample.labels.get("position", "")
                by_name.setdefault(name, {})[place] = sample.value
    return by_name


@pytest.mark.long
def test_clients_get_what_they_get_without(bundled: Serving) -> None:
    plain = [streamed(bundled.url, body) for body in REQUESTED]
    options = ("--speculative-config", json.dumps(CONFIG), "--dtype", "float32")
    with process(*options, "--num-gpu-blocks-override", "128") as (_, url):
        assert [streamed(url, body) for body in REQUESTED] == plain
        by_name = metrics(url)
    assert all(text for texts in plain for text in texts.values())
    drafts = by_name["num_drafts_total"][""]
    proposed = by_name["num_draft_tokens_total"][""]
    accepted = by_name["num_accepted_tokens_total"][""]
    assert 0 < accepted < proposed <= 3 * drafts
    by_place = by_name["num_accepted_tokens_per_pos_total"]
    assert [*by_place] == ["0", "1", "2"]
    assert sum(by_place.values()) == accepted
    assert by_place["0"] >= by_place["1"] >= by_place["2"] > 0
    length = by_name["mean_acceptance_length"][""]
    assert length == pytest.approx(1 + accepted / drafts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 64"),
        ('{"method": "eagle3"}', "eagle3 needs a model"),
        ('{"method": "medusa", "model": "x"}', "not supported; choose one of"),
        ('{"method": "draft_model", "model": "/no/such/draft"}', "/no/such/draft"),
        ('{"method": "ngram", "tokens": 4}', "no key of it"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    config: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--speculative-config", config]) == 2
    assert message in capfd.readouterr().err


def test_what_is_no_object_is_refused_by_the_command_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--speculative-config", "ngram"])
    assert "not JSON" in capfd.readouterr().err
