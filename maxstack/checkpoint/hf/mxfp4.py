"""MXFP4 tensors as gpt-oss has them on disk: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0, 2023)."""

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from maxstack.data import DataError

if TYPE_CHECKING:
    from maxstack.checkpoint.hf.folder import Tensor

# e2m1: one bit of sign, two of exponent, one of mantissa.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BIAS = 127


class Packed:
    """[experts, in, out] in bfloat16, from blocks [experts, out, in / 32, 16] of two values a byte, the low half first, and scales
    [experts, out, in / 32]."""

    dtype = np.dtype(ml_dtypes.bfloat16)

    def __init__(self, blocks: "Tensor", scales: "Tensor"):
        self._blocks, self._scales, self.where = blocks, scales, blocks.where
        shaped = len(blocks.shape) == 4 and blocks.shape[-1] == 16 and blocks.shape[:3] == scales.shape
        if not shaped or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
            raise DataError(f"{blocks.where}: MXFP4 has uint8 blocks [experts, out, n, 16] and scales [experts, out, n], not "
                            f"{blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}")
        experts, out, groups, _ = blocks.shape
        self.shape = experts, groups * 32, out

    def array(self, index: int | None = None) -> np.ndarray:
        """One expert's [in, out], or all."""
        if index is None:
            return np.stack([self.array(expert) for expert in range(self.shape[0])])
        blocks, scales = self._blocks.array(index), self._scales.array(index)
        values = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
        scaled = np.ldexp(values, scales[..., None].astype(np.int32) - BIAS)
        return scaled.astype(self.dtype).reshape(scales.shape[0], -1).T

    def forget(self) -> None:
        """Give back the memory of what was read."""
        self._blocks.forget()
        self._scales.forget()
