"""Weights that a model folder keeps in low precision, read as floats one tensor at a time.

A packed weight is several tensors of a file, the numbers of few bits and their scales; each class
gives the float matrix that the quantizing program's own code makes of them, to the last bit.
"""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from maxstack.errors import DataError
from maxstack.hf.tensors import Tensor

# e2m1: one bit of sign, two of exponent, one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS = 127
# A table: 66 ms for 2,048 x 7,168 numbers on a core, where the cast of ml_dtypes takes 144 ms.
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
INT4_ZERO = 8
SCALES = ("float32", "bfloat16", "float16")
AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of its eight columns, which AutoAWQ packs as 0, 2, 4, 6, 1, 3, 5, 7."""


class PackedWeight:
    """A weight made of several tensors of a file."""

    dtype = np.dtype(ml_dtypes.bfloat16)
    """Dtype of the weight in the unquantized folder; `array` is float32 where the product with the
    scale has more digits."""
    shape: tuple[int, ...]

    def __init__(self, *parts: Tensor):
        self._parts, self.where = parts, parts[0].where

    def array(self, index: int | None = None) -> np.ndarray:
        """Return the weight, or one index of its first dimension. DataError for a scale that is
        not finite, or negative."""
        # Unpacked at each call and not kept: the floats take several times the memory of the codes.
        values = self._values()
        return values if index is None else values[index]

    def _values(self) -> np.ndarray:
        raise NotImplementedError

    def forget(self) -> None:
        """Give back the memory of what was read."""
        for part in self._parts:
            part.forget()


class MXFP4(PackedWeight):
    """[experts, in, out] of gpt-oss: blocks [experts, out, in / 32, 16] of two e2m1 numbers a byte,
    the low half first, and scales [experts, out, in / 32], powers of two (OCP Microscaling Formats
    1.0, 2023)."""

    def __init__(self, blocks: Tensor, scales: Tensor):
        super().__init__(blocks, scales)
        fit = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if not fit or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
            raise DataError(
                f"{blocks.where}: MXFP4 has uint8 blocks [experts, out, n, 16] and "
                f"scales [experts, out, n], not {_kind(blocks)} and {_kind(scales)}"
            )
        experts, out, groups = scales.shape
        self.shape = experts, groups * 32, out

    def array(self, index: int | None = None) -> np.ndarray:
        # Experts one by one: the reader asks for those of its shard alone.
        if index is None:
            return np.stack([self.array(expert) for expert in range(self.shape[0])])
        blocks, scales = (part.array(index) for part in self._parts)
        exponents = scales[..., None].astype(np.int32) - E8M0_BIAS
        # Exact: a power of two changes the exponent alone.
        scaled = np.ldexp(E2M1[_nibbles(blocks)], exponents)
        return scaled.astype(self.dtype).reshape(scales.shape[0], -1).T


class BlockFP8(PackedWeight):
    """[out, in] in e4m3 with a scale for each block, smaller ones at the edges, as in DeepSeek V3;
    float32, as weight_dequant of DeepSeek's inference/kernel.py multiplies."""

    def __init__(self, block: tuple[int, int], scale: Tensor, weight: Tensor):
        super().__init__(weight, scale)
        self.shape, self._block = weight.shape, block
        if weight.dtype != ml_dtypes.float8_e4m3fn:
            raise DataError(
                f"{weight.where}: is {_kind(weight)}, and {scale.where} scales float8_e4m3fn"
            )
        _check_scale(scale, weight.shape, block, f"weight_block_size {list(block)}")

    def _values(self) -> np.ndarray:
        codes, scale = self._parts[0].array(), _finite(self._parts[1])
        # A scale is the largest number of the block / 448, or 0 for a block of zeros. Those of int4
        # may be negative, where an exporter turns the larger end of a group to -8.
        if (least := scale.min(initial=0)) < 0:
            raise DataError(
                f"{self._parts[1].where}: holds {least:g}, and no scale of float8_e4m3fn is "
                "negative; get the weights anew"
            )
        values = E4M3[codes.view(np.uint8)]
        # A row of blocks at a time, so that no array of scales as large as the weight is made.
        rows, columns = self._block
        for i, of_block in enumerate(scale):
            values[i * rows : (i + 1) * rows] *= of_block.repeat(columns)[: self.shape[1]]
        return values


