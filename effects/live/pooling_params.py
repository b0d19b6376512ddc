"""How a prompt becomes a vector, in vLLM's names."""

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from minfer.effects.live.errors import RequestError
from minfer.records.request import LAST, POOLINGS
from minfer.sampling.vllm_names import Absent, takes_neutral
from minfer.values.checks import ParameterError, check_flag, check_number

_NO_TASK: Final = "a prompt becomes one vector (embed); leave it out"
_ABSENT: Final = {
    "task": Absent(_NO_TASK, (None, "embed")),
    "step_tag_id": Absent(_NO_TASK),
    "returned_token_ids": Absent(_NO_TASK),
    "late_chunking_params": Absent(_NO_TASK),
    "late_interaction_params": Absent(_NO_TASK),
    "extra_kwargs": Absent("leave it out", (None, {})),
    "requires_token_ids": Absent("leave it out", (False,)),
    "skip_reading_prefix_cache": Absent(
        "give the prompt a cache_salt of its own", (None, False)
    ),
}


@takes_neutral(_ABSENT)
@frozen(kw_only=True)
class PoolingParams:
    """How a prompt becomes a vector. Raises ParameterError."""

    # The first numbers of the vector alone, for models that were trained for it
    # (Matryoshka); None: all.
    dimensions: int | None = None
    use_activation: bool | None = None  # scale it to length 1; None: yes
    pooling: str = LAST  # minfer's: "last" token, or "mean" of all

    def __attrs_post_init__(self) -> None:
        if self.dimensions is not None:
            check_number(self.dimensions, "dimensions", 1, 2**31, whole=True)
        if self.use_activation is not None:
            check_flag(self.use_activation, "use_activation")
        if self.pooling not in POOLINGS:
            names = " or ".join(map(repr, POOLINGS))
            raise ParameterError("pooling", f"must be {names}, not {self.pooling!r}")

    @property
    def normalize(self) -> bool:
        """Whether the vector is scaled to length 1."""
        return self.use_activation is not False


def pooling_params_for(
    params: PoolingParams | Sequence[PoolingParams] | None, num_prompts: int, size: int
) -> list[PoolingParams]:
    """Returns the parameters of each prompt, whose vector has `size` numbers. Raises
    RequestError.
    """
    default = params or PoolingParams()
    each = [*default] if isinstance(default, Sequence) else [default] * num_prompts
    for given in each:
        if not isinstance(given, PoolingParams):
            raise RequestError(
                f"pooling_params must be PoolingParams, not a {type(given).__name__}",
                param="pooling_params",
            )
        if given.dimensions is not None and given.dimensions > size:
            raise RequestError(
                f"dimensions: this model's vectors have {size}; leave it out",
                param="dimensions",
            )
    if len(each) != num_prompts:
        raise RequestError(
            f"{len(each)} pooling_params for {num_prompts} prompts; give one, or one for "
            "each prompt",
            param="pooling_params",
        )
    return each
