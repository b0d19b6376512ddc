"""A model of transformers as a step function: its layers attend over minfer's cache."""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any, Final

import torch
import transformers
from attrs import define
from torch import Tensor

from minfer.effects.models.architecture.batch import Batch
from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.model import Model
from minfer.effects.models.config_reader import UnsupportedModelError

PAGED: Final = "minfer_paged"  # transformers' name of `_paged_attention`
# Arguments of attention that do not change its result.
_IGNORED_EXTRAS: Final = {
    "position_ids",
    "cache_position",
    "use_cache",
    "sliding_window",
    "scaling",
}
_REFUSED_EXTRAS: Final = {
    "s_aux": "attention sinks (s_aux)",
    "softcap": "capped scores (softcap)",
}


@define(eq=False)
class ForwardCall:
    """A forward in progress."""

    batch: Batch
    cache: PagedCache
    states: Any = None  # output of the model without its head, once that ran


_call: ContextVar[ForwardCall] = ContextVar("_call")


def paged_model(model: Any) -> Model:
    """Returns a model of transformers as a step function, with logits as `forward`
    returns them.
    """
    has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    base = model.base_model
    can_tap = base is not model
    if can_tap:
        base.register_forward_hook(_tapped)
        base.forward = _once(base.forward)

    def step(batch: Batch, cache: PagedCache) -> Tensor:
        wants_states = batch.tap is not None or batch.scored is not None
        if wants_states and not can_tap:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} does not say what its hidden states are")
        options = {"position_ids": batch.positions[None].long(), "use_cache": False}
        context, tokens = copy_context(), batch.tokens[None].long()
        context.run(_call.set, ForwardCall(batch, cache))

        def logits_of(picks: Tensor | None) -> Tensor:
            can_select = has_logits_to_keep and picks is not None
            keep: dict[str, Any] = {"logits_to_keep": picks} if can_select else {}
            logits: Tensor = context.run(model, tokens, **keep, **options).logits[0]
            return (
                logits if can_select or picks is None else logits.index_select(0, picks)
            )

        with torch.inference_mode():
            sampled = logits_of(batch.sample)
            if batch.scored is not None:
                for span in batch.scored.spans():
                    batch.scored.take(span.start, logits_of(batch.scored.tokens[span]))
        return sampled

    return step


def _once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model without its head so that it runs once in a call: the head, which runs
    several times on a few tokens each, gets the same states.
    """

    @wraps(forward)
    def states(*args: Any, **kwargs: Any) -> Any:
        call = _call.get(None)
        if call is None or call.batch.scored is None:
            return forward(*args, **kwargs)
        if call.states is None:
            call.states = forward(*args, **kwargs)
        return call.states

    return states


def _tapped(_base: Any, _inputs: Any, output: Any) -> None:
    """Write the states of tapped tokens: the output of the model without its head."""
    call = _call.get(None)
    tap = None if call is None else call.batch.tap
    if tap is not None:
        tap.states.copy_(output[0][0].index_select(0, tap.tokens))


def paged_attention(
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
    if attention_mask is not None:
        raise own_mask()
    _, heads, tokens, _ = query.shape
    qkv = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    call = _call.get()
    out = call.cache.attend(
        call.batch, module.layer_idx, torch.cat(qkv, 1), extras.get("scaling")
    )
    return out.view(1, tokens, heads, -1).to(query.dtype), None


def own_mask() -> UnsupportedModelError:
    """Returns the error about a model with a mask of its own."""
    return UnsupportedModelError("it masks attention in a way of its own")


def refuse_extras(module: Any, extras: Mapping[str, Any]) -> None:
    """Refuse what `attend` does not support: softcap, attention sinks (s_aux), biases,
    dropout.
    """
    if extras.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModelError("it attends to later tokens")
    for name, value in extras.items():
        absent = (
            value is None or isinstance(value, bool) or (name == "dropout" and value == 0)
        )
        if not absent and name not in _IGNORED_EXTRAS:
            raise UnsupportedModelError(
                f"its attention asks for {_REFUSED_EXTRAS.get(name, name)}"
            )


transformers.AttentionInterface.register(PAGED, paged_attention)
