"""Which keys of a `quantization_config` are read, and which change nothing.

A key that is in no list may say what the tensors mean, so it is refused by its name. Null
counts as absent.
"""

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.fields import refuse_field


@frozen
class FormatKeys:
    """The keys of a format's config, or of an object in it."""

    read: frozenset[str]
    inert: frozenset[str] = frozenset()  # no value changes what tensors mean
    # Those that ask for nothing with these values, and are refused with others.
    neutral: Mapping[str, tuple[Any, ...]] = {}


def check_keys(
    reader: ConfigReader, label: str, quant_config: object, format_keys: FormatKeys
) -> None:
    """Refuse keys that are not known, of a config's object; `label` names it. Raises
    `UnsupportedModelError`.
    """
    if not isinstance(quant_config, dict):
        return
    inner = ConfigReader(quant_config, f"{reader.source}: quantization_config ({label})")
    for key in sorted(
        map(str, quant_config.keys() - format_keys.read - format_keys.inert)
    ):
        if key in format_keys.neutral:
            refuse_field(inner, key, format_keys.neutral[key])
        elif quant_config.get(key) is not None:
            raise inner.refusal(
                f"key {key!r} is not known, and may say what the tensors mean; remove "
                f"it if it does not"
            )


def words(*lines: str) -> frozenset[str]:
    """Returns the names in these lines."""
    return frozenset(" ".join(lines).split())


# Of AutoRound: activations stay as they are.
PLAIN_ACTIVATIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "data_type": ("int",),
    "act_bits": (16,),
    "act_data_type": ("float",),
    "act_group_size": (-1, 128),
    "act_sym": (True, False),
    "act_dynamic": (True, False),
    "super_bits": (),
    "super_group_size": (),
}
# What those who quantize with GPTQ and AWQ write of how they did it (AutoGPTQ, GPTQModel,
# AutoAWQ, AutoRound, transformers): calibration, machines, which modules. The names of
# tensors say which modules are quantized.
MADE_WITH: Final = words(
    "damp_percent damp_auto_increment true_sequential static_groups mse hyb_act",
    "act_group_aware gptaq foem hessian v2 failsafe fallback weight_only moe gc_mode",
    "offload_to_disk offload_to_disk_path parallel_packing mock_quantization device",
    "dense_vram_strategy moe_vram_strategy compute_device_filter preprocessors process",
    "auto_forward_data_parallel wait_for_submodule_finalizers meta quantizer lm_head",
    "model_name_or_path model_file_base_name tokenizer dataset batch_size model_seqlen",
    "block_name_to_quantize module_name_preceding_first_block to_quant_block_names",
    "modules_in_block_to_quantize modules_to_not_convert cache_block_outputs backend",
    "pad_token_id max_input_length use_exllama disable_exllama exllama_config",
    "use_cuda_fp16 do_fuse fuse_max_seq_len modules_to_fuse quant_block_list",
    "autoround_version iters lr minmax_lr nsamples seqlen amp enable_minmax_tuning",
    "enable_quanted_input enable_norm_bias_tuning gradient_accumulate_steps",
    "low_gpu_mem_usage low_cpu_mem_usage scale_dtype packing_format provider",
)
