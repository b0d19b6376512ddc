"""What is measured of a level."""

from attrs import frozen


@frozen(kw_only=True)
class Memory:
    """Bytes, as planned before loading, and of the tensors that an engine holds."""

    weights_planned: int
    weights_held: int
    kv_planned: int
    kv_held: int
    kv_blocks: int
    kv_of_token: int
    state: int  # of a sequence, of recurrent layers; 0: there are none


@frozen(kw_only=True)
class Quality:
    """Figures of a text. The last two are None for the base."""

    perplexity: float
    kl_divergence: float | None  # nats
    top1_agreement: float | None  # a share


@frozen(kw_only=True)
class Speed:
    """Figures of requests that arrive at once."""

    batch: int
    ttft: float  # seconds
    tpot: float  # seconds
    throughput: float  # output tokens a second, of the whole batch


@frozen(kw_only=True)
class LevelResult:
    """All that is measured of a level."""

    level: str
    model: str
    dtype: str  # of activations
    matrices: str  # how those of layers are stored
    kv_dtype: str
    state_dtype: str | None  # None: there are no recurrent layers
    memory: Memory
    quality: Quality
    speeds: tuple[Speed, ...]
