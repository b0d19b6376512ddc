"""Reads the MTP head of a target's own checkpoint, by the row of the family table.

Several heads may follow one another in a checkpoint, each for one token further. As in
vLLM, the first one drafts all tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve

from minfer.effects.models.architecture.dense import Dense
from minfer.effects.models.architecture.draft_head import MTP, HeadNames, HeadSpec
from minfer.effects.models.architecture.layer_states import BEHIND_LAST
from minfer.effects.models.architecture.layers import FeedForward, Layer
from minfer.effects.models.architecture.quantization import (
    Quantization,
    read_quantization,
)
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.families.mtp_keys import MtpKeys
from minfer.effects.models.families.table import FAMILIES
from minfer.effects.models.formats.compressed_tensors import config_of_mtp

_REMEDY: Final = "use another method of speculation, such as ngram"


def read_mtp_head(
    target: ModelSpec, config: Mapping[str, Any], source: str = "config.json"
) -> HeadSpec:
    """Returns the MTP head that the target's config describes. Raises
    `ModelConfigError`, and `UnsupportedModelError` for families whose heads are not
    known, and for a config that says there is none.
    """
    keys, architecture = target.family.mtp, target.family.architecture
    if keys is None or target.parameters:
        known = [name for name, family in FAMILIES.items() if family.mtp is not None]
        raise UnsupportedModelError(
            f"{source}: MTP heads of {architecture} are not supported; those of "
            f"{', '.join(known)} are; {_REMEDY}"
        )
    if not _count(keys, config, source):
        raise UnsupportedModelError(
            f"{source}: the model has no MTP head ({' or '.join(keys.counts)} is 0 or "
            f"absent); {_REMEDY}"
        )

    def name(stored_name: str) -> str:
        return stored_name.format(layers=len(target.layers))

    return HeadSpec(
        kind=MTP,
        hidden_size=target.hidden_size,
        layer=_layer_like(target, keys, source),
        norms=target.norms,
        names=HeadNames(
            projection=name(keys.projection),
            embedding_norm=name(keys.embedding_norm),
            hidden_norm=name(keys.hidden_norm),
            layer=name(keys.layer),
            norm=name(keys.norm),
            unread=tuple(map(name, keys.copies)),
        ),
        hidden_layers=(BEHIND_LAST,),
        after_norm=True,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        chains_normed=keys.chains_normed,
        quantization=_quantization(target, config, source),
    )


def _quantization(
    target: ModelSpec, config: Mapping[str, Any], source: str
) -> Quantization | None:
    """Returns how a head's matrices are stored: as the target's, unless the config says
    otherwise. Raises `UnsupportedModelError`, `ModelConfigError`.
    """
    own_config = config_of_mtp(config)
    if own_config is None or target.quantization is None:
        return target.quantization
    return read_quantization(ConfigReader(own_config, source))


def _count(keys: MtpKeys, config: Mapping[str, Any], source: str) -> int:
    """Returns the number of heads in a checkpoint. Raises `ModelConfigError`."""
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    reader = ConfigReader(config, source)
    present = [key for key in keys.counts if not reader.is_absent(key)]
    if not present:
        return keys.default_count
    return max(reader.size(key, low=0) for key in present)


def _layer_like(target: ModelSpec, keys: MtpKeys, source: str) -> Layer:
    """Returns the layer of a head, which is like one of the target's. Raises
    `UnsupportedModelError` if no layer is.
    """
    alike = [
        layer
        for layer in target.layers
        if layer.attention is not None
        and (layer.attention.window is not None) == keys.windowed
    ]
    feeds: list[FeedForward] = [
        feed for feed in target.feed_forwards if not keys.dense or isinstance(feed, Dense)
    ]
    if not alike or not feeds:
        kind = "with a window" if keys.windowed else "without a window"
        raise UnsupportedModelError(
            f"{source}: no layer is {kind}, or none has the feed-forward of the MTP "
            f"head, whose sizes follow from them; {_REMEDY}"
        )
    layer = alike[-1]
    feed = feeds[-1] if keys.dense or layer.feed_forward is None else layer.feed_forward
    if keys.before_feed:
        feed = evolve(feed, norms=evolve(feed.norms, before_name=keys.before_feed))
    return evolve(layer, feed_forward=feed)
