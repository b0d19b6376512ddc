"""The supported architectures of GGUF files, and the names of their tensors."""

from collections.abc import Mapping
from typing import Final

from attrs import evolve, frozen

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.families.family import Family
from minfer.effects.models.families.table import BY_MODEL_TYPE
from minfer.effects.models.gguf.metadata import GgufMetadata

EXPERT_COUNT: Final = ".expert_count"
SLIDING_WINDOW: Final = ".attention.sliding_window"
SLIDING_WINDOW_PATTERN: Final = ".attention.sliding_window_pattern"
TEMPERATURE: Final = ".attention.temperature_scale"
TEMPERATURE_LENGTH: Final = ".attention.temperature_length"
MOE_STEP: Final = ".interleave_moe_layer_step"


@frozen(kw_only=True)
class Architecture:
    """A value of `general.architecture`."""

    name: str
    model_type: str  # in the checkpoint's config.json
    # Queries and keys are stored for RoPE that turns neighbouring dimensions (GPT-J's),
    # not halves of a head (GPT-NeoX's).
    interleaved: bool = False
    norms_plus_one: bool = False  # norms' weights are stored with 1 added (Gemma)
    # The name in files of the norm before the feed-forward.
    feed_norm: str = "ffn_norm"
    # Keys of the metadata that are read, and that other architectures refuse.
    reads: frozenset[str] = frozenset()

    @property
    def family(self) -> Family:
        """The row of the table of families (families/)."""
        return BY_MODEL_TYPE[self.model_type]

    @property
    def layer_names(self) -> Mapping[str, str]:
        """Names of a layer's tensors in the checkpoint, by their names in the file."""
        norms = self.family.norms.names
        feed_forward = self.family.stored.feed_forward
        names = {
            **_ATTENTION,
            **{name: f"{feed_forward}.{matrix}" for name, matrix in _MATRICES.items()},
            "attn_norm": norms.before_attention,
            "post_attention_norm": norms.after_attention,
            self.feed_norm: norms.before_feed,
            "post_ffw_norm": norms.after_feed,
        }
        names = {stored: name for stored, name in names.items() if name}
        names["attn_q_norm"], names["attn_k_norm"] = self.family.qk_norm.names
        if qkv := self.family.stored.qkv:
            names["attn_qkv"] = f"self_attn.{qkv}"
        if gate_up := self.family.stored.gate_up:
            names["ffn_up"] = f"mlp.{gate_up}"
        if self.family.attention == "mla":
            names |= _MLA
        if (keys := self.family.experts) is not None:
            shared = keys.shared.name
            names["ffn_gate_inp"] = keys.stored.router
            names["ffn_gate_inp_shexp"] = f"{shared}_gate"
            for name, matrix in _MATRICES.items():
                names[f"{name}_shexp"] = f"{shared}.{matrix}"
            if keys.beside is not None:
                names["pre_ffw_norm_2"] = keys.beside.experts
                names["post_ffw_norm_1"] = keys.beside.dense_result
                names["post_ffw_norm_2"] = keys.beside.experts_result
        if self.family.extras.inputs:
            names |= _LAYER_INPUT
        return names

    @property
    def whole_names(self) -> Mapping[str, str]:
        """Names of a layer's tensors in the checkpoint that end otherwise than in the
        file, by their whole names there.
        """
        keys = self.family.experts
        names = {"attn_sinks.weight": "self_attn.sinks"}
        if self.family.extras.scalars:
            names["layer_output_scale.weight"] = "layer_scalar"
        if keys is not None and keys.routing.correction:
            names["exp_probs_b.bias"] = keys.routing.correction
        if keys is not None and keys.beside is not None:
            router = keys.stored.router.rpartition(".")[0]
            names["ffn_gate_inp.scale"] = f"{router}.scale"
            names["ffn_down_exps.scale"] = f"{router}.per_expert_scale"
        return names

    @property
    def global_names(self) -> Mapping[str, str]:
        """Names in the checkpoint of tensors outside layers, by their names in the
        file.
        """
        inputs = _INPUT_TABLE if self.family.extras.inputs else {}
        return {**_GLOBAL, **inputs}

    @property
    def expert_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of an expert's matrices in the checkpoint, by the name of the tensor in
        the file that holds them, one after the other, of each expert.
        """
        if self.family.experts is None:
            return {}
        gate, up, down = self.family.experts.stored.matrices
        return {
            "ffn_gate_exps": (gate,),
            "ffn_up_exps": (up,),
            "ffn_gate_up_exps": (gate, up),
            "ffn_down_exps": (down,),
        }


_GLOBAL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Of what makes inputs of layers (Gemma 4), and in each layer of what uses its input.
_INPUT_TABLE: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_INPUT: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_MATRICES: Final = {
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_ATTENTION: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLA: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_ROUTED: Final = frozenset(
    {
        ".expert_gating_func",
        ".expert_group_count",
        ".expert_weights_scale",
        ".leading_dense_block_count",
    }
)
_FINAL_CAP: Final = ".final_logit_softcapping"
_YARN: Final = frozenset({".rope.scaling.yarn_log_multiplier"})
# Factors of queries by position.
_SCALED_QUERIES: Final = frozenset({TEMPERATURE, TEMPERATURE_LENGTH})
# Files of `mistral3` without these are of Mistral Small.
_MINISTRAL: Final = (TEMPERATURE, ".rope.scaling.yarn_log_multiplier")
# Of Granite's files, and what config.json calls them. Those in `REQUIRED` have no default
# that llama.cpp and transformers share.
MULTIPLIERS: Final = {
    ".attention.scale": "attention_multiplier",
    ".embedding_scale": "embedding_multiplier",
    ".logit_scale": "logits_scaling",
    ".residual_scale": "residual_multiplier",
}
REQUIRED: Final = (".attention.scale", ".logit_scale")
_ROWS: Final = (
    Architecture(name="llama", model_type="llama", interleaved=True),
    Architecture(name="qwen2", model_type="qwen2"),
    Architecture(name="qwen3", model_type="qwen3"),
    Architecture(name="qwen2moe", model_type="qwen2_moe"),
    Architecture(name="qwen3moe", model_type="qwen3_moe"),
    # Text is run alone, whose positions have equal sections (families/text_halves.py).
    Architecture(name="qwen2vl", model_type="qwen2"),
    Architecture(name="qwen3vl", model_type="qwen3"),
    Architecture(name="qwen3vlmoe", model_type="qwen3_moe"),
    Architecture(
        name="gemma2",
        model_type="gemma2",
        norms_plus_one=True,
        reads=frozenset({".attn_logit_softcapping", _FINAL_CAP}),
    ),
    Architecture(name="gemma3", model_type="gemma3_text", norms_plus_one=True),
    Architecture(name="gemma4", model_type="gemma4_text", reads=frozenset({_FINAL_CAP})),
    Architecture(
        name="llama4",
        model_type="llama4_text",
        reads=frozenset({".expert_gating_func", MOE_STEP}),
    ),
    Architecture(name="cohere2", model_type="cohere2", reads=frozenset({".logit_scale"})),
    Architecture(name="gpt-oss", model_type="gpt_oss", feed_norm="post_attention_norm"),
    Architecture(
        name="glm4moe",
        model_type="glm4_moe",
        feed_norm="post_attention_norm",
        reads=_ROUTED | {".nextn_predict_layers"},
    ),
    Architecture(
        name="deepseek2",
        model_type="deepseek_v2",
        reads=_ROUTED | _YARN | {".nextn_predict_layers"},
    ),
    Architecture(
        name="phi3", model_type="phi3", reads=frozenset({".rope.scaling.attn_factor"})
    ),
    Architecture(
        name="mistral3",
        model_type="ministral3",
        interleaved=True,
        reads=_YARN | _SCALED_QUERIES,
    ),
    Architecture(
        name="mistral4",
        model_type="mistral4",
        reads=_ROUTED | _YARN | _SCALED_QUERIES,
    ),
    Architecture(
        name="granite",
        model_type="granite",
        interleaved=True,
        reads=frozenset(MULTIPLIERS),
    ),
    Architecture(name="smollm3", model_type="smollm3", interleaved=True),
    Architecture(name="olmo2", model_type="olmo2"),
    Architecture(name="glm4", model_type="glm4"),
    Architecture(name="ernie4_5", model_type="ernie4_5"),
    Architecture(name="hunyuan-dense", model_type="hunyuan_v1_dense"),
    Architecture(
        name="minimax-m2",
        model_type="minimax_m2",
        reads=frozenset({".expert_gating_func"}),
    ),
    Architecture(name="seed_oss", model_type="seed_oss", feed_norm="post_attention_norm"),
)
ARCHITECTURES: Final = {row.name: row for row in _ROWS}


def architecture_of(metadata: GgufMetadata) -> Architecture:
    """Returns a file's architecture. Raises `UnsupportedModelError` if it is not
    supported.
    """
    architecture = ARCHITECTURES.get(metadata.arch)
    if architecture is None:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{metadata.file.path}: GGUF files of architecture {metadata.arch!r:.100} "
            f"are not supported; {supported} are. Give the Hugging Face checkpoint that "
            f"the file was made from"
        )
    if architecture.name == "llama" and metadata.integer(EXPERT_COUNT, 0, low=0):
        return evolve(architecture, model_type="mixtral")
    if architecture.name == "deepseek2" and metadata.get(TEMPERATURE):
        # Mistral Large 3, as Mistral's own files are converted.
        reads = architecture.reads | _SCALED_QUERIES
        return evolve(architecture, model_type="mistral4", reads=reads)
    if architecture.name == "deepseek2":
        return evolve(architecture, model_type=_deepseek_type(metadata))
    if architecture.name == "mistral3" and not any(map(metadata.get, _MINISTRAL)):
        return evolve(architecture, model_type="mistral", reads=frozenset())
    if architecture.name == "llama" and metadata.get(SLIDING_WINDOW) is not None:
        return evolve(architecture, model_type="mistral")
    return architecture


def _deepseek_type(metadata: GgufMetadata) -> str:
    """Returns the `model_type` of a model with latents: DeepSeek V3 and its kin (Kimi K2,
    GLM-4.7-Flash) correct the scores of experts, V2 does not, Youtu has none.
    """
    if any(name.endswith(".exp_probs_b.bias") for name in metadata.file.tensors):
        return "deepseek_v3"
    return "deepseek_v2" if metadata.integer(EXPERT_COUNT, 0, low=0) else "youtu"
