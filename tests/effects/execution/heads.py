"""Draft heads with random weights, for the tests beside this."""

from typing import Any

import pytest
import torch
from attrs import define, evolve
from torch import Tensor
from transformers import LlamaConfig

from bench.train_head import Eagle3, delayed
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import DraftWords
from minfer.effects.execution.running.batch_builder import StepRows
from minfer.effects.execution.running.draft_head import DraftHead
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.execution.running.rejection_sampling import DraftProposal
from minfer.effects.execution.running.sampler import Sampler
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


@define
class Noted:
    """Drafts of one row: the tokens up to its last one, and what was drafted behind."""

    prompt: tuple[int, ...]
    position: int  # of the row's last token
    drafts: list[int]


def note_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Have what heads draft noted."""
    noted, propose = list[Noted](), DraftHead.propose

    def noting(
        self: DraftHead,
        shape: StepShape,
        step: StepRows,
        drafts: DraftWords[Tensor],
        sampler: Sampler,
    ) -> list[DraftProposal]:
        rows = self.batch_builder.rows
        nexts, proposals = rows.next.clone(), propose(self, shape, step, drafts, sampler)
        for place, row in enumerate(step.decode_rows[: shape.verified].tolist()):
            owner, count = rows.owners[row], int(drafts.counts[place])
            tokens = [int(proposal.tokens[place]) for proposal in proposals[:count]]
            if owner is not None and tokens:
                noted.append(Noted(tuple(owner.known), int(nexts[row]), tokens))
        return proposals

    monkeypatch.setattr(DraftHead, "propose", noting)
    return noted


@define
class Reference:
    """An EAGLE-3 head in plain torch, which computes all from the whole sequence."""

    model: Model
    head: Eagle3

    @classmethod
    def of(cls, model: Model, spec: HeadSpec, weights: HeadWeights) -> "Reference":
        """With the weights of ours."""
        config: Any = LlamaConfig(
            hidden_size=spec.hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=1,
        )
        assert weights.target_ids is not None
        head = Eagle3(config, weights.target_ids)
        names = {part.name: part.target for part in head_parts(spec, weights)}
        for name, parameter in head.named_parameters():
            parameter.data.copy_(names[name.replace("midlayer.", "layers.0.")])
        return cls(model, head)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What follows the tokens, greedily."""
        head, theirs = self.head, self.model.theirs
        out = theirs(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        # Theirs normalises the last one.
        read = [*out.hidden_states[:2], self._behind_last(tokens)]
        states = delayed(head.fc(torch.cat(read, -1)))
        drafts = list[int]()
        for _ in range(count):
            embeds = theirs.get_input_embeddings()(torch.tensor([[*tokens, *drafts]]))
            own = head.layer(states, embeds, [])
            drafts.append(int(head.ids[head.logits(own)[0, -1].argmax()]))
            states = torch.cat((states, own[:, -1:]), 1)
        return drafts

    def _behind_last(self, tokens: list[int]) -> Tensor:
        streams = list[Tensor]()
        layer = self.model.theirs.model.layers[-1]
        hook = layer.register_forward_hook(lambda *args: streams.append(args[2]))
        self.model.theirs(torch.tensor([tokens]), use_cache=False)
        hook.remove()
        return streams[0]
