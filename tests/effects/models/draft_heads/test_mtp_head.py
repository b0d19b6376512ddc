from pathlib import Path
from typing import Any

import pytest
import torch

from minfer.effects.models.architecture.draft_head import MTP
from minfer.effects.models.checkpoint.checkpoint import load_weights, read_config
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.draft_heads.head_files import load_head, read_head
from minfer.effects.models.draft_heads.mtp_head import read_mtp_head
from tests.effects.models.draft_heads.drafting_heads import HeadRun, assert_same_drafts
from tests.effects.tiny_families import VARIANTS
from tests.effects.tiny_heads import NAMES, save_with_mtp
from tests.effects.tiny_model import read_spec

FIRST = dict(reversed([*VARIANTS]))  # the first variant of each family


def run_of(folder: Path) -> HeadRun:
    spec = read_spec(folder)
    head = read_head(spec, MTP, folder)
    weights = load_head(folder, spec, head)
    return HeadRun(spec, load_weights(folder, spec), head, weights)


@pytest.mark.parametrize("family", NAMES)
def test_an_mtp_head_drafts_as_transformers_layer_does(
    family: str, tmp_path: Path
) -> None:
    theirs = save_with_mtp(tmp_path, family, VARIANTS[family, FIRST[family]])
    tokens = torch.randint(160, (30,)).tolist()
    assert_same_drafts(run_of(tmp_path), theirs.draft, theirs.states(tokens), tokens)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_nextn_predict_layers": 0}, "no MTP head .*num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": None}, "no MTP head"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers must be"),
    ],
)
def test_a_config_without_an_mtp_head_is_refused(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path, "Glm4Moe", VARIANTS["Glm4Moe", FIRST["Glm4Moe"]])
    config = read_config(tmp_path) | changes
    with pytest.raises(CheckpointError, match=fault):
        read_mtp_head(read_spec(tmp_path), config)
