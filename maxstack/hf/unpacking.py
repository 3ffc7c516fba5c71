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
        return METHODS[method](settings)
    except ValueError as error:
        raise ConfigError(
            f"{where}: quantization_config: {error}; use the unquantized version of the model"
        ) from None
