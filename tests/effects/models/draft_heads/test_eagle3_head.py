from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from minfer.effects.models.architecture.draft_head import EAGLE3
from minfer.effects.models.architecture.layer_states import BEHIND_LAST
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.draft_heads.head_files import load_head, read_head
from minfer.effects.models.families.table import FAMILIES
from minfer.kernels.plain import normalise
from tests.effects.models.draft_heads.drafting_heads import HeadRun, assert_same_drafts
from tests.effects.tiny_eagle3 import TheirEagle3, save_by_speculators, save_eagle3
from tests.effects.tiny_families import config_of
from tests.effects.tiny_heads import WEIGHTS

TARGET = parse_spec(config_of("Qwen3"))
TARGET_WEIGHTS = random_weights(TARGET, "float32")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": TARGET.vocab_size},
    "of Qwen3": {"kind": "Qwen3"},
    "own embedding": {"embed": None},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norms before fc": {"fc_norm": True},
    "normed output": {"norm_output": True},
    "other layers": {"eagle_aux_hidden_state_layer_ids": [0, 3]},
}


def their_head(**options: Any) -> TheirEagle3:
    return TheirEagle3(**{"embed": TARGET_WEIGHTS.embed, **options})


def run_of(folder: Path, target: ModelSpec = TARGET) -> HeadRun:
    head = read_head(target, EAGLE3, folder)
    return HeadRun(target, TARGET_WEIGHTS, head, load_head(folder, target, head))


@pytest.mark.parametrize("save", [save_eagle3, save_by_speculators])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_eagle3_head_drafts_as_transformers_layer_does(
    variant: str, save: Any, tmp_path: Path
) -> None:
    theirs = their_head(**VARIANTS[variant])
    run = run_of(save(tmp_path, theirs))
    streams = torch.randn(20, theirs.fc.in_features)
    states = theirs.project(streams)
    torch.testing.assert_close(run.project(streams), states, rtol=1e-4, atol=1e-4)
    tokens = torch.randint(TARGET.vocab_size, (20,)).tolist()
    assert_same_drafts(run, theirs.draft, states, tokens)


@pytest.mark.parametrize(
    ("listed", "read", "by_speculators"),
    [
        (None, (2, 12, 21), (2, 12, 21)),
        ([3, 1, 1], (2, 4), (1, 3)),  # of SpecForge: behind these layers
        ([2, 24, 7], (2, 7, BEHIND_LAST), (2, 7, BEHIND_LAST)),
        ([1, 24], (1, BEHIND_LAST), (1, BEHIND_LAST)),
        ([0, 1], (0, 1), (0, 1)),
    ],
)
def test_layers_are_those_of_the_config_or_three(
    listed: list[int] | None,
    read: tuple[int, ...],
    by_speculators: tuple[int, ...],
    tmp_path: Path,
) -> None:
    deep = evolve(TARGET, layers=TARGET.layers * 8)
    gpt_oss = evolve(deep, family=FAMILIES["GptOssForCausalLM"])
    theirs, key = their_head(), "eagle_aux_hidden_state_layer_ids"

    def layers(folder: Path, target: ModelSpec = deep) -> tuple[int, ...]:
        return read_head(target, EAGLE3, folder).hidden_layers

    save_eagle3(tmp_path, theirs, **{key: listed})
    assert layers(tmp_path) == read
    assert layers(tmp_path, gpt_oss) == by_speculators
    save_eagle3(tmp_path, theirs, **{key: None, "eagle_config": {key: listed}})
    assert layers(tmp_path) == read
    save_by_speculators(tmp_path, theirs, **{key: listed})
    assert layers(tmp_path) == by_speculators


