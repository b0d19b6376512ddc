"""Models outside the family table: transformers' own classes over minfer's paged cache.

transformers looks its attention up by name. The one registered here writes to minfer's
cache and reads through block tables; the rows of a step are packed as one sequence. A
model that does more with attention would be wrong in silence, so it is looked at twice:
traced without weights (who attends, with what heads, masks and extras), and, once loaded,
run on packed chunks, whose logits must be those of its own attention.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from attrs import evolve
from safetensors import SafetensorError
from torch import Tensor

from minfer.effects.models.batch import Batch, Row, make_batch
from minfer.effects.models.cache import PagedCache
from minfer.effects.models.checkpoint import (
    HARMLESS,
    CorruptFileError,
    TensorMismatchError,
    shards,
)
from minfer.effects.models.config_reader import (
    CheckpointError,
    ConfigError,
    Reader,
    UnsupportedModelError,
)
from minfer.effects.models.dense import Dense
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.families import Family
from minfer.effects.models.gqa import GQA
from minfer.effects.models.layers import Layer
from minfer.effects.models.model import Model
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.spec_reader import read_dtype

CacheMaker = Callable[[ModelSpec, int, int], PagedCache]
PAGED: Final = "minfer_paged"  # what transformers calls the functions below
TRACED: Final = "minfer_traced"
FARTHEST: Final = (
    1 << 20
)  # positions that a trace looks back: longer windows count as none
# Greatest error of checked logits, as a share of their spread. A wrong mask, position or
# scale makes tenths; in float32 the order of summation makes 1e-5, and more in deep
# models.
TOLERANCE: Final = 1e-3
_NOT_READ: Final = {"attn_implementation", "experts_implementation", "return_dict"}
# Handed down to attention, though it says nothing about what attention computes.
_IDLE: Final = {
    "position_ids",
    "cache_position",
    "use_cache",
    "sliding_window",
    "scaling",
}
_EXTRAS: Final = {
    "s_aux": "attention sinks (s_aux)",
    "softcap": "capped scores (softcap)",
}

Seen = tuple[
    int, int, int, int, int, int
]  # a layer, heads, key heads, sizes of both, window
_trace: ContextVar[tuple[int, list[Seen]]] = ContextVar(
    "_trace"
)  # positions asked about, layers
_call: ContextVar[tuple[Batch, PagedCache]] = ContextVar("_call")  # a forward under way


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and advice: what matters is raised."""
    logging: Any = transformers.utils.logging
    with contextlib.ExitStack() as stack:
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            stack.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


