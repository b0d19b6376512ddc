"""`minfer serve`: its options; what it serves is tested beside the server."""

from minfer.effects.cli.main import parser


def test_serve_takes_its_model_as_vllm_does() -> None:
    options = parser().parse_args(["serve", "org/name", "--port", "0"])
    assert options.model == "org/name"
    assert parser().parse_args(["serve", "--model", "x"]).model == "x"
    assert parser().parse_args(["serve"]).model is None
