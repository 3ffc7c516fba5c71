"""Weights that a model folder keeps in low precision, read as floats one tensor at a time."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from maxstack.config.annotations import listed
from maxstack.errors import DataError, quoted
from maxstack.hf.tensors import Tensor

# e2m1: one bit of sign, two of exponent, one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_BIAS = 127
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
INT4_ZERO = 8
SCALES = ("float32", "bfloat16", "float16")

GROUP = "targets weights input_activations output_activations format"
SCHEME = """num_bits type symmetric strategy group_size dynamic actorder scale_dtype zp_dtype
observer observer_kwargs"""
"""Keys of compressed-tensors' groups and of their weights; dtypes are those of the tensors."""

Tensors = dict[str, Tensor]
Unpack = Callable[[Tensors], Tensors]


class Quantized:
    """A weight made of several tensors of a file: numbers of few bits, and their scales."""

    dtype = np.dtype(ml_dtypes.bfloat16)
    """Dtype of the weight in the unquantized folder; `array` is float32 where the product with the
    scale has more digits than that."""
    shape: tuple[int, ...]

    def __init__(self, *parts: Tensor):
        self._parts, self.where = parts, parts[0].where

    def array(self, index: int | None = None) -> np.ndarray:
        """The weight, or one index of its first dimension; DataError for a scale that is not
        finite, or negative."""
        raise NotImplementedError

    def forget(self) -> None:
        """Give back the memory of what was read."""
        for part in self._parts:
            part.forget()


class MXFP4(Quantized):
    """[experts, in, out], as gpt-oss has it: blocks [experts, out, in / 32, 16] of two e2m1 numbers
    a byte, the low half first, and scales [experts, out, in / 32], powers of two (OCP Microscaling
    Formats 1.0, 2023)."""

    def __init__(self, blocks: Tensor, scales: Tensor):
        super().__init__(blocks, scales)
        if (
            len(blocks.shape) != 4
            or blocks.shape != (*scales.shape, 16)
            or blocks.dtype != np.uint8
            or scales.dtype != np.uint8
        ):
            raise DataError(
                f"{blocks.where}: MXFP4 has uint8 blocks [experts, out, n, 16] and "
                f"scales [experts, out, n], not {kind_of(blocks)} and {kind_of(scales)}"
            )
        experts, out, groups = scales.shape
        self.shape = experts, groups * 32, out

    def array(self, index: int | None = None) -> np.ndarray:
        if index is None:
            return np.stack([self.array(expert) for expert in range(self.shape[0])])
        blocks, scales = (part.array(index) for part in self._parts)
        exponents = scales[..., None].astype(np.int32) - E8M0_BIAS
        scaled = np.ldexp(E2M1[_nibbles(blocks)], exponents)
        return scaled.astype(self.dtype).reshape(scales.shape[0], -1).T


class BlockFP8(Quantized):
    """[out, in] in e4m3 with a scale for each block of `block` numbers, at the edges of fewer, as
    DeepSeek V3 has it; float32, as weight_dequant of DeepSeek's inference/kernel.py multiplies."""

    def __init__(self, block: tuple[int, int], scale: Tensor, weight: Tensor):
        super().__init__(weight, scale)
        self.shape, self._block = weight.shape, block
        if weight.dtype != ml_dtypes.float8_e4m3fn:
            raise DataError(
                f"{weight.where}: is {kind_of(weight)}, and {scale.where} scales float8_e4m3fn"
            )
        _check_scale(scale, weight.shape, block, f"weight_block_size {list(block)}")

    def array(self, index: int | None = None) -> np.ndarray:
        codes, scale = self._parts[0].array(), finite(self._parts[1])
        # Largest number of the block / 448; zero for a block of zeros. Those of int4 may be
        # negative, where an exporter turns the larger end of a group to -8.
        if (least := scale.min(initial=0)) < 0:
            raise DataError(
                f"{self._parts[1].where}: holds {least:g}, and no scale of float8_e4m3fn is "
                "negative; get the weights anew"
            )
        values = E4M3[codes.view(np.uint8)]
        rows, columns = self._block
        for i, of_block in enumerate(scale):
            values[i * rows : (i + 1) * rows] *= of_block.repeat(columns)[: self.shape[1]]
        return values if index is None else values[index]


class GroupInt4(Quantized):
    """[out, in] in int4 with a scale for each `group` inputs, as compressed-tensors packs it: int32
    words [out, in / 8] of eight numbers, the first in the lowest bits, each kept plus 8. Products
    are rounded to the dtype of the scales, as that library rounds them."""

    def __init__(self, group: int, packed: Tensor, scale: Tensor, shape: Tensor):
        super().__init__(packed, scale, shape)
        matrices = len(packed.shape) == len(scale.shape) == 2
        sizes = shape.shape == (2,) and shape.dtype.kind == "i"
        if packed.dtype != np.int32 or not matrices or not sizes:
            raise DataError(
                f"{packed.where}: int4 weights are int32 [out, in / 8] with scales "
                f"[out, in / {group}] and the two sizes, not {kind_of(packed)}, "
                f"{kind_of(scale)} and {kind_of(shape)}"
            )
        out, words = packed.shape
        whole = words * 8 == scale.shape[1] * group
        # Where it must be so, the size is not read: a page of a file for each of many experts.
        self.shape = out, words * 8 if whole else int(shape.array()[-1])
        self._group, self.dtype = group, scale.dtype
        _check_scale(scale, self.shape, (1, group), f"group_size {group}")

    def array(self, index: int | None = None) -> np.ndarray:
        packed, scales, shape = self._parts
        if (sizes := tuple(shape.array())) != self.shape:
            raise DataError(
                f"{shape.where}: says {list(map(int, sizes))}, and the numbers are of "
                f"{list(self.shape)}"
            )
        codes = _nibbles(packed.array().view(np.uint8))
        values = codes[:, : self.shape[1]].astype(np.float32)
        scale = finite(scales).repeat(self._group, axis=1)[:, : self.shape[1]]
        values = ((values - INT4_ZERO) * scale).astype(self.dtype)
        return values if index is None else values[index]


