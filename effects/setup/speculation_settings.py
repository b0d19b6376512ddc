"""The settings of speculative decoding: vLLM's `--speculative-config`, with its keys.

    {"method": "ngram", "num_speculative_tokens": 4}
    {"method": "draft_model", "model": "org/name", "num_speculative_tokens": 5}
    {"method": "mtp", "num_speculative_tokens": 2}
    {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}

`method` is what makes the drafts: "ngram" looks up what followed the same tokens in the
request itself, "suffix" also in other requests' outputs; "draft_model" is a smaller model
with the same tokenizer; "mtp" and "eagle3" are heads that read the target's hidden
states, one in the target's own checkpoint, one in a checkpoint made for it. Drafts never
change the outputs, unless `rejection_sample_method` is "standard": then they do not
change their distribution.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import Attribute, field, fields, frozen

from minfer.effects.models.architecture.draft_head import EAGLE3, MTP
from minfer.effects.setup.nearest import check_keys
from minfer.records.speculation import (
    DEVICE,
    HOST,
    MOST_DRAFTS,
    REJECTION,
    SAME_NOISE,
    Speculation,
)
from minfer.speculate.lookup import Lookup
from minfer.speculate.proposer import Proposer
from minfer.values.checks import ConfigError, number

NGRAM: Final = "ngram"
SUFFIX: Final = "suffix"
DRAFT_MODEL: Final = "draft_model"
LOOKUPS: Final = (NGRAM, SUFFIX)
HEADS: Final = (MTP, EAGLE3)
WITHOUT_HEADS: Final = (*LOOKUPS, DRAFT_MODEL)
METHODS: Final = (*WITHOUT_HEADS, *HEADS)
WITH_MODEL: Final = (DRAFT_MODEL, EAGLE3)  # methods that have a checkpoint of their own
# vLLM's names of acceptance rules: a draft must equal the token that the target samples,
# or a coin decides.
SAME: Final = "same_noise"
STANDARD: Final = "standard"
ACCEPTED_BY: Final = {SAME: SAME_NOISE, STANDARD: REJECTION}
# In steps of more rows there are no drafts, unless the settings change this: they would
# cost more than they gain.
MAX_HOST_DRAFT_ROWS: Final = 32
MAX_MODEL_DRAFT_ROWS: Final = 64
MAX_HEAD_DRAFT_ROWS: Final = 128
MAX_DRAFT_ROWS: Final = {
    **dict.fromkeys(LOOKUPS, MAX_HOST_DRAFT_ROWS),
    DRAFT_MODEL: MAX_MODEL_DRAFT_ROWS,
    **dict.fromkeys(HEADS, MAX_HEAD_DRAFT_ROWS),
}
_SETTING: Final = "speculative_config"
# Methods of other engines.
_UNSUPPORTED_METHODS: Final = ("eagle", "medusa", "mlp_speculator")
_OF_FAMILY: Final = "_mtp"  # how vLLM's older names of MTP end: "deepseek_mtp"


_whole: Final = partial(number, prefix=f"{_SETTING}: ")


def _method(_: object, __: "Attribute[str]", value: Any) -> None:
    if value in METHODS:
        return
    methods = ", ".join(METHODS)
    if value in _UNSUPPORTED_METHODS:
        raise ConfigError(
            f"{_SETTING}: method {value!r} is not supported; choose one of {methods}"
        )
    raise ConfigError(f"{_SETTING}: method must be one of {methods}, not {value!r:.80}")


def _acceptance(_: object, attribute: "Attribute[str]", value: Any) -> None:
    if not isinstance(value, str) or value not in ACCEPTED_BY:
        raise ConfigError(
            f"{_SETTING}: {attribute.name} must be "
            f"{' or '.join(map(repr, ACCEPTED_BY))}, not {value!r:.80}"
        )


def _flag(_: object, attribute: "Attribute[bool]", value: Any) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{_SETTING}: {attribute.name} must be true or false")


@frozen(kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    Raises ConfigError for values out of range, or of another method.
    """

    method: str = field(validator=_method)
    # drafts of a row in a step, at most
    num_speculative_tokens: int = field(default=4, validator=_whole(1, MOST_DRAFTS))
    # of "draft_model" and "eagle3": its folder, or its name on the hub
    model: str | None = None
    # of lookups: matching tokens that are required, and tokens that are compared
    prompt_lookup_min: int | None = field(default=None, validator=_whole(1, 64))
    prompt_lookup_max: int | None = field(default=None, validator=_whole(1, 1024))
    # in steps of more rows there are no drafts
    disable_by_batch_size: int | None = field(default=None, validator=_whole(1, 2**31))
    # choose the number of drafts by expected gain; else always use the most
    adaptive: bool = field(default=True, validator=_flag)
    # which drafts are accepted
    rejection_sample_method: str = field(default=SAME, validator=_acceptance)

    def __attrs_post_init__(self) -> None:
        if self.method not in LOOKUPS:
            for name in ("prompt_lookup_min", "prompt_lookup_max"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{_SETTING}: {name} goes with {NGRAM} and {SUFFIX}"
                    )
        if self.method not in WITH_MODEL and self.model is not None:
            methods = " and ".join(map(repr, WITH_MODEL))
            raise ConfigError(
                f"{_SETTING}: model goes with the methods {methods}, not with "
                f"{self.method!r}"
            )
        if self.method == EAGLE3 and self.model is None:
            raise ConfigError(
                f"{_SETTING}: eagle3 needs a model: the path of the head's checkpoint "
                f"folder, or its name on the hub"
            )
        if not isinstance(self.model, str | Path | None) or self.model == "":
            raise ConfigError(
                f"{_SETTING}: model must be the path of a checkpoint folder"
            )
        min_tokens, max_tokens = self.lookup_lengths
        if min_tokens > max_tokens:
            raise ConfigError(
                f"{_SETTING}: prompt_lookup_min ({min_tokens}) must be at most "
                f"prompt_lookup_max ({max_tokens})"
            )

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """Matching tokens that are required, and tokens that are compared."""
        default = Lookup()
        min_tokens = self.prompt_lookup_min or min(
            default.min_match, self.prompt_lookup_max or default.min_match
        )
        return min_tokens, self.prompt_lookup_max or max(min_tokens, default.max_match)

    @property
    def speculation(self) -> Speculation:
        """The engine's configuration, before the costs of its steps are measured."""
        by_host = self.method in LOOKUPS
        return Speculation(
            drafter=HOST if by_host else DEVICE,
            drafts=self.num_speculative_tokens,
            rule=ACCEPTED_BY[self.rejection_sample_method],
            rows=self.disable_by_batch_size or MAX_DRAFT_ROWS[self.method],
            adaptive=False,
        )

    @property
    def proposer(self) -> Proposer | None:
        """The proposer of drafts on the host, if there is one."""
        if self.method not in LOOKUPS:
            return None
        min_tokens, max_tokens = self.lookup_lengths
        if self.method == NGRAM:
            return Lookup(min_match=min_tokens, max_match=max_tokens, max_scope_tokens=0)
        return Lookup(min_match=min_tokens, max_match=max_tokens)


def speculative_config(setting: Any) -> SpeculativeConfig | None:
    """Returns the configuration from a mapping of its keys, if there is any. Raises
    ConfigError.
    """
    if setting is None or isinstance(setting, SpeculativeConfig):
        return setting
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"{_SETTING} must be a mapping of its keys, not {setting!r:.80}"
        )
    keys = [attribute.name for attribute in fields(SpeculativeConfig)]
    check_keys(_SETTING, setting, keys)
    method = setting.get("method")
    if isinstance(method, str) and method.endswith(_OF_FAMILY):
        setting = {**setting, "method": MTP}
    if "method" not in setting:
        if setting.get("model") is None:
            raise ConfigError(f"{_SETTING} needs a method: one of {', '.join(METHODS)}")
        setting = {**setting, "method": DRAFT_MODEL}
    return SpeculativeConfig(**setting)