@pytest.mark.parametrize("save", [save_eagle3, save_by_speculators])
def test_a_head_may_read_the_last_hidden_state_alone(save: Any, tmp_path: Path) -> None:
    theirs = their_head(use_aux_hidden_state=False)
    run = run_of(save(tmp_path, theirs))
    assert run.head.hidden_layers == (BEHIND_LAST,)
    stream, tokens = torch.randn(9, 64), [*range(9)]
    states = run.project(stream)
    close_to = normalise(stream, TARGET_WEIGHTS.norm)
    torch.testing.assert_close(states, close_to, rtol=1e-5, atol=1e-5)
    assert_same_drafts(run, theirs.draft, states, tokens)


def test_a_head_may_be_wider_than_its_target(tmp_path: Path) -> None:
    target = parse_spec(config_of("Qwen3", hidden_size=32))
    theirs = TheirEagle3(target_hidden_size=32, fc_norm=True)
    run = run_of(save_eagle3(tmp_path, theirs), target)
    streams = torch.randn(9, 3 * 32)
    states, tokens = theirs.project(streams), [*range(9)]
    torch.testing.assert_close(run.project(streams), states, rtol=1e-4, atol=1e-4)
    assert_same_drafts(run, theirs.draft, states, tokens)
    save_eagle3(tmp_path, their_head(target_hidden_size=32))
    with pytest.raises(CheckpointError, match="hidden_size 64 and no embed_tokens"):
        run_of(tmp_path, target)


def test_a_config_of_the_authors_names_the_class_of_the_layer(tmp_path: Path) -> None:
    save_eagle3(tmp_path, their_head(), architectures=["LlamaForCausalLM"])
    assert run_of(tmp_path).head.draft_vocab_size == 40


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"vocab_size": 161}, "a vocabulary of 161.* has 160; use the head of this"),
        ({"target_hidden_size": 65}, "hidden states of 65.* has 64"),
        ({"num_hidden_layers": 2}, "of 2 layers; heads of one"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"draft_vocab_size": 161}, "draft_vocab_size must be at most"),
        ({"eagle_aux_hidden_state_layer_ids": [4]}, "a list of layers from 0 to 3"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm True"),
        ({"use_aux_hidden_state": 1}, "use_aux_hidden_state must be true or false"),
        ({"eagle_config": 3}, "eagle_config must be"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm must be"),
        ({"pard_token": 3}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "no EAGLE-3"),
        ({"speculators_model_type": "dflash"}, "'dflash' are not supported"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config must be"),
        ({"fc_norm": True}, "missing tensor fc_norm.0.weight"),
        ({"intermediate_size": 95}, "expected \\[95, 64\\]"),
        ({"attention_bias": True}, "missing tensor layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_head_of_another_model_or_kind_is_refused(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save_eagle3(tmp_path, their_head(), **changes)
    with pytest.raises(CheckpointError, match=fault):
        run_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("d2t", "missing tensor d2t"),
        ("lm_head.weight", "missing tensor lm_head.weight"),
        ("fc.weight", "missing tensor fc.weight"),
    ],
)
def test_a_head_without_a_tensor_is_refused(
    name: str, fault: str, tmp_path: Path
) -> None:
    path = save_eagle3(tmp_path, their_head()) / WEIGHTS
    save_file({k: v for k, v in load_file(path).items() if k != name}, path)
    with pytest.raises(CheckpointError, match=fault):
        run_of(tmp_path)


def test_tensors_of_other_parts_are_refused(tmp_path: Path) -> None:
    path = save_eagle3(tmp_path, their_head()) / WEIGHTS
    tensors = load_file(path)
    save_file(tensors | {"mask_hidden": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="unexpected tensor mask_hidden"):
        run_of(tmp_path)
    for ids in (torch.full_like(tensors["d2t"], 160), -torch.arange(40)):
        save_file(tensors | {"d2t": ids}, path)
        with pytest.raises(CheckpointError, match="d2t does not map"):
            run_of(tmp_path)


def test_targets_that_scale_are_refused(tmp_path: Path) -> None:
    save_eagle3(tmp_path, their_head())
    with pytest.raises(CheckpointError, match="scales embeddings"):
        run_of(tmp_path, evolve(TARGET, embedding_scale=2.0))
