"""Layers that keep a state, without a type of their own: for tests of where it is."""

from attrs import evolve, frozen

from minfer.effects.models.architecture.layers import Layer
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.state_parts import StatePart


@frozen
class StatefulLayer(Layer):
    """A layer that keeps these parts of a state."""

    parts: tuple[StatePart, ...] = ()

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return self.parts


def with_parts(spec: ModelSpec, *parts: tuple[StatePart, ...]) -> ModelSpec:
    """The spec with one layer for each of these, all like its first."""
    first = spec.layers[0]
    layers = (
        StatefulLayer(attention=first.attention, feed_forward=first.feed_forward, parts=p)
        for p in parts
    )
    return evolve(spec, layers=tuple(layers))
