"""Finds the `ModelSpec` of a model of transformers by running it without weights.

Theory. On torch's meta device a model of any size runs one token at once, and computes
nothing. The attention registered here notes which layers attend, with how many heads of
what size; the mask registered beside it evaluates which keys its last two queries see,
and passes on one number, the window. A model that does anything else is refused by name.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, Final

import torch
import transformers
from attrs import evolve, field, frozen
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from minfer.effects.models.architecture.dense import Dense
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.linear import LinearSizes, NormRule
from minfer.effects.models.architecture.quantization import read_quantization
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import read_dtype
from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.fallback.classes import HuggingFaceModel, quiet, resolve
from minfer.effects.models.fallback.paged import own_mask, refuse_extras
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.layer_keys import StoredNames
from minfer.effects.models.parts import Renaming
from minfer.kernels.leaves import Shard

TRACED: Final = "minfer_traced"  # transformers' name of the functions below
MAX_TRACED_POSITIONS: Final = (
    1 << 20
)  # positions a trace looks back: longer windows count as none
MIN_CONTEXT: Final = 16  # the smallest context that a model must have


@frozen
class TracedAttention:
    """The arguments of one layer's attention."""

    layer: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What must be the same in all layers."""
        return self.heads, self.kv_heads, self.key_dim, self.value_dim


@frozen(eq=False)
class AttentionTrace:
    """A run without weights."""

    span: int  # positions that masks are evaluated for
    seen: list[TracedAttention] = field(factory=list)


_trace: ContextVar[AttentionTrace] = ContextVar("_trace")


@quiet()
def fallback_spec(
    config: Mapping[str, Any], source: str = "config.json", dtype: str | None = None
) -> ModelSpec:
    """Returns the `ModelSpec` of a model that transformers runs, found by tracing it
    without weights; `dtype` is the requested dtype.

    Raises `UnsupportedModelError` for models that cannot run, by name, and
    `ModelConfigError`.
    """
    reader = ConfigReader(config, source)
    hf_model = resolve(reader)
    context, original = _context(hf_model.config, source)
    span, name = min(context, MAX_TRACED_POSITIONS), hf_model.model.__name__
    try:
        model = _weightless(hf_model)
        trace = AttentionTrace(span)
        vocab = _run(model, trace)
    except Exception as error:
        is_refusal = isinstance(error, UnsupportedModelError)
        reason = str(error) if is_refusal else f"tracing: {error!r:.200}"
        raise reader.refusal(f"{name} is not supported: {reason}") from error
    if len(model.get_input_embeddings().weight) < vocab:
        raise reader.error("vocab_size", "at most the rows of the embedding")
    return ModelSpec(
        family=Family(
            architecture=name,
            model_type="",
            defaults={},
            stored=StoredNames(renamings=tuple(_renamings(model))),
        ),
        vocab_size=vocab,
        hidden_size=hf_model.config.hidden_size,
        layers=_layers(hf_model.config, trace),
        max_position_embeddings=context,
        original_context=original,
        dtype=read_dtype(reader, dtype),
        eos_ids=reader.ids("eos_token_id"),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linears=tuple(_linears(model)),
        quantization=read_quantization(reader),
    )


def _context(config: Any, source: str) -> tuple[int, int | None]:
    """Returns the longest context, and the one up to which the short factors of longrope
    hold, if it has these.

    Ropes that depend on the length are replaced in `config` by default ones: traces do
    not need them.
    """
    name = "max_position_embeddings"
    reader = ConfigReader({name: getattr(config, name, None)}, source)
    context, original = reader.size(name, low=MIN_CONTEXT), None
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") == "longrope":
            original = min(context, int(rope["original_max_position_embeddings"]))
        if "rope_type" in rope:
            rope["rope_type"] = "default"
    if original is not None and "rope_type" not in ropes:  # each kind has its own
        context = original
    return context, None if original == context else original


def _layers(config: Any, trace: AttentionTrace) -> tuple[Layer, ...]:
    """Returns the traced layers; of feed-forwards, only what memory plans need."""
    width = getattr(config, "intermediate_size", None)
    width = width if isinstance(width, int) else 4 * config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:  # each expert gets inputs of its own
        width = (width + config.hidden_size) * experts
    first, norms = trace.seen[0], NormRule(0.0)
    attention = GQA(
        hidden_size=config.hidden_size,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.key_dim,
        scale=first.key_dim**-0.5,
        norms=norms,
    )
    feed_forward = Dense(
        hidden_size=config.hidden_size, intermediate_size=width, norms=norms
    )
    windows = (
        None if attended.window == trace.span else attended.window
        for attended in trace.seen
    )
    return tuple(
        Layer(evolve(attention, window=window), feed_forward) for window in windows
    )


def _linears(model: Any) -> Iterator[LinearSizes]:
    """Yields the sizes of a model's linear modules, but the output head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        # Subclasses may multiply otherwise.
        if type(module) is torch.nn.Linear and module is not head:
            yield LinearSizes(
                names=(name,),
                outputs=(module.out_features,),
                inputs=module.in_features,
                shard=Shard.NONE,
                bias=module.bias is not None,
            )


