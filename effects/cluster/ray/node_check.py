"""The check, on a node of a cluster, that an engine there can read the model."""

from minfer.effects.models.checkpoint.checkpoint import read_config
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.model_source import checkpoint_folder


def model_error(args: EngineArgs) -> str:
    """Returns why this node cannot read the model's configuration; empty if it can."""
    try:
        read_config(checkpoint_folder(args))
    except (ValueError, OSError) as error:
        return str(error)
    return ""
