"""What a node of a cluster says of a model before an engine is started there."""

from minfer.effects.models.checkpoint import read_config
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder


def why_not(args: EngineArgs) -> str:
    """Returns why this machine cannot read the model of these settings, or nothing."""
    try:
        read_config(model_folder(args.model))
    except (ValueError, OSError) as error:
        return str(error)
    return ""