class GroupInt4(PackedWeight):
    """[out, in] in int4 with a scale for each `group` inputs, as compressed-tensors packs it: int32
    words [out, in / 8] of eight numbers plus 8, the first in the lowest bits. Products are rounded
    to the dtype of the scales, as in that library."""

    def __init__(self, group: int, packed: Tensor, scale: Tensor, shape: Tensor):
        super().__init__(packed, scale, shape)
        matrices = len(packed.shape) == len(scale.shape) == 2
        sizes = shape.shape == (2,) and shape.dtype.kind == "i"
        if packed.dtype != np.int32 or not matrices or not sizes:
            raise DataError(
                f"{packed.where}: int4 weights are int32 [out, in / 8] with scales "
                f"[out, in / {group}] and the two sizes, not {_kind(packed)}, "
                f"{_kind(scale)} and {_kind(shape)}"
            )
        out, words = packed.shape
        # The words are padded to eight numbers, so only a width of whole groups follows from them.
        whole = words * 8 == scale.shape[1] * group
        # Where the size follows it is not read: it is a page of the file for each of many experts.
        self.shape = out, words * 8 if whole else int(shape.array()[-1])
        self._group, self.dtype = group, scale.dtype
        _check_scale(scale, self.shape, (1, group), f"group_size {group}")

    def _values(self) -> np.ndarray:
        packed, scales, shape = self._parts
        if (sizes := tuple(shape.array())) != self.shape:
            raise DataError(
                f"{shape.where}: says {list(map(int, sizes))}, and the numbers are of "
                f"{list(self.shape)}"
            )
        codes = _nibbles(packed.array().view(np.uint8))
        values = codes[:, : self.shape[1]].astype(np.float32)
        scale = _finite(scales).repeat(self._group, axis=1)[:, : self.shape[1]]
        return ((values - INT4_ZERO) * scale).astype(self.dtype)


