"""Tensors of the Open Inference Protocol: of JSON or raw bytes, to arrays and back."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxstack.errors import quoted
from maxstack.inference.server.refusal import Refusal

DATATYPES = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
}
"""Types of elements by the protocol's names."""
MOST_DIMS, MOST_ELEMENTS = 32, 2**40
"""Bounds of a shape, before anything is computed with it."""
NAMES = {dtype: name for name, dtype in DATATYPES.items()}


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> np.ndarray:
    """Return a tensor of JSON values, flat or nested by its shape. Refusal for values of another
    kind, and for those that the type cannot hold."""
    dtype = jnp.dtype(DATATYPES[datatype])
    if datatype == "BF16":
        raise Refusal(400, f"{name}: BF16 is sent as binary data alone; JSON has no such numbers")
    if not isinstance(values, list):
        raise Refusal(400, f"{name}: data must be a list")
    kind = {"b": "booleans", "f": "numbers"}.get(dtype.kind, "integers")
    wrong = Refusal(400, f"{name}: data must be {kind} that {datatype} can hold")
    # Refuse texts before there is an array, whose elements are all as wide as its widest: 300,000
    # texts beside one of 1,000 characters took 1.2 GB for 900 kB of body.
    if not _kinds(values) <= {bool, int, float, list}:
        raise wrong
    try:
        given = np.array(values)
    except (ValueError, OverflowError, MemoryError) as error:
        raise Refusal(400, f"{name}: data must be numbers, in lists of one length") from error
    # numpy makes an empty list float64, which would not fit an integer type.
    if not given.size:
        given = given.astype(dtype)
    if not _fits(given, dtype):
        raise wrong
    if given.shape != tuple(shape) and (given.ndim != 1 or given.size != math.prod(shape)):
        raise Refusal(
            400, f"{name}: data has the shape {quoted(list(given.shape))}, not {quoted(shape)}"
        )
    return given.reshape(shape).astype(dtype)


def _kinds(values: list[Any]) -> set[type]:
    """Return the types of the elements of nested lists, with `list` among them where lists lie
    beside other values."""
    # Level by level: recursion would end at Python's depth.
    while (kinds := set(map(type, values))) == {list}:
        values = [*itertools.chain.from_iterable(values)]
    return kinds


def _fits(given: np.ndarray, dtype: np.dtype) -> bool:
    """Return True for values that a type can hold."""
    if dtype.kind == "b":
        return given.dtype.kind == "b"
    if dtype.kind == "f":
        if given.dtype.kind not in "iuf":
            return False
        with np.errstate(over="ignore"):
            # A number that is too large becomes infinite in the narrower type.
            return bool(np.isfinite(given.astype(dtype)).all())
    if given.dtype.kind not in "iu":
        return False
    range_ = np.iinfo(dtype)
    return not given.size or (int(given.min()) >= range_.min and int(given.max()) <= range_.max)


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray:
    """Return a tensor of raw bytes, in row-major order and little-endian."""
    dtype = jnp.dtype(DATATYPES[datatype])
    if len(data) != (needed := math.prod(shape) * dtype.itemsize):
        raise Refusal(
            400,
            f"{name}: binary_data_size is {len(data)}; {datatype} of the shape {quoted(shape)} "
            f"needs {needed}",
        )
    if dtype.kind == "b":
        # A bool of another byte than 0 and 1 is undefined in numpy.
        return (np.frombuffer(data, np.uint8) != 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def to_values(name: str, array: np.ndarray) -> list[Any]:
    """Return the elements of a tensor for JSON, in row-major order. Refusal for values that JSON
    cannot hold."""
    if array.dtype == jnp.bfloat16:
        raise Refusal(400, f"{name}: BF16 is answered as binary data alone; ask for binary_data")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refusal(
            400, f"{name}: holds NaN or infinities, which JSON has not; ask for binary_data"
        )
    return array.ravel().tolist()


def to_bytes(array: np.ndarray) -> bytes:
    """Return the elements of a tensor as raw bytes."""
    return np.ascontiguousarray(array).tobytes()


def shape_of(name: str, shape: Any) -> list[int]:
    """Return a shape that a request gives. Refusal for anything but a list of sizes."""
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DIMS
        or not all(type(size) is int and 0 <= size < MOST_ELEMENTS for size in shape)
        # A size of 0 would hide what the others multiply to.
        or math.prod(size or 1 for size in shape) > MOST_ELEMENTS
    ):
        raise Refusal(400, f"{name}: shape must be a list of sizes, not {quoted(shape)}")
    return shape
