"""What the rows of the family table say of MTP heads in checkpoints; see family.py, and
architecture/draft_head.py on what a head is.
"""

from typing import Final

from attrs import evolve, frozen


@frozen(kw_only=True)
class MtpKeys:
    """The tensors of an MTP head, where `{layers}` is the number of the model's layers,
    and its layer, which is like one of the model's.
    """

    counts: tuple[str, ...]  # keys of the number of heads, of which the first is used
    default_count: int = 0  # where a config has none of them
    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str  # how the names of the layer's tensors begin
    norm: str  # of the layer's result; empty: there is none
    before_feed: str = ""  # another name of the norm before the feed-forward
    # The layer is like the model's last one with a window, not like the last one without;
    # and has a dense feed-forward in a model with experts.
    windowed: bool = False
    dense: bool = False
    # The next draft gets the layer's result behind the last norm, not before it.
    chains_normed: bool = False
    copies: tuple[str, ...] = ()  # of the model's own tensors, which are not read


QWEN_MTP: Final = MtpKeys(  # Qwen3-Next and Qwen3.5
    counts=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    default_count=1,
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    layer="mtp.layers.0.",
    norm="mtp.norm",
    chains_normed=True,
)
GLM_MTP: Final = MtpKeys(
    counts=("num_nextn_predict_layers",),
    embedding_norm="model.layers.{layers}.enorm",
    hidden_norm="model.layers.{layers}.hnorm",
    projection="model.layers.{layers}.eh_proj",
    layer="model.layers.{layers}.",
    norm="model.layers.{layers}.shared_head.norm",
    copies=(
        "model.layers.{layers}.embed_tokens.",
        "model.layers.{layers}.shared_head.head.",
    ),
)
DEEPSEEK_MTP: Final = evolve(GLM_MTP, chains_normed=True)
ERNIE_MTP: Final = MtpKeys(
    counts=("num_nextn_predict_layers",),
    embedding_norm="model.mtp_emb_norm.0",
    hidden_norm="model.mtp_hidden_norm.0",
    projection="model.mtp_linear_proj.0",
    layer="model.mtp_block.0.",
    norm="",
    dense=True,
)
MIMO_MTP: Final = MtpKeys(
    counts=("num_nextn_predict_layers",),
    default_count=1,
    embedding_norm="model.mtp.layers.0.enorm",
    hidden_norm="model.mtp.layers.0.hnorm",
    projection="model.mtp.layers.0.eh_proj",
    layer="model.mtp.layers.0.",
    norm="model.mtp.layers.0.final_layernorm",
    before_feed="pre_mlp_layernorm",
    windowed=True,
    dense=True,
    chains_normed=True,
)
