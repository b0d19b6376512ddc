"""Draft heads with random weights, for the tests beside this."""

from typing import Any

import torch
from attrs import evolve

from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.models.architecture.draft_head import HeadNames, HeadSpec
from minfer.effects.models.architecture.layer_states import BEHIND_LAST
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.draft_heads.eagle3_head import read_eagle3_head
from minfer.effects.models.draft_heads.head_weights import (
    HeadWeights,
    empty_head,
    head_parts,
)
from tests.effects.execution.tiny_engine import Model

DRAFTED_IDS = 61  # tokens that an EAGLE-3 head knows


def eagle3_of(spec: ModelSpec, **changes: Any) -> HeadSpec:
    """The sizes of an EAGLE-3 head, with fewer key heads than its target has."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": spec.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": DRAFTED_IDS,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, len(spec.layers)]},
        **changes,
    }
    return read_eagle3_head(spec, config)


def mtp_of(spec: ModelSpec) -> HeadSpec:
    """The sizes of an MTP head whose layer is like the target's last."""
    return HeadSpec(
        kind="mtp",
        hidden_size=spec.hidden_size,
        layer=spec.layers[-1],
        norms=spec.norms,
        names=HeadNames(
            projection="fc",
            embedding_norm="enorm",
            hidden_norm="hnorm",
            layer="layer.",
            norm="norm",
        ),
        hidden_layers=(BEHIND_LAST,),
        after_norm=True,
        target_hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        chains_normed=True,
    )


def drawn_head(head: HeadSpec, seed: int = 0, spread: float = 0.3) -> HeadWeights:
    """Random weights in float32."""
    weights, draw = empty_head(head, "float32"), torch.Generator().manual_seed(seed)
    for part in head_parts(head, weights):
        if not part.target.is_floating_point():
            ids = torch.randperm(head.vocab_size, generator=draw)[: len(part.target)]
            part.target.copy_(ids.sort().values)
        elif part.target.dim() > 1:
            part.target.normal_(std=spread, generator=draw)
        else:
            part.target.uniform_(0.5, 1.5, generator=draw)
    return weights


def with_head(model: Model, head: HeadSpec) -> Model:
    """The model with a head of these sizes."""
    return evolve(model, spec=evolve(model.spec, draft_head=head))


def loaded(head: HeadSpec, seed: int = 0) -> LoadedHead:
    """A head with random weights."""
    return LoadedHead(drawn_head(head, seed))
