"""The sizes of attention in a GGUF file's metadata, as config.json has them."""

from typing import Any, Final

from minfer.effects.models.gguf.architectures import (
    EXPERT_COUNT,
    MULTIPLIERS,
    REQUIRED,
    SLIDING_WINDOW,
    SLIDING_WINDOW_PATTERN,
    TEMPERATURE,
    TEMPERATURE_LENGTH,
    Architecture,
)
from minfer.effects.models.gguf.container import GgufArray
from minfer.effects.models.gguf.gemma4_config import read_gemma4
from minfer.effects.models.gguf.hf_tensors import own_layers
from minfer.effects.models.gguf.metadata import GgufMetadata
from minfer.effects.models.gguf.rope_config import (
    read_longrope,
    read_rope_scaling,
)

# Of Gemma 2 and 3 of 27B: only these scale queries by (hidden size / heads) ** -0.5.
_GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
# Architectures whose windows are refused.
_WITHOUT_WINDOWS: Final = (
    *("granite", "smollm3", "olmo2", "glm4", "seed_oss"),
    *("ernie4_5", "hunyuan-dense", "minimax-m2"),
)
_SECTIONS: Final = ".rope.dimension_sections"
_NO_ROPE_INTERVAL: Final = 4  # of SmolLM3's layers; files do not say it
_MISTRAL4_BETA: Final = 0.1  # how much queries of published models grow
_COHERE2_INTERVAL: Final = 4  # of layers without a window
# Of Llama 4, as files do not say it: positions in a chunk, which are those after which
# queries grow, of how many layers one is not rotated, and the number of experts of the
# models that do not normalise heads (Maverick).
_LLAMA4_CHUNK: Final = 8192
_LLAMA4_INTERVAL: Final = 4
_MAVERICK_EXPERTS: Final = 128