@quiet()
def fallback_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The `ModelSpec` of a model that transformers runs, found by tracing it without
    weights.

    Raises `UnsupportedModelError` for what cannot run, by name, and `ConfigError`.
    """
    read = Reader(config, where)
    found, theirs = _resolve(read)
    name = "max_position_embeddings"
    context = Reader({name: getattr(theirs, name, None)}, where).size(name, low=16)
    ropes = getattr(theirs, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if (
            rope.get("rope_type") == "longrope"
        ):  # above this, frequencies depend on the longest
            context = min(context, int(rope["original_max_position_embeddings"]))
        rope |= (
            {"rope_type": "default"} if "rope_type" in rope else {}
        )  # traces need no lengths
    span = min(context, FARTHEST)
    try:
        with torch.device(
            "meta"
        ):  # in half precision: grouped experts have no other kernel there
            model = found._from_config(
                theirs, dtype=torch.bfloat16, attn_implementation=TRACED
            )
        seen, vocab = _run_trace(model.eval(), span)
    except Exception as error:
        why = (
            str(error)
            if isinstance(error, UnsupportedModelError)
            else f"tracing: {error!r:.200}"
        )
        raise read.refusal(f"{found.__name__} is not supported: {why}") from error
    if len(model.get_input_embeddings().weight) < vocab:
        raise read.error("vocab_size", "at most the rows of the embedding")
    wide = getattr(theirs, "intermediate_size", None)
    wide = wide if isinstance(wide, int) else 4 * theirs.hidden_size
    experts = getattr(theirs, "num_experts_per_tok", None)  # each gets inputs of its own
    feed_forward = Dense(
        hidden_size=theirs.hidden_size,
        intermediate_size=(wide + theirs.hidden_size) * experts if experts else wide,
    )
    layers = tuple(
        Layer(
            GQA(
                hidden_size=theirs.hidden_size,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=None if window == span else window,
            ),
            feed_forward,
        )
        for _, heads, kv_heads, head_dim, _, window in seen
    )
    return ModelSpec(
        family=Family(architecture=found.__name__, defaults={}),
        vocab_size=vocab,
        hidden_size=theirs.hidden_size,
        layers=layers,
        max_position_embeddings=context,
        dtype=read_dtype(read),
        eos_ids=read.ids("eos_token_id"),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _resolve(read: Reader) -> tuple[Any, Any]:
    """The class and config of transformers for a checkpoint, or why there is
    none for us.
    """
    names, kind = (
        read.config.get("architectures") or ["(none)"],
        str(read.config.get("model_type")),
    )
    what = f"architecture {', '.join(map(str, names))} is not supported:"
    version = f"transformers {transformers.__version__}"
    if not read.absent("quantization_config"):
        raise read.refusal(
            "quantized checkpoints (quantization_config) are not supported"
        )
    if kind not in transformers.CONFIG_MAPPING:
        code = (
            ""
            if read.absent("auto_map")
            else ", and its own code (auto_map) is never executed"
        )
        raise read.refusal(f"{what} {version} has no model_type {kind!r}{code}")
    given = {k: v for k, v in read.config.items() if k not in _NOT_READ and k[:1] != "_"}
    try:
        theirs = transformers.CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:  # each model's config checks itself, in ways of its own
        why = " ".join(str(error).split())
        raise ConfigError(f"{read.where}: transformers cannot read it: {why}") from error
    theirs.pad_token_id = (
        None  # some look for it in every input, to warn of missing masks
    )
    found: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), object)
    layers = set(map(str, getattr(theirs, "layer_types", None) or ()))
    other = ", ".join(sorted(layers - {"full_attention", "sliding_attention"}))
    composite = (
        theirs.get_text_config(decoder=True) is not theirs or "vision_config" in given
    )
    reached = getattr(found, "_supports_attention_backend", False)
    for holds, why in (
        (getattr(theirs, "is_encoder_decoder", False), "it is an encoder with a decoder"),
        (composite, "it is multimodal"),
        (found.__name__ not in names, f"it is no causal language model of {version}"),
        (other, f"it has layers other than attention ({other})"),
        (getattr(found, "_is_stateful", False), "it is recurrent"),
        (
            getattr(theirs, "num_kv_shared_layers", 0),
            "layers share keys (num_kv_shared_layers)",
        ),
        (
            not reached,
            "its attention is not reached through transformers' attention interface",
        ),
    ):
        if holds:
            raise read.refusal(f"{what} {why}")
    return found, theirs


def _run_trace(model: Any, span: int) -> tuple[list[Seen], int]:
    """What each layer's attention did with one token, and the width of the logits."""
    seen: list[Seen] = []
    context, ids = copy_context(), torch.zeros(1, 1, dtype=torch.int64, device="meta")
    context.run(_trace.set, (span, seen))
    with torch.inference_mode():
        # With a cache, transformers does not look for packed sequences in the positions.
        vocab = context.run(model, input_ids=ids, use_cache=True).logits.shape[-1]
    if [layer[0] for layer in seen] != list(range(model.config.num_hidden_layers)):
        raise UnsupportedModelError("it does not attend exactly once in every layer")
    if len({layer[1:5] for layer in seen}) > 1 or seen[0][3] != seen[0][4]:
        raise UnsupportedModelError(
            "its attention heads, keys and values differ in size or number"
        )
    return seen, vocab


