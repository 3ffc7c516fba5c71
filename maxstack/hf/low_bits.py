"""Weights as quantizing programs of PyTorch pack them: AWQ, GPTQ, bitsandbytes and the integers and
floats of eight bits of compressed-tensors. Each is the float matrix that the program's own code
makes of it; what a program does to activations is not computed."""

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from maxstack import strict_json
from maxstack.errors import DataError, quoted
from maxstack.hf.quantized import (
    E4M3,
    Quantized,
    Tensors,
    Unpack,
    expect,
    finite,
    joined,
    kind_of,
    schemes,
)
from maxstack.hf.tensors import Tensor

log = logging.getLogger(__name__)
AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of its eight columns, which AutoAWQ packs as 0, 2, 4, 6, 1, 3, 5, 7."""
INT8_STEPS = 127


class Grouped(Quantized):
    """[out, in] of int32 words of `bits` each, with a scale and a zero for each group of inputs and
    each output: (number - zero) x scale, rounded to the dtype of the scales, as AutoAWQ and
    GPTQModel do. Of AWQ words hold columns (outputs), of GPTQ rows (inputs)."""

    def __init__(self, bits: int, group: int, of_rows: bool, more: int, *parts: Tensor):
        """`more` is added to a zero as it is stored."""
        super().__init__(*parts)
        self._bits, self._of_rows, self._more = bits, of_rows, more
        words, zeros, scales = parts[:3]
        each = 32 // bits
        rows, columns = words.shape if len(words.shape) == 2 else (0, 0)
        inputs, out = (rows * each, columns) if of_rows else (rows, columns * each)
        self._group = inputs if group == -1 else group
        groups = -(-inputs // self._group) if inputs else 0
        wanted = ((groups, out // each), (groups, out))
        if (zeros.shape, scales.shape) != wanted or words.dtype != np.int32 or out % each:
            raise DataError(
                f"{words.where}: of {bits} bits in groups of {self._group} needs zeros and scales "
                f"of {wanted[0]} and {wanted[1]}; they are {kind_of(zeros)} and {kind_of(scales)}"
            )
        self.shape, self.dtype = (out, inputs), scales.dtype

    def array(self, index: int | None = None) -> np.ndarray:
        words, zeros, scales = self._parts[:3]
        numbers = self._unpacked(words.array(), 0 if self._of_rows else 1)
        offsets = self._unpacked(zeros.array(), 1) + self._more
        of_input = np.arange(self.shape[1]) // self._group
        if len(self._parts) > 3:
            of_input = self._parts[3].array()
            if of_input.shape != (self.shape[1],) or not 0 <= of_input.min() <= of_input.max() < (
                len(offsets)
            ):
                raise DataError(f"{self._parts[3].where}: names groups that there are not")
        scale = finite(scales)[of_input]
        values = ((numbers - offsets[of_input]) * scale).astype(self.dtype).T
        return values if index is None else values[index]

    def _unpacked(self, words: np.ndarray, axis: int) -> np.ndarray:
        """The numbers of words along an axis, as float32."""
        each = 32 // self._bits
        places = np.arange(each)
        if not self._of_rows:
            places = np.array(AWQ_COLUMNS)
        shifts = (places * self._bits).astype(np.uint32)
        found = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << self._bits) - 1)
        if axis == 0:
            return found.transpose(0, 2, 1).reshape(-1, words.shape[1]).astype(np.float32)
        return found.reshape(words.shape[0], -1).astype(np.float32)


class Scaled(Quantized):
    """[out, in] of int8 or e4m3 with a scale of the whole, or one for each output, `over` which it
    counts: compressed-tensors rounds the product to the dtype of the scales."""

    def __init__(self, dtype: np.dtype | None, over: float, weight: Tensor, scale: Tensor):
        super().__init__(weight, scale)
        self._over = over
        size = math.prod(scale.shape)
        whole = weight.dtype in (np.int8, ml_dtypes.float8_e4m3fn)
        if not whole or len(weight.shape) != 2 or size not in (1, weight.shape[0]):
            raise DataError(
                f"{weight.where}: is {kind_of(weight)} with scales {kind_of(scale)}; needed are "
                "int8 or float8_e4m3fn [out, in], and a scale, or one for each output"
            )
        self.shape, self.dtype = weight.shape, dtype or scale.dtype

    def array(self, index: int | None = None) -> np.ndarray:
        weight, scale = self._parts
        codes = weight.array()
        values = codes.astype(np.float32) if codes.dtype == np.int8 else E4M3[codes.view(np.uint8)]
        values = (values * (finite(scale).reshape(-1, 1) / self._over)).astype(self.dtype)
        return values if index is None else values[index]


class Blockwise4(Quantized):
    """bitsandbytes' nf4 and fp4: two numbers a byte, the high half first, each an entry of a table
    times the largest number of its block, which may be quantized itself (Dettmers et al. 2023,
    arXiv:2305.14314)."""

    def __init__(self, state: Mapping[str, Any], *parts: Tensor):
        super().__init__(*parts)
        self._state, self.shape = state, tuple(state["shape"])
        self.dtype = np.dtype(getattr(ml_dtypes, state["dtype"], state["dtype"]))
        if math.prod(parts[0].shape) * 2 != math.prod(self.shape):
            raise DataError(f"{parts[0].where}: is {kind_of(parts[0])}, not of {self.shape}")

    def array(self, index: int | None = None) -> np.ndarray:
        packed, table, largest, *nested = (part.array().reshape(-1) for part in self._parts)
        if nested:
            scales, of_scales = nested
            per = np.arange(largest.size) // self._state["nested_blocksize"]
            largest = of_scales[largest] * scales[per] + self._state["nested_offset"]
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        per = np.arange(codes.size) // self._state["blocksize"]
        values = (table[codes] * largest[per].astype(np.float32)).astype(self.dtype)
        values = values.reshape(self.shape)
        return values if index is None else values[index]


def awq(settings: Mapping[str, Any]) -> Unpack:
    """AutoAWQ's `gemm`."""
    expect(settings, {"bits": 4, "version": "gemm", "format": "gemm", "zero_point": True})
    make = functools.partial(Grouped, 4, settings.get("group_size", 128), False, 0)
    return lambda tensors: joined("qweight", ["qzeros", "scales"], make, tensors, to="weight")