def read_attention(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the fields about attention, windows and RoPE. Raises `GgufError`,
    `UnsupportedModelError`.
    """
    if arch.model_type == "gemma4_text":
        return read_gemma4(metadata)
    if arch.family.attention == "mla":
        return _latents(metadata, arch)
    heads = metadata.same_in_all_layers(".attention.head_count")
    hidden = metadata.integer(".embedding_length")
    head_dim = metadata.integer(".attention.key_length", hidden // heads)
    if metadata.integer(".attention.value_length", head_dim) != head_dim:
        raise metadata.error(
            ".attention.value_length", f"a head's dimensions, {head_dim}"
        )
    rotated = metadata.integer(".rope.dimension_count", head_dim)
    if rotated != head_dim and not arch.family.positions.partial:
        raise metadata.error(".rope.dimension_count", f"a head's dimensions, {head_dim}")
    config: dict[str, Any] = {
        "num_key_value_heads": metadata.same_in_all_layers(
            ".attention.head_count_kv", heads
        ),
        "head_dim": head_dim,
        "rope_scaling": (
            read_longrope(metadata, rotated)
            if arch.family.positions.longrope
            else read_rope_scaling(metadata, head_dim)
        ),
    }
    if arch.family.positions.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    if isinstance(arch.family.qk_norm.present, str):
        is_normed = "blk.0.attn_q_norm.weight" in metadata.file.tensors
        config[arch.family.qk_norm.present] = is_normed
    config |= _own_fields(metadata, arch.model_type, config["rope_scaling"])
    return config | _windows(metadata, heads, head_dim, hidden)


def _own_fields(
    metadata: GgufMetadata, model_type: str, scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the fields that one family alone has. Raises `GgufError`."""
    match model_type:
        case "gpt_oss" if scaling is not None:
            # Of its published config; files do not say it.
            return {"rope_scaling": scaling | {"truncate": False}}
        case "ministral3":
            return {"rope_scaling": _scaled_queries(metadata, scaling)}
        case "phi3":
            length = metadata.integer(".context_length")
            key = ".rope.scaling.original_context_length"
            return {"original_max_position_embeddings": metadata.integer(key, length)}
        case "glm4" if metadata.get(_SECTIONS) is not None:
            # Of GLM-4.1V, whose queries and keys are stored in another order.
            raise metadata.error(_SECTIONS, "absent")
        case "smollm3":
            return {"no_rope_layer_interval": _NO_ROPE_INTERVAL}
        case "granite":
            return _multipliers(metadata)
        case "cohere2":
            return {"logit_scale": metadata.number(".logit_scale")}
    return {}


def _scaled_queries(
    metadata: GgufMetadata, scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns `rope_scaling` of Ministral 3, whose queries grow with their positions."""
    if scaling is None or scaling["rope_type"] != "yarn":
        raise metadata.error(".rope.scaling.type", "yarn in Ministral 3")
    key = ".rope.scaling.yarn_log_multiplier"
    # 1: cosines and sines are not multiplied; 0: by what follows from the factor.
    if metadata.get(key) not in (None, 0.0, 1.0):
        raise metadata.error(key, "0 or 1")
    if metadata.get(key):
        scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return scaling | _query_growth(metadata, scaling, default=0.0)


def _query_growth(
    metadata: GgufMetadata, scaling: dict[str, Any], default: float
) -> dict[str, float]:
    """Returns how much queries grow with their positions, `default` if a file does not
    say it.
    """
    original = scaling["original_max_position_embeddings"]
    if metadata.integer(TEMPERATURE_LENGTH, original, low=0) not in (0, original):
        raise metadata.error(TEMPERATURE_LENGTH, f"the original context, {original}")
    value = metadata.get(TEMPERATURE)
    beta = metadata.number(TEMPERATURE, default) if value != 0 else 0.0
    return {"llama_4_scaling_beta": beta}


def _multipliers(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns Granite's multipliers. Its files without rotation are refused."""
    if not metadata.flag(".rope.scaling.finetuned", default=True):
        raise metadata.error(".rope.scaling.finetuned", "true: heads are rotated")
    return {
        name: metadata.number(key, ... if key in REQUIRED else 1.0)
        for key, name in MULTIPLIERS.items()
    }


def _latents(metadata: GgufMetadata, arch: Architecture) -> dict[str, Any]:
    """Returns the sizes of latents. Files with keys and values of latents apart have one
    key head, and the sizes of heads under other keys.
    """
    rotated = metadata.integer(".rope.dimension_count")
    key_dim, value_dim = (
        metadata.integer(f".attention.{kind}_length_mla", 0, low=0)
        or metadata.integer(f".attention.{kind}_length")
        for kind in ("key", "value")
    )
    if key_dim <= rotated:
        raise metadata.error(".attention.key_length", f"more than {rotated}")
    scaling = read_rope_scaling(metadata, rotated)
    if scaling is not None and metadata.get(".rope.scaling.yarn_log_multiplier"):
        # Stored as a tenth of what config.json has for scores; of deepseek2 that for
        # cosines is the same, else it is 1, as in llama.cpp.
        mscale = 10 * metadata.number(".rope.scaling.yarn_log_multiplier")
        of_cosines = mscale if metadata.arch == "deepseek2" else 1.0
        scaling |= {"mscale": of_cosines, "mscale_all_dim": mscale}
    if arch.model_type == "mistral4":
        if scaling is None or scaling["rope_type"] != "yarn":
            raise metadata.error(".rope.scaling.type", "yarn in Mistral 4")
        # Converters leave it out of files of Mistral Small 4.
        scaling |= _query_growth(metadata, scaling, default=_MISTRAL4_BETA)
    ranks = {
        f"{name}_lora_rank": metadata.integer(f".attention.{name}_lora_rank")
        for name in ("q", "kv")
        if name == "kv" or metadata.get(".attention.q_lora_rank") is not None
    }
    return {
        "q_lora_rank": None,
        **ranks,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": value_dim,
        "rope_scaling": scaling,
    }


def _windows(
    metadata: GgufMetadata, heads: int, head_dim: int, hidden: int
) -> dict[str, Any]:
    """Returns the sliding window of Mistral's and gpt-oss' layers, or the sizes of
    Gemma's layers with and without windows.
    """
    arch = metadata.arch
    if arch == "llama4":
        return _chunks(metadata)
    if arch == "cohere2":
        return {
            "sliding_window": metadata.integer(SLIDING_WINDOW),
            "layer_types": _layer_types(metadata, _COHERE2_INTERVAL),
        }
    if arch == "llama" and metadata.get(SLIDING_WINDOW) is not None:
        return {"sliding_window": metadata.integer(SLIDING_WINDOW)}
    if arch in ("llama", "mistral3"):
        _refuse_window(metadata)  # of mistral3
        return {"sliding_window": None}
    if arch == "gpt-oss":
        return {"sliding_window": metadata.integer(SLIDING_WINDOW)}
    if arch == "phi3":  # 0: there is none
        return {"sliding_window": metadata.integer(SLIDING_WINDOW, low=0) or None}
    if arch not in _GEMMA_27B_LAYERS:
        if arch in _WITHOUT_WINDOWS:
            _refuse_window(metadata)
        return {}
    is_27b = own_layers(metadata) == _GEMMA_27B_LAYERS[arch]
    config: dict[str, Any] = {
        "query_pre_attn_scalar": hidden // heads if is_27b else head_dim
    }
    if arch == "gemma2":  # as llama.cpp reads older files
        return config | {
            "sliding_window": metadata.integer(SLIDING_WINDOW, 4096),
            "sliding_window_pattern": metadata.integer(SLIDING_WINDOW_PATTERN, 2),
            "attn_logit_softcapping": metadata.number(".attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.number(".final_logit_softcapping", 30.0),
        }
    return config | {
        "sliding_window": metadata.integer(SLIDING_WINDOW),
        "sliding_window_pattern": metadata.integer(SLIDING_WINDOW_PATTERN, 6),
        "rope_theta": metadata.number(".rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
    }


def _chunks(metadata: GgufMetadata) -> dict[str, Any]:
    """Returns Llama 4's chunks and what goes with them, as llama.cpp has them: with a
    window of 0, all layers are rotated and attend to all keys.
    """
    if metadata.integer(SLIDING_WINDOW, _LLAMA4_CHUNK, low=0) not in (0, _LLAMA4_CHUNK):
        raise metadata.error(SLIDING_WINDOW, f"0 or {_LLAMA4_CHUNK}")
    if metadata.get(SLIDING_WINDOW_PATTERN) not in (None, _LLAMA4_INTERVAL):
        raise metadata.error(SLIDING_WINDOW_PATTERN, str(_LLAMA4_INTERVAL))
    base, key = metadata.number(".rope.freq_base", 10000.0), ".rope.freq_base_swa"
    if metadata.number(key, base) != base:
        raise metadata.error(key, f"that of all layers, {base:g}")
    config = {
        "attention_chunk_size": _LLAMA4_CHUNK,
        "no_rope_layer_interval": _LLAMA4_INTERVAL,
        "attn_temperature_tuning": True,
        "floor_scale": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "use_qk_norm": metadata.get(EXPERT_COUNT) != _MAVERICK_EXPERTS,
    }
    if metadata.get(SLIDING_WINDOW) == 0:
        rotated = [1] * own_layers(metadata)
        return config | {"attention_chunk_size": None, "no_rope_layers": rotated}
    return config


def _layer_types(metadata: GgufMetadata, interval: int) -> list[str]:
    """Returns which layers have a window: those that a file lists, or all but each
    `interval`-th, unless it has another number.
    """
    layers = own_layers(metadata)
    if isinstance(metadata.get(SLIDING_WINDOW_PATTERN), GgufArray):
        windowed = metadata.array(SLIDING_WINDOW_PATTERN).numbers()
        if len(windowed) != layers:
            raise metadata.error(SLIDING_WINDOW_PATTERN, f"{layers} elements")
    else:
        interval = metadata.integer(SLIDING_WINDOW_PATTERN, interval)
        windowed = tuple((layer + 1) % interval for layer in range(layers))
    return ["sliding_attention" if window else "full_attention" for window in windowed]


def _refuse_window(metadata: GgufMetadata) -> None:
    """Refuse a window of layers of which files do not say enough (OLMo 3)."""
    if metadata.get(SLIDING_WINDOW):
        raise metadata.error(SLIDING_WINDOW, "0: windows are not supported here")
