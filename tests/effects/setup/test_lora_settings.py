"""Words of the command line about adapters."""

import json
from pathlib import Path

import pytest

from minfer.effects.setup.lora_settings import (
    LoraModule,
    read_folders,
    read_hub_names,
    read_modules,
)
from minfer.values.checks import ConfigError


def test_modules_are_pairs_or_objects() -> None:
    objects = [{"name": "c", "path": "p", "base_model_name": "base"}]
    words = ["a=path/to=a", '{"name": "b", "path": "org/b"}', json.dumps(objects)]
    assert read_modules(words) == (
        LoraModule("a", "path/to=a"),
        LoraModule("b", "org/b"),
        LoraModule("c", "p", "base"),
    )
    assert read_modules(objects) == read_modules(words)[2:]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a"], "'a' is not like NAME=PATH, nor a JSON object"),
        (["a="], "'a=' is not like NAME=PATH"),
        (["=p"], "an adapter cannot have the name ''"),
        (["../a=p"], "an adapter cannot have the name '../a'"),
        (["a=p", "a=q"], "two adapters have the name 'a'"),
        (["{"], "not JSON"),
        (["[" * 100_000], "not JSON"),
        (["[1]"], "an adapter must be a JSON object"),
        (['{"name": "a"}'], "an adapter needs a path, as a text"),
        (['{"name": "a", "path": "p", "rank": 1}'], "an adapter has no field 'rank'"),
        (['{"name": "a", "path": "p", "base_model_name": 1}'], "base_model_name must be"),
    ],
)
def test_a_wrong_module_is_named(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_modules(words)
    assert f"--lora-modules: {reason}" in str(error.value)


def test_folders_have_no_links_in_their_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert read_folders([str(tmp_path / "link")]) == ((tmp_path / "real").resolve(),)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").touch()
    paths = [str(tmp_path / name) for name in ("circle", "file")]
    for path in ("/nowhere", *paths, "a\0", "~nobody-has-this-name/x"):
        with pytest.raises(ConfigError, match=r"--lora-folders: '.*' is no folder"):
            read_folders([path])


def test_names_of_the_hub_have_revisions() -> None:
    assert read_hub_names(["a=org/name@v1.0"]) == {"a": "org/name@v1.0"}
    for word in ("a=org/name", "a=name@v1", "org/name@v1", "a=org/../name@v1", "a=@v"):
        with pytest.raises(ConfigError, match="is not like NAME=ORG/REPOSITORY@REVISION"):
            read_hub_names([word])
    with pytest.raises(ConfigError, match="--lora-hub: an adapter cannot have the name"):
        read_hub_names(["a b=org/name@v1"])