def gptq(settings: Mapping[str, Any]) -> Unpack:
    """AutoGPTQ's and GPTQModel's, whose zeros are stored less one but for `gptq_v2`."""
    expect(settings, {"pack_dtype": "int32", "is_marlin_format": False})
    bits, form = settings.get("bits"), settings.get("format", "gptq")
    form = settings.get("checkpoint_format", form)
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={quoted(bits)}: only 2, 4 and 8 are read")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format={quoted(form)}: only gptq and gptq_v2 are read")
    more = int(form == "gptq")
    make = functools.partial(Grouped, bits, settings.get("group_size", 128), True, more)

    def unpack(tensors: Tensors) -> Tensors:
        parts = ["qzeros", "scales"]
        if any(name.endswith(".g_idx") for name in tensors):
            parts.append("g_idx")
        packed = [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]
        for name in [f"{module}bias" for module in packed]:
            # AutoGPTQ writes a bias of zeros for each module that has none.
            if name in tensors and not tensors[name].array().astype(np.float32).any():
                del tensors[name]
        return joined("qweight", parts, make, tensors, to="weight")

    return unpack


def bitsandbytes(settings: Mapping[str, Any]) -> Unpack:
    """Four bits, or int8 with a scale for each output."""
    dtype = np.dtype(ml_dtypes.bfloat16)

    def unpack(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if ".quant_state.bitsandbytes__" in name]:
            weight = name.partition(".quant_state.")[0]
            state = strict_json.parse_object(tensors.pop(name).array().tobytes(), name)
            parts = [weight, f"{weight}.quant_map", f"{weight}.absmax"]
            if "nested_blocksize" in state:
                parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
            if missing := [part for part in parts if part not in tensors]:
                raise DataError(f"{weight}: is of no use without {missing[0]}")
            tensors[weight] = Blockwise4(state, *[tensors.pop(part) for part in parts])
        make = functools.partial(Scaled, dtype, INT8_STEPS)
        tensors = joined("SCB", ["weight"], lambda scb, w: make(w, scb), tensors, to="weight")
        return {name: x for name, x in tensors.items() if not name.endswith("weight_format")}

    return unpack


def eight_bits(settings: Mapping[str, Any]) -> Unpack:
    """compressed-tensors' int-quantized, float-quantized and naive-quantized."""
    for weights in schemes(settings):
        expect(weights, {"num_bits": 8, "symmetric": True})
        for key, allowed in (("strategy", ("tensor", "channel")), ("group_size", (None, -1))):
            if weights.get(key) not in allowed:
                raise ValueError(f"{key}={quoted(weights.get(key))}: only {allowed} are read")
    activations = ("input_scale", "input_zero_point", "k_scale", "v_scale")

    def unpack(tensors: Tensors) -> Tensors:
        make = functools.partial(Scaled, None, 1)
        tensors = joined(
            "weight_scale", ["weight"], lambda scale, weight: make(weight, scale), tensors, "weight"
        )
        left = {name for name in tensors if name.endswith(activations)}
        if left:
            log.warning("scales of activations are passed over: these are computed in floats")
        return {name: tensor for name, tensor in tensors.items() if name not in left}

    return unpack
