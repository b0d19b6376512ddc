"""A checkpoint by itself, as `minfer verify` checks it."""

import shutil
from pathlib import Path

from minfer.effects.cli.verify import checkpoint_checks
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer


def test_ids_are_those_of_the_tokenizer_that_is_loaded(tmp_path: Path) -> None:
    """The folder has none."""
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(bundled_folder() / name, tmp_path / name)
    spec = prepare(EngineArgs(executor="dry")).spec
    tokenizer = Tokenizer(bundled_folder())
    assert tokenizer.largest_id == spec.vocab_size - 1
    assert checkpoint_checks.check_ids(tmp_path, tokenizer, spec).state == "pass"
