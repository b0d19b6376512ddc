"""What the other rooms ask of this one, by one name: settings, and what they come to."""

from minfer.effects.setup.folders import bundled_folder as bundled_folder
from minfer.effects.setup.folders import model_folder as model_folder
from minfer.effects.setup.prepare import Setup as Setup
from minfer.effects.setup.prepare import prepare as prepare
from minfer.effects.setup.settings import EngineArgs as EngineArgs
from minfer.effects.setup.settings import engine_args as engine_args
