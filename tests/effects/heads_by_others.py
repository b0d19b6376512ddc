"""Draft heads beside modules of others, in float32: logits.

Runs in an environment of its own, which has `speculators` beside minfer, and with the
folder `vllm` of vLLM's source distribution.

- speculators: EAGLE-3 heads that it writes, and that minfer reads from these files; and
  MTP heads of Qwen3-Next and Qwen3.5, which it reads from the checkpoints that minfer
  reads.
- vLLM: the `forward` functions of its MTP heads (vllm_files.py), around decoder layers of
  transformers, as vLLM's own layers need a GPU.

Each head drafts behind every token of a sequence, and then a chain of tokens behind the
last one; a row has the largest difference of logits, as a part of the largest logit.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import transformers
from attrs import frozen
from torch import Tensor, nn

from bench.results import run, show
from minfer.effects.models.architecture.draft_head import EAGLE3, MTP
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights
from minfer.effects.models.checkpoint.random_weights import random_weights
from minfer.effects.models.draft_heads.head_files import load_head, read_head
from tests.effects.models.draft_heads.drafting_heads import HeadRun
from tests.effects.tiny_families import SIZES, VARIANTS, config_of
from tests.effects.tiny_heads import NAMES, TheirMtp, run_layer, save_with_mtp
from tests.effects.tiny_model import read_spec
from tests.effects.vllm_files import load_file, made_of

TOKENS: Final = 24
DRAFTS: Final = 4
FIRST: Final = dict(reversed([*VARIANTS]))  # the first variant of each family
EAGLE3_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norms before fc": {"fc_norm": True},
    "normed output": {"norm_output": True},
}
# The file of vLLM of each family's head, and its class with `forward`.
VLLM: Final = {
    "DeepseekV3": ("deepseek_mtp", "DeepSeekMultiTokenPredictorLayer"),
    "Glm4Moe": ("glm4_moe_mtp", "Glm4MoeMultiTokenPredictorLayer"),
    "Glm4MoeLite": ("glm4_moe_lite_mtp", "Glm4MoeLiteMultiTokenPredictorLayer"),
    "Ernie4_5_Moe": ("ernie_mtp", "ErnieMultiTokenPredictorLayer"),
    "MiMoV2Flash": ("mimo_v2_mtp", "MiMoV2MTPLayer"),
    "Qwen3Next": ("qwen3_next_mtp", "Qwen3NextMultiTokenPredictor"),
    "Qwen3_5": ("qwen3_5_mtp", "Qwen3_5MultiTokenPredictor"),
    "Qwen3_5Moe": ("qwen3_5_mtp", "Qwen3_5MultiTokenPredictor"),
}
# What follows behind tokens, each beside the state of the token before: the states for
# the next drafts, and logits.
Draft = Callable[[Tensor, Sequence[int]], tuple[Tensor, Tensor]]


def compare(
    found: HeadRun, theirs: Draft, states: Tensor, tokens: list[int]
) -> dict[str, Any]:
    """What differs behind each token, and along a chain behind the last one."""
    expected_hidden, expected = theirs(states, tokens)
    logits = found.draft(states, tokens).logits
    differences, largest = [_difference(logits, expected)], _largest(expected)
    same = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    given, all_tokens = states, [*tokens]
    for _ in range(DRAFTS - 1):
        all_tokens.append(int(expected[-1].argmax()))
        given = torch.cat((given, expected_hidden[-1:]))
        expected_hidden, expected = theirs(given, all_tokens)
        start = len(all_tokens) - 1
        logits = found.draft(given[-1:], all_tokens[-1:], start).logits
        differences.append(_difference(logits, expected[-1:]))
        same += int(logits.argmax()) == int(expected[-1].argmax())
    return {
        "largest_difference": max(differences) / largest,
        "drafts": len(all_tokens),
        "equal_drafts": same,
    }


def _difference(found: Tensor, expected: Tensor) -> float:
    known = expected.isfinite()
    assert found.isfinite().equal(known)
    return float((found[known] - expected[known]).abs().max())


def _largest(logits: Tensor) -> float:
    return float(logits[logits.isfinite()].abs().max())


# --- speculators ------------------------------------------------------------------------


def by_speculators(kind: str, options: dict[str, Any], folder: Path) -> Any:
    """An EAGLE-3 head of Llama's layer, or Qwen3's, that speculators makes and writes."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 1}
    layer = getattr(transformers, f"{kind}Config")(**sizes)
    layer._attn_implementation = "eager"
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=40,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **(layers | options),
    )
    head = Eagle3DraftModel(config).eval()
    for name, weight in head.named_parameters():
        nn.init.normal_(weight, float("norm" in name), 0.3)
    ids = torch.randperm(layer.vocab_size)[:40].sort().values
    head.d2t = ids - torch.arange(40)
    head.t2d = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    head.save_pretrained(folder)
    return head


