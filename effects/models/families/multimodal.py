"""Multimodal models whose text half is a model of the family table.

Such a checkpoint has the tensors of a language model, under names of their own, beside
those of towers that read images, video or audio and of what projects into the language
model. minfer runs the language model alone: with text, the class of transformers computes
the same. A row says which class that is, what its text half may be, and how the names of
the other parts' tensors begin; these are not read, and a tensor that no row names is an
error.

The text half has a config of its own, `text_config`. Its `model_type` is a family's, or
that of a row of text_halves.py.
A class that computes its logits in another way than the text model does alone (scales,
caps) is not in the table with that text model: `texts` lists those that are alike.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

# How names of the text half's tensors begin, before `model.` or after it.
TEXT_PREFIXES: Final = ("language_model.", "text_model.")


@frozen(kw_only=True)
class Multimodal:
    """A multimodal class of transformers."""

    architecture: str
    model_type: str
    texts: tuple[str, ...]  # `model_type`s of `text_config`; the first, if it has none
    # How the names of other parts' tensors begin, with `model.` before it or without.
    other_parts: tuple[str, ...]
    flat: bool = False  # the fields of `text_config` may stand in the config itself
    # Embeddings are tied if the config or its `text_config` says so; else the config
    # decides, and `text_config` where the config says nothing.
    tied_by_either: bool = False
    tied_by_text: bool = False  # or `text_config` alone decides
    # transformers' class fails without an image (in 5.24), its text half's does not.
    text_class: bool = False


_PLAIN: Final = ("llama", "mistral", "qwen2", "qwen3")
_VISION: Final = ("vision_tower.", "multi_modal_projector.")
_LLAVA_NEXT: Final = (*_VISION, "image_newline")
_IDEFICS: Final = ("vision_model.", "connector.")
_ROWS: Final = (
    Multimodal(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        texts=("gemma3_text",),
        other_parts=_VISION,
    ),
    Multimodal(
        architecture="Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl",
        texts=("qwen2_vl_text",),
        other_parts=("visual.",),
        flat=True,
        tied_by_either=True,
    ),
    Multimodal(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        texts=("qwen2_5_vl_text",),
        other_parts=("visual.",),
        flat=True,
        tied_by_either=True,
    ),
    Multimodal(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        texts=("qwen3_vl_text",),
        other_parts=("visual.",),
    ),
    Multimodal(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
        texts=("qwen3_vl_moe_text",),
        other_parts=("visual.",),
    ),
    Multimodal(
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5",
        texts=("qwen3_5_text",),
        other_parts=("visual.",),
    ),
    Multimodal(
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        texts=("qwen3_5_moe_text",),
        other_parts=("visual.",),
    ),
    Multimodal(
        architecture="Glm4vForConditionalGeneration",
        model_type="glm4v",
        texts=("glm4v_text",),
        other_parts=("visual.",),
        tied_by_either=True,
    ),
    Multimodal(
        architecture="Glm46VForConditionalGeneration",
        model_type="glm46v",
        texts=("glm4v_text", "glm4v_moe_text"),
        other_parts=("visual.",),
    ),
    Multimodal(
        architecture="Glm4vMoeForConditionalGeneration",
        model_type="glm4v_moe",
        texts=("glm4v_moe_text",),
        other_parts=("visual.",),
        tied_by_either=True,
    ),
    Multimodal(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        texts=("mistral", "ministral3", "mistral4"),
        other_parts=_VISION,
    ),
    Multimodal(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        texts=("llama4_text",),
        other_parts=("vision_model.", "multi_modal_projector."),
        tied_by_text=True,
        text_class=True,
    ),
    Multimodal(
        architecture="Gemma3nForConditionalGeneration",
        model_type="gemma3n",
        texts=("gemma3n_text",),
        other_parts=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    ),
    Multimodal(
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        texts=("gemma4_text",),
        other_parts=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    ),
    Multimodal(  # Kimi K2.5
        architecture="Kimi_K25ForConditionalGeneration",
        model_type="kimi_k25",
        texts=("deepseek_v3",),
        other_parts=("vision_tower.", "mm_projector."),
    ),
    Multimodal(
        architecture="InternVLForConditionalGeneration",
        model_type="internvl",
        texts=("qwen2", "llama", "mistral", "qwen3", "qwen3_moe"),
        other_parts=_VISION,
    ),
    Multimodal(
        architecture="LlavaForConditionalGeneration",
        model_type="llava",
        texts=_PLAIN,
        other_parts=_VISION,
        tied_by_either=True,
    ),
    Multimodal(
        architecture="LlavaNextForConditionalGeneration",
        model_type="llava_next",
        texts=_PLAIN,
        other_parts=_LLAVA_NEXT,
    ),
    Multimodal(
        architecture="LlavaNextVideoForConditionalGeneration",
        model_type="llava_next_video",
        texts=_PLAIN,
        other_parts=_LLAVA_NEXT,
        tied_by_either=True,
    ),
    Multimodal(
        architecture="VipLlavaForConditionalGeneration",
        model_type="vipllava",
        texts=_PLAIN,
        other_parts=_VISION,
    ),
    Multimodal(
        architecture="VideoLlavaForConditionalGeneration",
        model_type="video_llava",
        texts=_PLAIN,
        other_parts=("image_tower.", "video_tower.", "multi_modal_projector."),
    ),
    Multimodal(
        architecture="LlavaOnevisionForConditionalGeneration",
        model_type="llava_onevision",
        texts=("qwen2", "llama", "mistral", "qwen3"),
        other_parts=_LLAVA_NEXT,
        tied_by_either=True,
    ),
    Multimodal(
        architecture="Idefics3ForConditionalGeneration",
        model_type="idefics3",
        texts=("llama",),
        other_parts=_IDEFICS,
    ),
    Multimodal(
        architecture="SmolVLMForConditionalGeneration",
        model_type="smolvlm",
        texts=("llama",),
        other_parts=_IDEFICS,
    ),
)
MULTIMODAL: Final[Mapping[str, Multimodal]] = {row.model_type: row for row in _ROWS}
_BASE: Final[Mapping[str, Any]] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
# The sizes that a `text_config` leaves out, by its `model_type`: LLaVA's name only those
# that differ from the ones that transformers assumes.
TEXT_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {**_BASE, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {**_BASE, "vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": {**_BASE, "vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {**_BASE, "vocab_size": 151936, "intermediate_size": 22016},
}
