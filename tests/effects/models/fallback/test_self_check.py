"""Models that do not say the same when paged are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.fallback import load_fallback, loading
from minfer.effects.models.fallback.self_check import self_check
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from tests.effects.tiny_fallback import save


@pytest.mark.long
@pytest.mark.parametrize("kind", ["olmo2", "olmoe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_checked_in_float32_and_left_as_it_was(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    setup = prepare(EngineArgs(model=str(tmp_path), dtype=dtype, executor="dry"))
    models: list[Any] = []
    real = self_check

    def check(spec: Any, model: Any, make_cache: Any) -> float:
        models.append(model)
        error = real(spec, model, make_cache)
        assert error < 1e-4  # far below what roundings of half precision do
        return error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "self_check", check)
        load_fallback(tmp_path, read_config(tmp_path), setup.spec, make_cache)
    assert {str(p.dtype) for p in models[0].parameters()} == {f"torch.{dtype}"}


def test_windows_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    """Longer ones than the check's sequences, too."""
    for stated in (8, 64):
        folder = tmp_path / str(stated)
        save(folder, "cohere2", sliding_window=stated)
        spec = prepare(EngineArgs(model=str(folder), executor="dry")).spec
        assert stated in spec.windows
        load_fallback(folder, read_config(folder), spec, make_cache)
        for wrong in (None, stated - 1, stated + 1):
            attention = spec.layers[1].attention
            assert isinstance(attention, GQA)
            changed = evolve(spec.layers[1], attention=evolve(attention, window=wrong))
            wrong_spec = evolve(spec, layers=(spec.layers[0], changed, *spec.layers[2:]))
            with pytest.raises(UnsupportedModelError, match="its logits differ"):
                load_fallback(folder, read_config(folder), wrong_spec, make_cache)


def ignore_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        del position_ids
        return forward(self, *args, **kwargs)

    return call


def mix_neighbours(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Every token also sees its predecessor in the packed batch, past attention."""

    def call(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, ids, *args, **kwargs)
        return out + out.roll(1, -2)

    return call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("owner", "change"),
    [
        (transformers.GPTNeoXModel, ignore_positions),
        (torch.nn.Embedding, mix_neighbours),
    ],
)
def test_a_model_that_does_not_say_the_same_when_paged_is_refused(
    owner: Any, change: Any, dtype: str, neox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepare(EngineArgs(model=str(neox), dtype=dtype, executor="dry"))
    monkeypatch.setattr(owner, "forward", change(owner.forward))
    with pytest.raises(
        UnsupportedModelError, match="with paged attention its logits differ"
    ):
        load_fallback(neox, read_config(neox), setup.spec, make_cache)