def eagle3_row(kind: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        theirs = by_speculators(kind, options, Path(folder))
        target = parse_spec(config_of("Qwen3"))
        head = read_head(target, EAGLE3, folder)
        weights = load_head(folder, target, head)
    found = HeadRun(target, random_weights(target, "float32"), head, weights)
    streams = torch.randn(TOKENS, theirs.fc.in_features)
    tokens = torch.randint(target.vocab_size, (TOKENS,)).tolist()
    states = _run_eagle3(theirs, streams, tokens, None).states
    difference = _difference(found.project(streams), states) / _largest(states)
    ids = theirs.d2t + torch.arange(len(theirs.d2t))

    def draft(states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        result = _run_eagle3(theirs, streams[:1].expand(len(tokens), -1), tokens, states)
        whole = torch.full((len(tokens), target.vocab_size), float("-inf"))
        whole[:, ids] = result.logits
        return result.normed if options.get("norm_output") else result.hidden, whole

    compared = compare(found, draft, states, tokens)
    compared["largest_difference"] = max(difference, compared["largest_difference"])
    row = {"head": "EAGLE-3", "reference": "speculators", "of": kind, "options": name}
    return row | compared


@frozen(eq=False)
class Eagle3Results:
    """What the modules of speculators' head return for each token."""

    states: Tensor  # of the projection
    hidden: Tensor  # of the layer
    normed: Tensor  # and behind its norm
    logits: Tensor


def _run_eagle3(
    theirs: Any, streams: Tensor, tokens: Sequence[int], states: Tensor | None
) -> Eagle3Results:
    """Run their forward, which returns tokens alone; `states`: instead of what it makes
    of the target's streams.
    """
    modules = (theirs.fc, theirs.layers[0], theirs.norm, theirs.lm_head)
    results: dict[Any, Tensor] = {}

    def keep(module: Any, _: Any, result: Tensor) -> Tensor:
        if module is theirs.fc and states is not None:
            result = states[None]
        results[module] = result
        return result

    hooks = [module.register_forward_hook(keep) for module in modules]
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        theirs(streams[None], ids, torch.zeros_like(ids), ttt_steps=1)
    for hook in hooks:
        hook.remove()
    return Eagle3Results(*(results[module][0] for module in modules))


def mtp_row(family: str) -> dict[str, Any]:
    """An MTP head that speculators reads from the checkpoint."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.convert.mtp.converter import MTPConverter
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    with TemporaryDirectory() as folder:
        beside = saved(family, Path(folder))
        layer = beside.theirs.target.config
        config = MTPSpeculatorConfig(
            transformer_layer_config=layer,
            speculators_config=SpeculatorsConfig(
                algorithm="mtp",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        head = MTPDraftModel(config).eval()
        stored = MTPConverter().convert_to_state_dict(folder)
        missing = head.load_state_dict(stored, strict=False)
        assert not missing.unexpected_keys
    head.embed_tokens.weight.data = beside.theirs.target.model.embed_tokens.weight.data
    head.lm_head.weight.data = beside.theirs.target.lm_head.weight.data

    def draft(states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        # Theirs are tokens from that of the first state on, and one to predict.
        ids = torch.tensor([[0, *tokens, 0]])
        padded = torch.cat((states, states[-1:], states[-1:]))[None]
        normed: list[Tensor] = []
        hook = head.mtp_layers[0].register_forward_hook(lambda *a: normed.append(a[2]))
        with torch.inference_mode():
            all_logits, *_ = head(ids, padded)
        hook.remove()
        return normed[0][0], all_logits[0][0]

    row = {"head": "MTP", "reference": "speculators", "of": family}
    return row | compare(beside.found, draft, beside.states, beside.tokens)


# --- vLLM -------------------------------------------------------------------------------


class Norm(nn.Module):
    """A norm as vLLM calls it: with a residual, which is added first, or without."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return (
            self.norm(x) if residual is None else (self.norm(x + residual), x + residual)
        )


class Block(nn.Module):
    """A decoder layer as vLLM calls it, with its result as two parts of a sum."""

    use_attn_reduce_scatter_for_moe = use_sequence_parallel_moe = False

    def __init__(self, theirs: TheirMtp) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert residual is None
        assert len(positions) == len(hidden_states)
        model, layer = self.theirs.target.model, self.theirs.layer
        result = run_layer(model, layer, hidden_states)
        return result - 1, torch.ones_like(result)


class Attention(nn.Module):
    """The attention of a decoder layer as vLLM calls it."""

    def __init__(self, theirs: TheirMtp) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        assert len(positions) == len(hidden_states)
        attention = self.theirs.layer.self_attn

        class Alone:
            self_attn = attention

            def __call__(self, hidden: Tensor, **options: Any) -> Any:
                return attention(hidden_states=hidden, **options)[0]

        return run_layer(self.theirs.target.model, Alone(), hidden_states)


def vllm_row(family: str, folder_of_vllm: Path) -> dict[str, Any]:
    """The functions of vLLM's file around layers of transformers."""
    file, class_name = VLLM[family]
    module = load_file(folder_of_vllm, file)
    vars(module)["get_pp_group"] = OneStage
    with TemporaryDirectory() as folder:
        beside = saved(family, Path(folder))
    theirs = beside.theirs
    lm_head, model = theirs.target.lm_head, theirs.target.model
    head = made_of(getattr(module, class_name), **_attributes(family, theirs))
    if family in ("DeepseekV3", "Glm4Moe", "Glm4MoeLite"):
        head.shared_head = made_of(module.SharedHead, norm=theirs.norm, head=lm_head)

    def draft(states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        embeddings = model.embed_tokens(torch.tensor(tokens)).clone()
        # From 1 on: some of them treat position 0 otherwise.
        positions = torch.arange(1, len(tokens) + 1)
        with torch.inference_mode():
            result = _call(head, class_name, embeddings, positions, states)
            hidden, given_on = result if isinstance(result, tuple) else (result, result)
            if hasattr(head, "shared_head"):
                hidden = head.shared_head(hidden)
            return given_on, lm_head(hidden)

    row = {"head": "MTP", "reference": f"vLLM's {file}.py, layers of transformers"}
    found = compare(beside.found, draft, beside.states, beside.tokens)
    return row | {"of": family} | found


def _attributes(family: str, theirs: TheirMtp) -> dict[str, Any]:
    """The modules of a head by vLLM's names for them."""
    names = ("enorm", "hnorm", "eh_proj", "mtp_block")
    further: dict[str, Any] = {}
    if family == "Ernie4_5_Moe":
        names = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj", "mtp_block")
    elif family.startswith("Qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layer")
        layers = nn.ModuleList([Block(theirs)])
        further = {"norm": Norm(theirs.norm), "layers": layers, "num_mtp_layers": 1}
    elif family == "MiMoV2Flash":
        further = {
            "input_layernorm": Norm(theirs.layer.input_layernorm),
            "self_attn": Attention(theirs),
            "pre_mlp_layernorm": Norm(theirs.layer.post_attention_layernorm),
            "mlp": theirs.layer.mlp,
            "final_layernorm": Norm(theirs.norm),
        }
    projection: Any = theirs.projection
    if family == "MiMoV2Flash":  # theirs returns a bias, too
        projection = lambda x: (theirs.projection(x), None)  # noqa: E731
    modules = (
        Norm(theirs.embedding_norm),
        Norm(theirs.hidden_norm),
        projection,
        Block(theirs),
    )
    return dict(zip(names, modules, strict=True)) | further


@frozen
class OneStage:
    """vLLM's group of pipeline stages."""

    is_first_rank: bool = True
    is_last_rank: bool = True


def _call(
    head: Any, class_name: str, embeddings: Tensor, positions: Tensor, states: Tensor
) -> Any:
    """What a head's `forward` returns."""
    if class_name.endswith("Predictor"):
        return head(None, positions, states, inputs_embeds=embeddings)
    if class_name.startswith(("Ernie", "MiMo")):
        return head(embeddings, positions, states)
    return head(None, positions, states, embeddings)


# ----------------------------------------------------------------------------------------


@frozen(eq=False)
class Beside:
    """A head of a checkpoint, as minfer and as transformers' layers compute it; a
    sequence's tokens from the second one on, and the target's states of those before.
    """

    found: HeadRun
    theirs: TheirMtp
    states: Tensor
    tokens: list[int]


def saved(family: str, folder: Path) -> Beside:
    theirs = save_with_mtp(folder, family, VARIANTS[family, FIRST[family]])
    spec = read_spec(folder)
    head = read_head(spec, MTP, folder)
    weights = load_head(folder, spec, head)
    found = HeadRun(spec, load_weights(folder, spec), head, weights)
    tokens = torch.randint(spec.vocab_size, (TOKENS + 1,)).tolist()
    return Beside(found, theirs, theirs.states(tokens)[:-1], tokens[1:])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = []
    for kind in ("Llama", "Qwen3"):
        for name, options in EAGLE3_OPTIONS.items():
            rows.append(eagle3_row(kind, name, options))
            show(rows[-1])
    for family, names in NAMES.items():
        if names.projection == "mtp.fc":
            rows.append(mtp_row(family))
            show(rows[-1])
    for family in VLLM:
        rows.append(vllm_row(family, args.vllm))
        show(rows[-1])
    return {
        "largest_difference": max(row["largest_difference"] for row in rows),
        "drafts": sum(row["drafts"] for row in rows),
        "equal_drafts": sum(row["equal_drafts"] for row in rows),
        "versions": {"speculators": version("speculators"), "vllm": args.vllm_version},
        "heads": rows,
    }


if __name__ == "__main__":
    run(
        "draft_heads_by_others",
        measure,
        {
            "--vllm": {"type": Path, "required": True, "help": "vLLM's folder vllm"},
            "--vllm-version": {"default": "0.33.0"},
            "--seed": 0,
        },
    )
