"""The arguments of an application of Ray Serve."""

import sys
from typing import Any

import pytest

from minfer.effects.cli import ray_serve, serve
from minfer.effects.cli.ray_serve import build
from minfer.values.checks import ConfigError


def read(**given: Any) -> Any:
    parser = ray_serve._Parser(add_help=False, allow_abbrev=False)
    serve.add_options(parser)
    return parser.read(given)


def test_arguments_are_options_of_serve_typed_or_not() -> None:
    typed = read(model="m", max_num_seqs="8", enforce_eager="true", tool_parser="json")
    given = read(model="m", max_num_seqs=8, enforce_eager=True, tool_parser="json")
    assert typed == given
    assert (given.model, given.max_num_seqs, given.enforce_eager) == ("m", 8, True)
    other = read(enable_prefix_caching="false", dry_run=False, api_key=["a", "b"])
    assert (other.enable_prefix_caching, other.dry_run) == (False, False)
    assert other.api_key == ["a", "b"]
    named = read(served_model_name=["one", "two"], speculative_config={"method": "ngram"})
    assert named.served_model_name == ["one", "two"]
    assert named.speculative_config is not None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"replicas": 2}, "replicas is no option here: .* num_replicas"),
        ({"kv-nixl": True}, "kv-nixl is no option here: Ray Serve"),
        ({"port": None}, "port is no option here: Ray Serve"),
        ({"max_num_seqs": [8, 9]}, r"max_num_seqs takes one value, not \[8, 9\]"),
        ({"model": []}, "model takes one value"),
        ({"no_such": 1}, "there is no option 'no_such'"),
        ({"enforce_eager": "perhaps"}, "enforce_eager must be true or false"),
        ({"max_num_seqs": "many"}, "--max-num-seqs"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read(**given)


@pytest.mark.parametrize("given", [None, ["model"], {3: 4}])
def test_arguments_have_names(given: Any) -> None:
    with pytest.raises(ConfigError, match="options by their names"):
        build(given)


def test_every_option_that_is_taken_is_one_of_serve() -> None:
    parser = ray_serve._Parser(add_help=False)
    serve.add_options(parser)
    assert vars(parser.parse_args([])).keys() >= ray_serve.SERVER_OPTIONS


def test_a_new_option_of_serve_is_refused_until_it_is_taken() -> None:
    parser = ray_serve._Parser(add_help=False)
    serve.add_options(parser)
    parser.add_argument("--new", type=int)
    with pytest.raises(ConfigError, match="new is no option here"):
        parser.read({"new": 3})


def test_ray_serve_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ConfigError, match=r"\[ray-serve\]"):
        build({})


@pytest.mark.long  # Ray takes a second to import
def test_it_must_be_the_release_that_the_router_is_written_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray-serve is not installed")
    with pytest.raises(ConfigError, match="routing must be one of prefix"):
        build({"routing": "nearest"})
    for number in (0, True, "two", 1.5):
        with pytest.raises(ConfigError, match="fronts must be a whole number"):
            build({"fronts": number})
    monkeypatch.setattr(ray_serve, "version", lambda _: "2.61.0")
    with pytest.raises(ConfigError, match=r"Ray is 2\.61\.0, not 2\.60\.\*"):
        build({})
