"""Refusals of models by kind, in the words that people use for them."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from minfer.effects.models.config_reader import ConfigReader

_STATE_SPACE: Final = "mamba mamba2 falcon_mamba bamba zamba zamba2 plamo2"
_RECURRENT: Final = "rwkv xlstm recurrent_gemma olmo_hybrid minimax bailing_hybrid"
_HYBRIDS: Final = (
    "models in which every layer is attention, and of those with recurrent layers "
    "Qwen3-Next, Qwen3.5, Kimi-Linear, Granite 4, Nemotron-H, Falcon-H1, Jamba and LFM2"
)
_ENCODERS: Final = (
    "bert roberta xlm-roberta camembert distilbert albert electra deberta deberta-v2 "
    "mpnet nomic_bert modernbert new xlnet"
)
_SEQ2SEQ: Final = "t5 mt5 umt5 longt5 bart mbart pegasus marian m2m_100 whisper t5gemma"
_SPARSE_MLA: Final = "deepseek_v32 deepseek_v4 glm_moe_dsa"
_DEEPSEEK_LIKE: Final = "DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral 4 and Youtu"
_MLA: Final = "minicpm3 longcat_flash"


def _rows(kinds: str, description: str) -> Mapping[str, str]:
    return dict.fromkeys(kinds.split(), description)


# What a model is, by its `model_type`.
KINDS: Final[Mapping[str, str]] = {
    **_rows(
        _STATE_SPACE,
        "a state space model (or has state space layers) of a form that has no kernels "
        f"here; {_HYBRIDS} work",
    ),
    **_rows(
        _RECURRENT,
        "recurrent (or has layers of linear attention or convolutions) in a form that "
        f"has no kernels here; {_HYBRIDS} work",
    ),
    **_rows(
        _ENCODERS, "an encoder, which does not generate text; causal language models work"
    ),
    **_rows(
        _SEQ2SEQ,
        "an encoder with a decoder, which attends to the encoder's output; models that "
        "are a decoder alone (causal language models) work",
    ),
    **_rows(
        _SPARSE_MLA,
        "MLA with sparse attention (an indexer chooses the tokens to attend to); "
        f"{_DEEPSEEK_LIKE}, whose MLA attends to all tokens, work",
    ),
    **_rows(
        _MLA,
        "MLA (multi-head latent attention) of another form than DeepSeek's; "
        f"{_DEEPSEEK_LIKE} work",
    ),
}
_DRAFT_HEAD: Final = "Eagle"  # in names of classes
# How names of tensors end that belong to quantized matrices.
_QUANTIZED: Final = (
    "_blocks",  # MXFP4
    "_scales",
    ".weight_scale_inv",  # FP8
    ".weight_scale",
    ".weight_packed",
    ".qweight",  # GPTQ, AWQ
    ".qzeros",
    ".g_idx",
    ".absmax",  # bitsandbytes
)
_INSTEAD: Final = (
    "config.json has no quantization_config, which says how it was quantized; use the "
    "config.json that belongs to these weights, or the unquantized checkpoint"
)


def refuse_kind(reader: ConfigReader, names: list[str]) -> None:
    """Refuse a model that neither minfer nor transformers' classes here can run, if its
    `model_type` or the `names` of its classes show what it is. Raises
    `UnsupportedModelError`.
    """
    kind = str(reader.config.get("model_type"))
    if heads := [name for name in names if _DRAFT_HEAD in name]:
        raise reader.refusal(
            f"{', '.join(heads)} is a draft head, which drafts tokens for a model; give "
            f"the model, and for an EAGLE-3 head --speculative-config "
            f'\'{{"method": "eagle3", "model": "path of the head"}}\''
        )
    stems = (re.split("For|Model|LMHead|Encoder", name)[0].lower() for name in names)
    types_by_stem = {kind.replace("_", "").replace("-", ""): kind for kind in KINDS}
    for model_type in (kind, *(types_by_stem.get(stem, "") for stem in stems)):
        if description := KINDS.get(model_type):
            name = ", ".join(names) or f"model_type {kind!r}"
            raise reader.refusal(f"{name} is not supported: it is {description}")


def quantized_objection(names: Iterable[str]) -> str | None:
    """Returns why tensors of these names, which the model does not have, are refused:
    they belong to quantized matrices.
    """
    quantized = next((name for name in names if name.endswith(_QUANTIZED)), None)
    return None if quantized is None else f"tensor {quantized} is quantized: {_INSTEAD}"
