"""quantization_config of config.json: which tensors of a folder are parts of packed weights.

Each method checks its settings and gives a function from the tensors of the files to the weights.
Each key is read, or known to change no weight, or refused by name: a setting that is passed over
would give a silently wrong model. Modules that a setting excludes need no rule, since they are
floats in the files.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from maxstack import strict_json
from maxstack.config.annotations import listed
from maxstack.errors import ConfigError, DataError, quoted, shortened
from maxstack.hf.packed_weights import (
    MXFP4,
    BlockFP8,
    Blockwise4,
    GroupInt4,
    GroupWords,
    PackedWeight,
    ScaledBytes,
)
from maxstack.hf.tensors import Tensor

log = logging.getLogger(__name__)
Settings = Mapping[str, Any]
Tensors = dict[str, Tensor]
Unpack = Callable[[Tensors], Tensors]
INT8_STEPS = 127
EIGHT_BITS = "int-quantized", "float-quantized", "naive-quantized"
GROUP = "targets weights input_activations output_activations format"
SCHEME = """num_bits type symmetric strategy group_size dynamic actorder scale_dtype zp_dtype
observer observer_kwargs"""
"""Keys of compressed-tensors' groups and of their weights; dtypes are those of the tensors."""


def _mxfp4(settings: Settings) -> Unpack:
    """gpt-oss."""
    return functools.partial(_join, "_blocks", ["_scales"], MXFP4)