def _renamings(model: Any) -> Iterator[Renaming]:
    """Yields how transformers renames the tensors of a model's checkpoints, as far as it
    replaces parts by fixed ones.
    """
    for renaming in get_model_conversion_mapping(model):
        if type(renaming) is WeightRenaming and "\\" not in renaming.target_patterns[0]:
            for pattern in renaming.source_patterns:
                # A pattern ends where a part of a name does.
                end = r"(?!\w)" if pattern[-1].isalnum() else ""
                yield Renaming(pattern + end, renaming.target_patterns[0])


def _weightless(hf_model: HuggingFaceModel) -> Any:
    """Returns the model on the meta device, in half precision: grouped experts have no
    other kernel there.
    """
    with torch.device("meta"):
        model = hf_model.model._from_config(
            hf_model.config, dtype=torch.bfloat16, attn_implementation=TRACED
        )
    return model.eval()


def _run(model: Any, trace: AttentionTrace) -> int:
    """Note what each layer's attention does with one token; returns the width of the
    logits. Raises `UnsupportedModelError`.
    """
    context, ids = copy_context(), torch.zeros(1, 1, dtype=torch.int64, device="meta")
    context.run(_trace.set, trace)
    with torch.inference_mode():
        # With a cache, transformers does not search the positions for packed sequences.
        logits = context.run(model, input_ids=ids, use_cache=True).logits
    attended = trace.seen
    if [attention.layer for attention in attended] != list(
        range(model.config.num_hidden_layers)
    ):
        raise UnsupportedModelError("it does not attend exactly once in every layer")
    if (
        len({attention.sizes for attention in attended}) > 1
        or attended[0].key_dim != attended[0].value_dim
    ):
        raise UnsupportedModelError(
            "its attention heads, keys and values differ in size or number"
        )
    vocab: int = logits.shape[-1]
    return vocab


def _traced_mask(*_: Any, mask_function: Any, **__: Any) -> Tensor:
    """Returns a mask that holds one number, its window: found by what the last two
    queries see.
    """
    span = _trace.get().span
    keys = torch.arange(span + 1)  # one of them is after the last query
    queries = keys[span - 2 : span, None]
    visible = torch.stack(
        [mask_function(0, 0, query[0], keys).expand(span + 1) for query in queries]
    )
    window = int(visible[1].sum())
    if not visible.equal((keys <= queries) & (keys > queries - window)):
        raise UnsupportedModelError("it attends to other tokens than the last ones")
    return torch.full((1, 1, 1, 1), window)


def traced_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **extras: Any,
) -> tuple[Tensor, None]:
    """The attention function of layers: `query`, `key` and `value` are [1, heads,
    tokens, head_dim].
    """
    refuse_extras(module, extras)
    if attention_mask is None or attention_mask.numel() != 1:
        raise own_mask()
    _, heads, tokens, _ = query.shape
    attended = TracedAttention(
        layer=getattr(module, "layer_idx", -1),
        heads=heads,
        kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        window=int(attention_mask),
    )
    _trace.get().seen.append(attended)
    return query.new_zeros(1, tokens, heads, value.shape[-1]), None


transformers.AttentionInterface.register(TRACED, traced_attention)
transformers.AttentionMaskInterface.register(TRACED, _traced_mask)
