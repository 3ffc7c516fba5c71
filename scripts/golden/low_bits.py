"""low_bits.npz: small matrices as bitsandbytes and compressed-tensors pack them, and the floats
that these make of them again (`NAME/meant`, float32)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes import functional, nn
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

NAMES, CLOSE = ["low_bits"], 0.0
SHAPE = 16, 64


def make(name: str, out: Path) -> None:
    """Write the file."""
    torch.manual_seed(0)
    np.savez_compressed(out / "low_bits.npz", **bitsandbytes(), **compressed())


def bitsandbytes() -> dict[str, Any]:
    """NF4, nested NF4, FP4 and int8."""
    made = {}
    for name, kind, nested in (
        ("nf4", "nf4", False),
        ("nested", "nf4", True),
        ("fp4", "fp4", False),
    ):
        weight = torch.randn(SHAPE, dtype=torch.bfloat16)
        packed = nn.Params4bit(
            weight, requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=64
        ).to("cpu")
        made[f"{name}/weight"] = packed.data.numpy()
        for key, value in packed.quant_state.as_dict(packed=True).items():
            made[f"{name}/weight.{key}"] = value.numpy()
        meant = functional.dequantize_4bit(packed.data, packed.quant_state)
        made[f"{name}/meant"] = meant.float().numpy()
    weight = torch.randn(SHAPE, dtype=torch.float16)
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    meant = functional.int8_vectorwise_dequant(codes, scales)
    return made | {
        "int8/weight": codes.numpy(),
        "int8/SCB": scales.numpy(),
        "int8/meant": meant.float().numpy(),
    }


def compressed() -> dict[str, Any]:
    """int8 and float8 with a scale for each channel, and float8 with one scale."""
    made = {}
    cases = {
        "int-quantized": ("int", "channel", 127, torch.int8),
        "float-quantized": ("float", "channel", 448, torch.float8_e4m3fn),
        "float-tensor": ("float", "tensor", 448, torch.float8_e4m3fn),
    }
    for name, (kind, strategy, most, dtype) in cases.items():
        args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy=strategy)
        weight = torch.randn(SHAPE, dtype=torch.bfloat16)
        largest = (
            weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()
        )
        scale = (largest / most).reshape(-1, 1) if strategy == "channel" else largest[None] / most
        zero = torch.zeros_like(scale, dtype=dtype)
        codes = quantize(weight, scale, zero, args, dtype=dtype)
        meant = dequantize(codes, scale, zero, args)
        made[f"{name}/weight"] = codes.view(torch.uint8 if kind == "float" else dtype).numpy()
        made[f"{name}/weight_scale"] = scale.view(torch.uint16).numpy()
        made[f"{name}/meant"] = meant.float().numpy()
    return made
