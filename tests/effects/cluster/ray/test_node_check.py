"""What a node says of a model before an engine is started there."""

from pathlib import Path

from minfer.effects.cluster.ray.engine_plan import with_absolute_paths
from minfer.effects.cluster.ray.node_check import model_error
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.speculation_settings import SpeculativeConfig


def test_a_model_that_is_not_there_is_named() -> None:
    assert model_error(EngineArgs()) == ""
    assert "/nowhere/model" in model_error(EngineArgs(model="/nowhere/model"))


def test_paths_do_not_depend_on_the_folder_of_a_process() -> None:
    relative = EngineArgs(
        model=".",
        speculative_config={"model": "."},
        journal="journals",
        kv_disk="blocks",
    )
    args = with_absolute_paths(relative)
    drafts = args.speculative_config
    assert isinstance(drafts, SpeculativeConfig)
    for path in (args.model, drafts.model, args.journal, args.kv_disk):
        assert path is not None
        assert Path(path).is_absolute()
    assert with_absolute_paths(EngineArgs(model="org/name")).model == "org/name"