def _fp8(settings: Settings) -> Unpack:
    """DeepSeek V3."""
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
        raise ValueError(
            f"weight_block_size={quoted(block)}: must be two whole numbers above 0; fp8 is read in "
            "blocks alone"
        )
    _expect(settings, {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"})

    def unpack(tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            # It would be read as floats without their scale.
            if tensor.dtype == ml_dtypes.float8_e4m3fn and f"{name}_scale_inv" not in tensors:
                raise DataError(
                    f"{tensor.where}: is float8_e4m3fn without its scales {name}_scale_inv"
                )
        # Despite the name, weight_scale_inv is what codes are multiplied by.
        return _join("_scale_inv", [""], functools.partial(BlockFP8, tuple(block)), tensors)

    return unpack


def _compressed(settings: Settings) -> Unpack:
    """compressed-tensors: int4 in groups, or eight bits."""
    if settings.get("format") in EIGHT_BITS:
        return _compressed_bytes(settings)
    # An absent key counts as the value in front, which is refused.
    _expect({"format": "dense", **settings}, {"format": "pack-quantized"})
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    sizes = []
    for weights in _schemes(settings):
        # So does num_bits.
        _expect({"num_bits": 8, **weights}, wanted)
        sizes.append(weights.get("group_size"))
    if not sizes:
        raise ValueError("config_groups={}: must say how weights are quantized")
    size = sizes[0]
    # The function below does not know which group a tensor belongs to.
    if sizes != [size] * len(sizes) or type(size) is not int or size < 1:
        raise ValueError("config_groups: must have one group_size for all weights")
    make = functools.partial(GroupInt4, size)
    return functools.partial(_join, "_packed", ["_scale", "_shape"], make)


def _compressed_bytes(settings: Settings) -> Unpack:
    for weights in _schemes(settings):
        _expect(weights, {"num_bits": 8, "symmetric": True})
        for key, allowed in (("strategy", ("tensor", "channel")), ("group_size", (None, -1))):
            if weights.get(key) not in allowed:
                raise ValueError(f"{key}={quoted(weights.get(key))}: only {allowed} are read")
    # Of no use here, where activations and caches are computed in floats.
    of_activations = ("input_scale", "input_zero_point", "k_scale", "v_scale")

    def unpack(tensors: Tensors) -> Tensors:
        tensors = _join("weight_scale", ["weight"], _scaled(None, 1), tensors, to="weight")
        kept = {name: x for name, x in tensors.items() if not name.endswith(of_activations)}
        if len(kept) < len(tensors):
            log.warning("scales of activations are passed over: these are computed in floats")
        return kept

    return unpack


def _awq(settings: Settings) -> Unpack:
    """AutoAWQ's `gemm`."""
    _expect(settings, {"bits": 4, "version": "gemm", "format": "gemm", "zero_point": True})
    make = functools.partial(GroupWords, 4, settings.get("group_size", 128), False, 0)
    return lambda tensors: _join("qweight", ["qzeros", "scales"], make, tensors, to="weight")


def _gptq(settings: Settings) -> Unpack:
    """AutoGPTQ and GPTQModel; zeros are stored less one, except in `gptq_v2`."""
    _expect(settings, {"pack_dtype": "int32", "is_marlin_format": False})
    bits, form = settings.get("bits"), settings.get("format", "gptq")
    form = settings.get("checkpoint_format", form)
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={quoted(bits)}: only 2, 4 and 8 are read")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format={quoted(form)}: only gptq and gptq_v2 are read")
    # The first format subtracts 1 from zeros when it packs them.
    offset = 1 if form == "gptq" else 0
    make = functools.partial(GroupWords, bits, settings.get("group_size", 128), True, offset)

    def unpack(tensors: Tensors) -> Tensors:
        parts = ["qzeros", "scales"]
        if any(name.endswith(".g_idx") for name in tensors):
            parts.append("g_idx")
        packed = [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]
        for name in [f"{module}bias" for module in packed]:
            # AutoGPTQ writes a bias of zeros for each module that has none.
            if name in tensors and not tensors[name].array().astype(np.float32).any():
                del tensors[name]
        return _join("qweight", parts, make, tensors, to="weight")

    return unpack


def _bitsandbytes(settings: Settings) -> Unpack:
    """Four bits, or int8 with a scale for each output."""
    make = _scaled(np.dtype(ml_dtypes.bfloat16), INT8_STEPS)

    def unpack(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if ".quant_state.bitsandbytes__" in name]:
            weight = name.partition(".quant_state.")[0]
            # The state is JSON, as a tensor of bytes.
            state = strict_json.parse_object(tensors.pop(name).array().tobytes(), name)
            parts = [weight, f"{weight}.quant_map", f"{weight}.absmax"]
            if "nested_blocksize" in state:
                parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
            tensors[weight] = Blockwise4(state, *_pop(tensors, weight, parts))
        tensors = _join("SCB", ["weight"], make, tensors, to="weight")
        return {name: x for name, x in tensors.items() if not name.endswith("weight_format")}

    return unpack


METHODS: dict[str, Callable[[Settings], Unpack]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
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
"""Keys that are read, that the tensors say themselves, or that change no weight: how numbers were
found, how programs run, and activations and caches, which are computed in floats."""


def unpacking(settings: Any, where: str) -> Unpack:
    """Return the function from a folder's tensors to its whole weights, by the quantization_config
    of the config.json at `where`. ConfigError for a quantization that is not supported."""
    if not settings:
        return lambda tensors: tensors
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if not isinstance(settings, Mapping) or method not in METHODS:
        raise ConfigError(
            f"{where}: weights quantized by {shortened(str(method))} are not supported; those by "
            f"{', '.join(METHODS)} are; use the unquantized version of the model"
        )
    try:
        _check_keys(settings, f"quant_method {KEYS[method]}")
        return METHODS[method](settings)
    except ValueError as error:
        raise ConfigError(
            f"{where}: quantization_config: {error}; use the unquantized version of the model"
        ) from None


def _schemes(settings: Settings) -> Iterator[Settings]:
    """Yield `weights` of each of compressed-tensors' groups. ValueError for a key of a group, or a
    value, that would change what they mean; what a group says of activations is not computed."""
    _expect(settings.get("sparsity_config") or {}, {"format": "dense"})
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"config_groups={quoted(groups)}: must be a mapping")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups.{name}.weights={quoted(weights)}: must be a mapping")
        _check_keys(group, GROUP, f"config_groups.{name}.")
        _check_keys(weights, SCHEME, f"config_groups.{name}.weights.")
        form = settings["format"]
        # A group may have a format of its own, packed otherwise than the folder's.
        _expect({"format": group.get("format") or form}, {"format": form})
        _expect(weights, {"dynamic": False})
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError(f"actorder={quoted(weights['actorder'])}: its order is not read")
        yield weights


def _check_keys(settings: Settings, known: str, where: str = "") -> None:
    """ValueError for unknown keys with a value."""
    nothing: Any = (None, {}, [], {"config_groups": {}})
    given = {key for key, value in settings.items() if value not in nothing}
    # transform_config, an online rotation, was passed over once: the relative error was 1.41.
    if unknown := sorted(given - {*known.split()}):
        raise ValueError(f"{where}{listed(unknown)}: not known here, and may change the weights")


def _expect(settings: Settings, wanted: Settings) -> None:
    """ValueError where a key is given with another value."""
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{key}={quoted(settings[key])}: only {value!r} is read")


def _scaled(dtype: np.dtype | None, steps: float) -> Callable[..., PackedWeight]:
    """Return ScaledBytes of a scale and a weight."""
    return lambda scale, weight: ScaledBytes(dtype, steps, weight, scale)


def _join(
    first: str,
    others: Sequence[str],
    make: Callable[..., PackedWeight],
    tensors: Tensors,
    to: str = "",
) -> Tensors:
    """Join each tensor whose name ends in `first`, and those that end in `others` instead, into one
    weight, whose name ends in `to`."""
    # A list first, since the tensors change inside.
    for name in [name for name in tensors if name.endswith(first)]:
        stem = name.removesuffix(first)
        parts = _pop(tensors, tensors[name].where, [stem + part for part in (first, *others)])
        tensors[stem + to] = make(*parts)
    return tensors


def _pop(tensors: Tensors, where: str, names: Sequence[str]) -> list[Tensor]:
    if missing := [name for name in names if name not in tensors]:
        raise DataError(f"{where}: is of no use without {missing[0]}, which no file holds")
    return [tensors.pop(name) for name in names]
