"""Tiny random checkpoints of every row of the table of multimodal models."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.effects.tiny_families import SIZES, VARIANTS, WINDOW, class_of, randomise

Config = dict[str, Any]

_HIDDEN: Final = SIZES["hidden_size"]
_QWEN: Final = {"depth": 1, "num_heads": 2, "patch_size": 4}
_PROJECTED: Final = {"hidden_size": 16, "out_hidden_size": _HIDDEN}
_CLIP: Final = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_KIMI: Final = {
    **{key: value for key, value in _CLIP.items() if key != "image_size"},
    "pos_emb_height": 2,
    "pos_emb_width": 2,
}
_AUDIO: Final = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}
# Gemma 3n's embeddings of tokens of images and sound, which no prompt has.
_BEHIND_TEXT: Final = {"vocab_size": 4, "vocab_offset": 1000, "rms_norm_eps": 1e-6}
_CONFORMER: Final = _BEHIND_TEXT | {
    "hidden_size": 16,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "conf_attention_chunk_size": 4,
    "conf_attention_context_left": 3,
    "input_feat_size": 16,
    "sscp_conv_channel_size": [4, 4],
}
# Of each class: the config of its tower, and the other fields that its parts need.
_TOWERS: Final[dict[str, tuple[Config, Config]]] = {
    "Gemma3": (_CLIP | {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "Qwen2VL": (_QWEN | {"embed_dim": 16, "hidden_size": _HIDDEN}, {}),
    "Qwen2_5_VL": (_QWEN | _PROJECTED | {"intermediate_size": 16}, {}),
    "Qwen3VL": (
        _QWEN
        | _PROJECTED
        | {
            "intermediate_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        {},
    ),
    "Glm4vMoe": (_QWEN | _PROJECTED | {"intermediate_size": 16, "image_size": 8}, {}),
    "Mistral3": (_CLIP | {"model_type": "pixtral", "head_dim": 8}, {}),
    "Llama4": (
        _CLIP
        | {
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {},
    ),
    "Gemma4": (
        _CLIP | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 4},
        {"audio_config": _AUDIO},
    ),
    "Gemma3n": (_CLIP | _BEHIND_TEXT, {"audio_config": _CONFORMER}),
    "Kimi_K25": (_KIMI, {"projection_hidden_size": 16}),
    "InternVL": (
        _CLIP
        | {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
        {},
    ),
    "Llava": (_CLIP | {"model_type": "clip_vision_model"}, {}),
    "LlavaNext": (_CLIP | {"model_type": "clip_vision_model"}, {}),
    "LlavaNextVideo": (_CLIP | {"model_type": "clip_vision_model"}, {}),
    "VipLlava": (_CLIP | {"model_type": "clip_vision_model"}, {}),
    "VideoLlava": (_CLIP | {"model_type": "clip_vision_model"}, {}),
    "LlavaOnevision": (_CLIP | {"model_type": "siglip_vision_model"}, {}),
    "Idefics3": (_CLIP, {}),
    "SmolVLM": (_CLIP, {}),
}
_QWEN3_5: Final = {
    key: value
    for key, value in _TOWERS["Qwen3VL"][0].items()
    if key != "deepstack_visual_indexes"
}
TOWERS: Final = _TOWERS | {
    "Qwen3VLMoe": _TOWERS["Qwen3VL"],
    "Qwen3_5": (_QWEN3_5, {}),
    "Qwen3_5Moe": (_QWEN3_5, {}),
    "Glm4v": _TOWERS["Glm4vMoe"],
    "Glm46V": (_TOWERS["Glm4vMoe"][0] | {"model_type": "glm4v_vision"}, {}),
}
_TIED: Final = {"tie_word_embeddings": True}
_NO_DIM: Final[Config] = {"head_dim": ...}  # the class divides hidden_size
_SHARE: Final = "partial_rotary_factor"
_THETA: Final = {"rope_type": "default", "rope_theta": 777.0}
_SECTIONS: Final = {**_THETA, "mrope_section": [2, 3, 3]}
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WINDOWS: Final = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
_QWEN2_VL: Final[dict[str, Config]] = {
    "sections": _NO_DIM | {"rope_parameters": _SECTIONS},
    "tied": _NO_DIM | _TIED | {"rope_parameters": _SECTIONS, "rms_norm_eps": 1e-2},
    "yarn": _NO_DIM | {"rope_parameters": _YARN | {"mrope_section": [4, 2, 2]}},
    "windows": _NO_DIM | _WINDOWS | {"rope_parameters": _SECTIONS},
}
_INTERLEAVED: Final = _SECTIONS | {"mrope_interleaved": True}
_QWEN3_VL: Final[dict[str, Config]] = {
    "sections": {"rope_parameters": _INTERLEAVED},
    "tied": _TIED | {"rope_parameters": _INTERLEAVED, "attention_bias": True},
    "heads": {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_parameters": _THETA | {"mrope_section": [6, 5, 5]},
    },
    "yarn": {"rope_parameters": _YARN | {"mrope_section": [4, 2, 2]}},
}
_MOE: Final = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_GLM4V: Final[dict[str, Config]] = {
    "sections": _NO_DIM | {"rope_parameters": _SECTIONS},
    "tied": _NO_DIM
    | _TIED
    | {"rope_parameters": _THETA | {"mrope_section": [2, 1, 1], _SHARE: 0.5}},
    "yarn": _NO_DIM
    | {
        "num_key_value_heads": 4,
        "rope_parameters": _YARN | {"mrope_section": [4, 2, 2]},
    },
    "heads": _NO_DIM
    | {
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-2,
        "rope_parameters": _SECTIONS | {_SHARE: 1.0},
    },
}
_GLM: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "rope_parameters": _THETA | {"mrope_section": [2, 1, 1]},
}


def _texts(family: str, *names: str) -> dict[str, Config]:
    """Variants of a family, as a text half."""
    kind = str(class_of(family).model_type)
    return {
        f"{kind} {name}": _NO_DIM | VARIANTS[family, name] | {"model_type": kind}
        for name in names
    }


def _all_texts(family: str) -> dict[str, Config]:
    """All variants of a family, as a text half."""
    return _texts(family, *(name for of, name in VARIANTS if of == family))


_ANY: Final = {
    **_texts("Llama", "plain", "biases, tied"),
    **_texts("Mistral", "window", "rope yarn"),
    **_texts("Qwen2", "windows above"),
    **_texts("Qwen3", "biases, windows"),
}
# The text halves of each class.
HALVES: Final[Mapping[str, Mapping[str, Config]]] = {
    "Qwen2VL": _QWEN2_VL,
    "Qwen2_5_VL": _QWEN2_VL,
    "Qwen3VL": _QWEN3_VL,
    "Qwen3VLMoe": {
        "sections": _MOE | {"rope_parameters": _INTERLEAVED},
        "tied": _MOE | _TIED | {"rope_parameters": _INTERLEAVED, "attention_bias": True},
        "dense layers": _MOE | {"mlp_only_layers": [1], "rope_parameters": _YARN},
        "every second": _MOE | {"decoder_sparse_step": 2, "num_key_value_heads": 4},
    },
    "Glm4vMoe": {
        "sections": _GLM,
        "tied": _GLM
        | _TIED
        | {
            "attention_bias": False,
            "rope_parameters": _YARN | {"mrope_section": [1, 2, 1]},
        },
        "groups": _GLM | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
        "not normalised": _GLM
        | {
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "n_shared_experts": 1,
            "rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0},
        },
    },
    "Glm4v": _GLM4V,
    "Glm46V": {
        **{
            f"dense {name}": config | {"model_type": "glm4v_text"}
            for name, config in _GLM4V.items()
        },
        "mixture": _GLM | {"model_type": "glm4v_moe_text"},
    },
    "Mistral3": {
        **_texts("Mistral", "plain", "tied", "window", "rope yarn"),
        **_all_texts("Ministral3"),
        **_all_texts("Mistral4"),
    },
    "Llama4": _all_texts("Llama4"),
    "Gemma3n": _all_texts("Gemma3n"),
    "Qwen3_5": _all_texts("Qwen3_5"),
    "Qwen3_5Moe": _all_texts("Qwen3_5Moe"),
    "Gemma4": _all_texts("Gemma4"),
    "Kimi_K25": {
        **_texts("DeepseekV3", "groups", "yarn", "halves"),
        **{
            f"{name}, tied": config | _TIED
            for name, config in _texts("DeepseekV3", "yarn").items()
        },
    },
    "InternVL": {**_ANY, **_texts("Qwen3Moe", "normalised")},
    "Llava": _ANY,
    "LlavaNext": _ANY,
    "LlavaNextVideo": _ANY,
    "VipLlava": _ANY,
    "VideoLlava": _ANY,
    "LlavaOnevision": _ANY,
    "Idefics3": _texts("Llama", "plain", "tied", "biases, tied", "rope llama3"),
    "SmolVLM": _texts("Llama", "plain", "tied", "biases, tied", "rope llama3"),
    "Gemma3": {
        name: VARIANTS["Gemma3", name] | {"model_type": "gemma3_text"}
        for name in ("pattern", "ropes")
    },
}
VARIANTS_OF_HALVES: Final = [
    (name, variant) for name, variants in HALVES.items() for variant in variants
]
_LLAVA: Final = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.", ""),
)
# Classes whose published checkpoints have the experts of a layer in one tensor.
_STACKED: Final = ("Mistral3", "Llama4", "Gemma4")
# How published checkpoints call what the classes of transformers call otherwise.
PUBLISHED_NAMES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    **dict.fromkeys(
        ("Gemma3", "Mistral3", "Kimi_K25", "InternVL", "Llava", "LlavaNext"), _LLAVA
    ),
    **dict.fromkeys(
        ("LlavaNextVideo", "LlavaOnevision", "VideoLlava", "VipLlava"), _LLAVA
    ),
    **dict.fromkeys(
        ("Qwen2VL", "Qwen2_5_VL"),
        ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")),
    ),
}


def hf_config(name: str, variant: str, **changes: Any) -> Any:
    """The config of transformers of a variant, with changes of its text half."""
    tower, fields = TOWERS[name]
    text = SIZES | HALVES[name][variant] | changes
    text = {key: value for key, value in text.items() if value is not ...}
    tied = bool(text.get("tie_word_embeddings"))
    config_class: Any = getattr(transformers, f"{name}Config")
    if name == "Gemma3n":
        # Its class checks that the vision tower is its own, which the package timm has.
        config = config_class(text_config=text, tie_word_embeddings=tied, **fields)
        vars(config)["vision_config"] = transformers.SiglipVisionConfig(**tower)
        return config
    return config_class(
        text_config=text, vision_config=tower, tie_word_embeddings=tied, **fields
    )


def save_multimodal(
    folder: Path, name: str, variant: str, *, published: bool = False, **changes: Any
) -> Any:
    """Write a random checkpoint, with the names of transformers' class, or with those of
    `published` ones, and their form; returns transformers' model of it. `changes` are of
    the text half's config.
    """
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model = model_class(hf_config(name, variant, **changes)).eval()
    randomise(model, norms_near_one=name != "Gemma3")
    model.save_pretrained(folder, save_original_format=False)
    if published:
        file = folder / "model.safetensors"
        tensors = dict(
            stored
            for key, tensor in load_file(file).items()
            for stored in _as_published(name, key, tensor)
        )
        save_file(tensors, file, {"format": "pt"})
    return model


def _as_published(name: str, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of a class as published checkpoints have it: Qwen3-VL's experts stacked as
    [experts, in, out], others one by one.
    """
    for pattern, replacement in PUBLISHED_NAMES.get(name, ()):
        key = re.sub(pattern, replacement, key)
    stem, _, matrix = key.rpartition(".")
    if not stem.endswith(".experts") or name in _STACKED:
        yield key, tensor
    elif name == "Qwen3VLMoe":
        yield key, tensor.mT.contiguous()
    else:
        for i, expert in enumerate(tensor):
            parts = {matrix: expert}
            if matrix == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, numbers in parts.items():
                yield f"{stem}.{i}.{part}.weight", numbers.clone()
