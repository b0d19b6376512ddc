"""A sliding window with sink tokens for layers that attend to all keys: StreamingLLM.

Theory. A model with full attention puts much weight on the first tokens of a sequence,
whatever they say, as a softmax has to put it somewhere. So beyond a window of the last
tokens it stays fluent only while it sees these first ones, the *sink tokens*, too (Xiao
et al. 2023, arXiv:2309.17453). What is between the sinks and the window is not attended
to, and its blocks are released: the memory of a sequence does not grow with its length.
A query reads the first `sink_tokens` tokens and the last `window` ones, itself included.
Positions are those of the sequence, not renumbered as in the paper: they are bounded by
`max_position_embeddings`.
"""

from attrs import evolve

from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.values.checks import ConfigError


def with_attention_window(
    spec: ModelSpec, window: int | None, sink_tokens: int
) -> ModelSpec:
    """Returns the spec with a window of `window` keys, and sink tokens, in each layer
    that has no window of its own; unchanged if `window` is None. Raises ConfigError.
    """
    if window is None:
        if sink_tokens:
            raise ConfigError(
                f"attention_sink_tokens is {sink_tokens}, but there is no window beside "
                f"which they would be read; set attention_window, too"
            )
        return spec
    if sink_tokens > window:
        raise ConfigError(
            f"attention_sink_tokens ({sink_tokens}) must be at most attention_window "
            f"({window})"
        )
    name = spec.family.architecture
    if spec.parameters:
        raise ConfigError(
            f"attention_window is not supported for {name}, which transformers' own "
            f"model runs; leave the setting out"
        )
    if not all(isinstance(attention, GQA) for attention in spec.attentions):
        raise ConfigError(
            f"attention_window is not supported for {name}, whose layers keep latents "
            f"(MLA); leave the setting out"
        )
    if None not in spec.windows:
        raise ConfigError(
            f"attention_window: all layers of {name} here have a sliding window of their "
            f"own, {sorted({*filter(None, spec.windows)})}, which they keep; leave the "
            f"setting out"
        )
    layers = (_windowed(layer, window, sink_tokens) for layer in spec.layers)
    return evolve(spec, layers=tuple(layers))


def _windowed(layer: Layer, window: int, sink_tokens: int) -> Layer:
    attention = layer.attention
    if not isinstance(attention, GQA) or attention.window is not None:
        return layer
    return evolve(
        layer, attention=evolve(attention, window=window, sink_tokens=sink_tokens)
    )