def _traced_mask(*_: Any, mask_function: Any, **__: Any) -> Tensor:
    """A mask that holds one number, its window: found by what the last two
    queries see.
    """
    span = _trace.get()[0]
    keys = torch.arange(span + 1)  # one of them behind the last query
    queries = keys[span - 2 : span, None]
    seen = torch.stack(
        [mask_function(0, 0, query[0], keys).expand(span + 1) for query in queries]
    )
    window = int(seen[1].sum())
    if not seen.equal((keys <= queries) & (keys > queries - window)):
        raise UnsupportedModelError("it attends to other tokens than the last ones")
    return torch.full((1, 1, 1, 1), window)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What layers call: `query` [1, heads, tokens, head_dim], `key` and
    `value` likewise.
    """
    _refuse_extras(module, extras)
    trace, (_, heads, tokens, _) = _trace.get(None), query.shape
    if (trace is None) != (attention_mask is None) or (
        trace and attention_mask.numel() != 1
    ):
        raise UnsupportedModelError("it masks attention in a way of its own")
    if trace is not None:
        sizes = (heads, key.shape[1], key.shape[-1], value.shape[-1])
        trace[1].append((getattr(module, "layer_idx", -1), *sizes, int(attention_mask)))
        return query.new_zeros(1, tokens, heads, value.shape[-1]), None
    batch, cache = _call.get()
    qkv = torch.cat(
        [part[0].transpose(0, 1).flatten(1) for part in (query, key, value)], 1
    )
    out = cache.attend(batch, module.layer_idx, qkv, extras.get("scaling"))
    return out.view(1, tokens, heads, -1).to(query.dtype), None


def _refuse_extras(module: Any, extras: Mapping[str, Any]) -> None:
    """Refuse what `attend` does not do: softcap, attention sinks (s_aux), biases,
    dropout.
    """
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError("it attends to later tokens")
    for name, value in extras.items():
        absent = (
            value is None or isinstance(value, bool) or (name == "dropout" and value == 0)
        )
        if not absent and name not in _IDLE:
            raise UnsupportedModelError(
                f"its attention asks for {_EXTRAS.get(name, name)}"
            )


def paged_model(model: Any) -> Model:
    """A model of transformers as a step function, whose logits are as those
    of `forward`.
    """
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def step(batch: Batch, cache: PagedCache) -> Tensor:
        picks = batch.sample
        fewer = keeps and picks is not None
        keep: dict[str, Any] = {"logits_to_keep": picks} if fewer else {}
        keep |= {"position_ids": batch.positions[None].long(), "use_cache": False}
        context = copy_context()
        context.run(_call.set, (batch, cache))
        with torch.inference_mode():
            logits: Tensor = context.run(model, batch.tokens[None].long(), **keep).logits[
                0
            ]
        return logits if fewer or picks is None else logits.index_select(0, picks)

    return step


@quiet()
def load_fallback(
    folder: Path,
    config: Mapping[str, Any],
    spec: ModelSpec,
    make_cache: CacheMaker,
    seed: int | None = None,
    device: str = "cpu",
) -> Model:
    """Load a model in `spec.dtype`, or draw its weights from `seed`, and check it against
    itself.

    `make_cache` makes the CPU's cache, from a spec, a number of blocks and their size.
    Raises `CorruptFileError`, `TensorMismatchError`, and `UnsupportedModelError` if the
    paged model says something else than the same model with its own attention.
    """
    found, theirs = _resolve(Reader(config, str(folder)))
    kinds = {"dtype": torch_dtype(spec.dtype), "attn_implementation": PAGED}
    if seed is None:
        model = _from_files(found, folder, config=theirs, **kinds)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = found._from_config(theirs, **kinds)
    model.eval().requires_grad_(False)
    try:
        error = _self_check(evolve(spec, dtype="float32"), model, make_cache)
    except RuntimeError as failure:
        raise CheckpointError(
            f"{folder}: {found.__name__} cannot run: {failure}"
        ) from failure
    if error != error:
        raise CheckpointError(
            f"{folder}: damaged weights: logits are not finite, or all alike"
        )
    if error > TOLERANCE:
        what = f"its logits differ from those with its own (relative error {error:.2g})"
        what = f"{found.__name__} is not supported: with paged attention {what}"
        raise UnsupportedModelError(f"{folder}: {what}")
    return paged_model(model.to(device))


def _from_files(found: Any, folder: Path, **how: Any) -> Any:
    """transformers' loading, made strict."""
    list(shards(folder))  # all there, and no pickles
    how |= {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        model, told = found.from_pretrained(folder, output_loading_info=True, **how)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            f"{folder}: weights truncated or corrupt ({error})"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise TensorMismatchError(
            f"{folder}: weights do not fit config.json ({error})"
        ) from error
    for what in ("missing", "unexpected"):
        if bad := sorted(
            name for name in told[f"{what}_keys"] if not name.endswith(HARMLESS)
        ):
            why = (
                "the checkpoint is incomplete or its config.json describes another model"
            )
            raise TensorMismatchError(
                f"{folder}: {what} tensor {', '.join(bad[:4])}; {why}"
            )
    return model


def _self_check(spec: ModelSpec, model: Any, make_cache: CacheMaker) -> float:
    """Greatest error of paged logits over the model's own eager ones, relative to their
    spread.
    """
    ids, tables = (
        (torch.arange(22) * 7919 % spec.vocab_size).view(2, 11),
        ([5, 1, 3], [0, 6, 2]),
    )
    step, cache, worst = paged_model(model), make_cache(spec, 8, 4), []
    with torch.inference_mode(), _in_float32(model):
        model.set_attn_implementation("eager")
        own = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation(PAGED)
        for cuts in (((0, 5), (0, 1)), ((5, 6), (1, 10)), ((6, 11), (10, 11))):
            rows = [
                Row(ids[i, a:b].numpy(), a, tables[i], b - a)
                for i, (a, b) in enumerate(cuts)
            ]
            right = torch.cat([own[i, a:b] for i, (a, b) in enumerate(cuts)])
            gap = step(make_batch(rows, 4), cache) - right
            worst.append(gap.square().mean(-1).sqrt().max())
    return float(torch.stack(worst).max() / own.std())


@contextlib.contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Every module runs on float32 copies of its own parameters, which live as long as it
    runs.

    In half precision, a rounding may send a token to another expert, which hides real
    errors.
    """
    kept: dict[Any, Tensor] = {}

    def widen(module: Any, *_: Any) -> None:
        for one in module.parameters(recurse=False):
            kept[one], one.data = one.data, one.data.float()

    def restore(module: Any, *_: Any) -> None:
        for one in module.parameters(recurse=False):
            one.data = kept.pop(one)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(widen).remove)
            stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


transformers.AttentionInterface.register(PAGED, _attention)
transformers.AttentionInterface.register(TRACED, _attention)
transformers.AttentionMaskInterface.register(TRACED, _traced_mask)
