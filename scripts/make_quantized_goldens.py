"""Makes tests/goldens/low_bits.npz: small matrices as bitsandbytes and compressed-tensors pack
them, and the floats that these make of them again (`NAME/meant`, float32).

Needs torch, bitsandbytes and compressed-tensors.

example: python scripts/make_quantized_goldens.py --check
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from bench import arguments

FILE = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "low_bits.npz"
SHAPE = 16, 64


def main() -> int:
    """Write the file, or compare it; returns the exit code."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    check = parser.parse_args().check
    import torch

    torch.manual_seed(0)
    made = _bitsandbytes(torch) | _compressed(torch)
    if not check:
        np.savez_compressed(FILE, **made)
    held = np.load(FILE)
    same = made.keys() == {*held} and all(np.array_equal(held[key], made[key]) for key in made)
    print(f"{FILE.name}: {'same' if same else 'differs'}")
    return 0 if same else 1


def _bitsandbytes(torch: Any) -> dict[str, Any]:
    from bitsandbytes import functional, nn

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


def _compressed(torch: Any) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

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


if __name__ == "__main__":
    sys.exit(main())
