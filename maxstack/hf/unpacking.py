"""The reader of a folder's weights by the quantization that its config.json names."""

from collections.abc import Callable, Mapping
from typing import Any

from maxstack.errors import ConfigError, shortened
from maxstack.hf import low_bits, quantized
from maxstack.hf.quantized import Unpack

EIGHT_BITS = "int-quantized", "float-quantized", "naive-quantized"


def _compressed(settings: Mapping[str, Any]) -> Unpack:
    if settings.get("format") in EIGHT_BITS:
        return low_bits.eight_bits(settings)
    return quantized.compressed(settings)


METHODS: dict[str, Callable[[Mapping[str, Any]], Unpack]] = {
    "mxfp4": quantized.mxfp4,
    "fp8": quantized.fp8,
    "compressed-tensors": _compressed,
    "awq": low_bits.awq,
    "gptq": low_bits.gptq,
    "bitsandbytes": low_bits.bitsandbytes,
}

KEYS = {
    "mxfp4": "modules_to_not_convert dequantize",
    "fp8": """weight_block_size fmt activation_scheme expert_dtype scale_fmt modules_to_not_convert
    modules_to_convert ignored_layers dequantize""",
    "compressed-tensors": """config_groups format sparsity_config kv_cache_scheme ignore version
    quantization_status global_compression_ratio run_compressed dequantize
    use_optimized_inference""",
    "awq": """bits group_size zero_point version format backend do_fuse fuse_max_seq_len
    modules_to_fuse modules_to_not_convert exllama_config sym desc_act act_group_aware
    true_sequential damp_percent cache_block_outputs batch_size meta""",
    "gptq": """bits group_size checkpoint_format format pack_dtype is_marlin_format desc_act sym
    static_groups damp_percent damp_auto_increment true_sequential lm_head mse gptaq hyb_act
    act_group_aware parallel_packing meta model_name_or_path model_file_base_name tokenizer dataset
    model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id
    max_input_length cache_block_outputs modules_in_block_to_quantize use_exllama disable_exllama
    exllama_config use_cuda_fp16 backend""",
    "bitsandbytes": """_load_in_4bit _load_in_8bit load_in_4bit load_in_8bit bnb_4bit_compute_dtype
    bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_skip_modules
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold""",
}
"""Keys of quantization_config that are read, that tensors say themselves (their types and which
there are), or that are of how numbers were found, how programs run, and of activations and caches,
which are computed in floats."""


def unpacking(settings: Any, where: str) -> Unpack:
    """Function from the tensors of a folder to its whole weights, for the quantization_config of
    the config.json at `where`. ConfigError for a quantization that is not read here."""
    if not settings:
        return lambda tensors: tensors
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if not isinstance(settings, Mapping) or method not in METHODS:
        raise ConfigError(
            f"{where}: weights quantized by {shortened(str(method))} are not supported; those by "
            f"{', '.join(METHODS)} are; use the unquantized version of the model"
        )
    try:
        quantized.check_keys(settings, f"quant_method {KEYS[method]}")
        return METHODS[method](settings)
    except ValueError as error:
        raise ConfigError(
            f"{where}: quantization_config: {error}; use the unquantized version of the model"
        ) from None
