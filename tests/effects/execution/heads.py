"""Draft heads with random weights, for the tests beside this."""

from copy import deepcopy
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
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
from minfer.effects.models.architecture.weights import empty_weights, named_parts
from minfer.effects.models.draft_heads.eagle3_head import read_eagle3_head
from minfer.effects.models.draft_heads.head_weights import (
    DraftHeadWeights,
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


def drawn_head(head: HeadSpec, seed: int = 0, spread: float = 0.3) -> DraftHeadWeights:
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


class Reference(Protocol):
    """A head in plain torch, which computes all from the whole sequence."""

    def states(self, tokens: list[int]) -> Tensor:
        """What it reads of the target [1, tokens, hidden]."""

    def layer(self, states: Tensor, embeds: Tensor) -> Tensor:
        """Its own states [1, tokens, hidden]: `states` are before each token."""

    def best(self, states: Tensor) -> int:
        """The likeliest token after the last of its own states."""


@define
class Eagle3Reference:
    """An EAGLE-3 head: that of bench/train_head.py, with the weights of ours."""

    model: Model
    head: Eagle3

    @classmethod
    def of(
        cls, model: Model, spec: HeadSpec, weights: DraftHeadWeights
    ) -> "Eagle3Reference":
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

    def states(self, tokens: list[int]) -> Tensor:
        """The projection of three streams, the last of which theirs normalises."""
        theirs, ids = self.model.theirs, torch.tensor([tokens])
        streams = list[Tensor]()
        layer = theirs.model.layers[-1]
        hook = layer.register_forward_hook(lambda *args: streams.append(args[2]))
        out = theirs(ids, output_hidden_states=True, use_cache=False)
        hook.remove()
        projected: Tensor = self.head.fc(
            torch.cat([*out.hidden_states[:2], *streams], -1)
        )
        return projected

    def layer(self, states: Tensor, embeds: Tensor) -> Tensor:
        """The layer, at once for all tokens."""
        return self.head.layer(states, embeds, [])

    def best(self, states: Tensor) -> int:
        """Of its own vocabulary."""
        return int(self.head.ids[self.head.logits(states)[0, -1].argmax()])


@define
class MtpReference:
    """An MTP head whose layer is a layer of transformers."""

    model: Model
    theirs: Any  # the layer
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, model: Model, spec: HeadSpec, weights: DraftHeadWeights
    ) -> "MtpReference":
        """With the weights of ours."""
        tensors = {part.name: part.target for part in head_parts(spec, weights)}
        layer: Any = deepcopy(model.theirs.model.layers[-1])
        own = {name: tensors[f"layer.{name}"] for name in layer.state_dict()}
        layer.load_state_dict(own)
        return cls(model, layer, tensors)

    def states(self, tokens: list[int]) -> Tensor:
        """The last stream, normalised."""
        base = self.model.theirs.model
        out: Tensor = base(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return out

    def layer(self, states: Tensor, embeds: Tensor) -> Tensor:
        """The layer behind the projection, and the norm behind it."""
        pair = self._norm(embeds, "enorm"), self._norm(states, "hnorm")
        x = F.linear(torch.cat(pair, -1), self.tensors["fc.weight"])
        count = x.shape[1]
        turns = self.model.theirs.model.rotary_emb(x, torch.arange(count)[None])
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        out = self.theirs(x, attention_mask=mask, position_embeddings=turns)
        return self._norm(out, "norm")

    def best(self, states: Tensor) -> int:
        """Of the target's vocabulary."""
        return int(self.model.theirs.lm_head(states)[0, -1].argmax())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], 1e-6)


@torch.no_grad()
def reference_drafts(
    reference: Reference, model: Model, tokens: list[int], count: int
) -> list[int]:
    """What a head drafts behind tokens, greedily."""
    states, drafts = delayed(reference.states(tokens)), list[int]()
    for _ in range(count):
        ids = torch.tensor([[*tokens, *drafts]])
        own = reference.layer(states, model.theirs.get_input_embeddings()(ids))
        drafts.append(reference.best(own))
        states = torch.cat((states, own[:, -1:]), 1)
    return drafts


def repeating(model: Model) -> Model:
    """The model with layers that say little: the next token hangs on the last."""
    theirs, weights = deepcopy(model.theirs), empty_weights(model.spec, "float32")
    for name, tensor in theirs.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.15)
        if name.endswith("embed_tokens.weight"):
            tensor.mul_(10)
    for name, target in named_parts(model.spec, weights):
        target.copy_(theirs.state_dict()[name])
    return evolve(model, theirs=theirs, weights=weights)


def echoing(spec: HeadSpec) -> DraftHeadWeights:
    """A random MTP head that drafts mostly what `repeating` models say."""
    weights = drawn_head(spec)
    hidden, factor = spec.hidden_size, weights.embedding_norm.weight
    assert weights.projection is not None
    weights.projection.weight.mul_(0.05)
    weights.projection.weight[:, :hidden] += torch.eye(hidden) / factor
    for part in head_parts(spec, weights):
        if part.name.endswith(("o_proj.weight", "down_proj.weight")):
            part.target.mul_(0.05)
    assert weights.norm is not None
    weights.norm.weight.fill_(1)
    return weights