class GroupWords(PackedWeight):
    """[out, in] of int32 words of `bits` each, with a zero and a scale for each group of inputs and
    each output: (number - zero) x scale in the dtype of the scales, as in AutoAWQ and GPTQModel. A
    fourth part gives the group of each input. AWQ's words hold columns (outputs), GPTQ's rows
    (inputs)."""

    def __init__(self, bits: int, group: int, of_rows: bool, offset: int, *parts: Tensor):
        """`offset` is added to a stored zero."""
        super().__init__(*parts)
        self._bits, self._of_rows = bits, of_rows
        self._offset = offset
        words, zeros, scales = parts[:3]
        each = 32 // bits
        rows, columns = words.shape if len(words.shape) == 2 else (0, 0)
        inputs, out = (rows * each, columns) if of_rows else (rows, columns * each)
        # -1: one group over all inputs.
        self._group = inputs if group == -1 else group
        groups = -(-inputs // self._group) if inputs else 0
        wanted = ((groups, out // each), (groups, out))
        if (zeros.shape, scales.shape) != wanted or words.dtype != np.int32 or out % each:
            raise DataError(
                f"{words.where}: of {bits} bits in groups of {self._group} needs zeros and scales "
                f"of {wanted[0]} and {wanted[1]}; they are {_kind(zeros)} and {_kind(scales)}"
            )
        self.shape, self.dtype = (out, inputs), scales.dtype

    def _values(self) -> np.ndarray:
        words, zeros, scales = self._parts[:3]
        unpacked = self._unpack(words.array())
        if self._of_rows:
            # The numbers of a word lie below one another, along the inputs.
            numbers = unpacked.transpose(0, 2, 1).reshape(-1, words.shape[1])
        else:
            numbers = unpacked.reshape(words.shape[0], -1)
        offsets = self._unpack(zeros.array()).reshape(zeros.shape[0], -1) + self._offset
        # Without a list of groups (desc_act) they are consecutive inputs.
        group_of = np.arange(self.shape[1]) // self._group
        if len(self._parts) > 3:
            group_of = self._parts[3].array()
            known = group_of.shape == (self.shape[1],) and group_of.min() >= 0
            if not known or group_of.max() >= len(offsets):
                raise DataError(f"{self._parts[3].where}: names groups that there are not")
        return ((numbers - offsets[group_of]) * _finite(scales)[group_of]).astype(self.dtype).T

    def _unpack(self, words: np.ndarray) -> np.ndarray:
        """Return the numbers of each word as float32 [..., numbers]."""
        places = np.arange(32 // self._bits) if self._of_rows else np.array(AWQ_COLUMNS)
        shifts = (places * self._bits).astype(np.uint32)
        mask = np.uint32((1 << self._bits) - 1)
        # Unsigned, since a shift of int32 would draw the sign in.
        return ((words.view(np.uint32)[..., None] >> shifts) & mask).astype(np.float32)


class ScaledBytes(PackedWeight):
    """[out, in] of int8 or e4m3 with one scale, or one for each output, which is divided by
    `steps`: compressed-tensors rounds the product to the dtype of the scales."""

    def __init__(self, dtype: np.dtype | None, steps: float, weight: Tensor, scale: Tensor):
        super().__init__(weight, scale)
        self._steps = steps
        size = math.prod(scale.shape)
        known = weight.dtype in (np.int8, ml_dtypes.float8_e4m3fn)
        if not known or len(weight.shape) != 2 or size not in (1, weight.shape[0]):
            raise DataError(
                f"{weight.where}: is {_kind(weight)} with scales {_kind(scale)}; needed are "
                "int8 or float8_e4m3fn [out, in], and a scale, or one for each output"
            )
        self.shape, self.dtype = weight.shape, dtype or scale.dtype

    def _values(self) -> np.ndarray:
        codes, scale = self._parts[0].array(), _finite(self._parts[1])
        values = codes.astype(np.float32) if codes.dtype == np.int8 else E4M3[codes.view(np.uint8)]
        return (values * (scale.reshape(-1, 1) / self._steps)).astype(self.dtype)


class Blockwise4(PackedWeight):
    """nf4 and fp4 of bitsandbytes: two numbers a byte, the high half first, each an entry of a
    table times the largest number of its block, which may be quantized itself (Dettmers et al.
    2023, arXiv:2305.14314)."""

    def __init__(self, state: Mapping[str, Any], *parts: Tensor):
        super().__init__(*parts)
        self._state, self.shape = state, tuple(state["shape"])
        self.dtype = np.dtype(getattr(ml_dtypes, state["dtype"], state["dtype"]))
        if math.prod(parts[0].shape) * 2 != math.prod(self.shape):
            raise DataError(f"{parts[0].where}: is {_kind(parts[0])}, not of {self.shape}")

    def _values(self) -> np.ndarray:
        # The high half first, unlike the others, so _nibbles does not serve.
        packed, table, largest, *nested = (part.array().reshape(-1) for part in self._parts)
        # The largest numbers are themselves codes of 8 bits, with scales of their own and a common
        # offset.
        if nested:
            scales, of_scales = nested
            block_of = np.arange(largest.size) // self._state["nested_blocksize"]
            largest = of_scales[largest] * scales[block_of] + self._state["nested_offset"]
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        block_of = np.arange(codes.size) // self._state["blocksize"]
        values = table[codes] * largest[block_of].astype(np.float32)
        return values.astype(self.dtype).reshape(self.shape)


def _check_scale(
    scale: Tensor, weight: tuple[int, ...], block: tuple[int, int], setting: str
) -> None:
    """DataError unless there is a scale for each block of the weight's shape."""
    shape = tuple(-(-n // size) for n, size in zip(weight, block, strict=False))
    if len(weight) != 2 or scale.shape != shape or scale.dtype.name not in SCALES:
        raise DataError(
            f"{scale.where}: is {_kind(scale)}; {setting} in config.json, on a weight "
            f"{list(weight)}, needs {' or '.join(SCALES)} {list(shape)}"
        )


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of four bits, two in each byte, the low half first: [..., n] -> [...,
    2n]."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def _finite(scale: Tensor) -> np.ndarray:
    """Return scales in float32. DataError where one is not finite."""
    values = scale.array().astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{scale.where}: holds a number that is not finite")
    return values


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"