def mxfp4(settings: Mapping[str, Any]) -> Unpack:
    """gpt-oss's."""
    return functools.partial(joined, "_blocks", ["_scales"], MXFP4)


def fp8(settings: Mapping[str, Any]) -> Unpack:
    """DeepSeek V3's. Layers that modules_to_not_convert or ignored_layers name need no rule: theirs
    are floats."""
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
        raise ValueError(
            f"weight_block_size={quoted(block)}: must be two whole numbers above 0; fp8 is read in "
            "blocks alone"
        )
    expect(settings, {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"})

    def unpack(tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            if tensor.dtype == ml_dtypes.float8_e4m3fn and f"{name}_scale_inv" not in tensors:
                raise DataError(
                    f"{tensor.where}: is float8_e4m3fn without its scales {name}_scale_inv"
                )
        return joined("_scale_inv", [""], functools.partial(BlockFP8, tuple(block)), tensors)

    return unpack


def compressed(settings: Mapping[str, Any]) -> Unpack:
    """compressed-tensors' int4 in groups. Layers that `ignore` names need no rule: theirs are
    floats."""
    expect({"format": "dense", **settings}, {"format": "pack-quantized"})
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    sizes = []
    for weights in schemes(settings):
        expect({"num_bits": 8, **weights}, wanted)
        sizes.append(weights.get("group_size"))
    if not sizes:
        raise ValueError("config_groups={}: must say how weights are quantized")
    size = sizes[0]
    if sizes != [size] * len(sizes) or type(size) is not int or size < 1:
        raise ValueError("config_groups: must have one group_size for all weights")
    make = functools.partial(GroupInt4, size)
    return functools.partial(joined, "_packed", ["_scale", "_shape"], make)


def schemes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`weights` of each of compressed-tensors' groups. ValueError for a key of a group, or a value,
    that would change what they mean; what a group says of activations is not computed."""
    expect(settings.get("sparsity_config") or {}, {"format": "dense"})
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"config_groups={quoted(groups)}: must be a mapping")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups.{name}.weights={quoted(weights)}: must be a mapping")
        check_keys(group, GROUP, f"config_groups.{name}.")
        check_keys(weights, SCHEME, f"config_groups.{name}.weights.")
        expect(
            {"format": group.get("format") or settings["format"]}, {"format": settings["format"]}
        )
        expect(weights, {"dynamic": False})
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError(f"actorder={quoted(weights['actorder'])}: its order is not read")
        yield weights


def check_keys(settings: Mapping[str, Any], known: str, where: str = "") -> None:
    """ValueError for keys that are not among the known ones and say something."""
    nothing: Any = (None, {}, [], {"config_groups": {}})
    given = {key for key, value in settings.items() if value not in nothing}
    if unknown := sorted(given - {*known.split()}):
        raise ValueError(f"{where}{listed(unknown)}: not known here, and may change the weights")


def expect(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """ValueError where a key that is given has another value."""
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{key}={quoted(settings[key])}: only {value!r} is read")


def joined(
    first: str, others: list[str], make: Callable[..., Quantized], tensors: Tensors, to: str = ""
) -> Tensors:
    """`tensors` with each that ends in `first`, and those of `others`, as one weight, whose name
    ends in `to`."""
    for name in [name for name in tensors if name.endswith(first)]:
        weight = name.removesuffix(first)
        for other in others:
            if weight + other not in tensors:
                raise DataError(
                    f"{tensors[name].where}: is of no use without {weight + other}, which no file "
                    "holds"
                )
        parts = [tensors.pop(weight + part) for part in (first, *others)]
        tensors[weight + to] = make(*parts)
    return tensors


def _check_scale(
    scale: Tensor, weight: tuple[int, ...], block: tuple[int, int], setting: str
) -> None:
    """DataError unless there is a scale for each block of the weight's shape."""
    shape = tuple(-(-n // size) for n, size in zip(weight, block, strict=False))
    if len(weight) != 2 or scale.shape != shape or scale.dtype.name not in SCALES:
        raise DataError(
            f"{scale.where}: is {kind_of(scale)}; {setting} in config.json, on a weight "
            f"{list(weight)}, needs {' or '.join(SCALES)} {list(shape)}"
        )


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Numbers of four bits, two in each byte, the low half first: [..., n] -> [..., 2n]."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def finite(scale: Tensor) -> np.ndarray:
    """Scales in float32. DataError where one is not finite."""
    values = scale.array().astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{scale.where}: holds a number that is not finite")
    return values


def kind_of(tensor: Tensor) -> str:
    """Dtype and shape, for messages."""
    return f"{tensor.dtype.name} {list(tensor.shape)}"
