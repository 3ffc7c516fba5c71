"""A function of a model as a package holds it: named arrays in, named arrays out."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import export

if TYPE_CHECKING:
    from maxstack.run import Run

Dims = tuple[str | int, ...]
Arrays = dict[str, Any]
BATCHES = 1, 4, 16
"""Rows of programs whose batch cannot be any number."""
SYMBOLS = "InconclusiveDimensionOperation", "_DimExpr"
"""What jax says where a function needs to know a size."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument: its shape, in which named dimensions are of any size, and its type."""

    shape: Dims
    dtype: str
    range: tuple[float, float | str | None] | None = None
    """The least and the greatest value, which may be the size of a named dimension; null: any."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function (weights, state, inputs) -> (outputs, next state)."""

    name: str
    about: str
    function: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Dims]
    sizes: Sequence[Mapping[str, int | None]]
    """Of its programs: a size for each named dimension, None for any."""
    stateful: bool = False
    """True where it reads and replaces the package's cache."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function for some sizes, ready to be written."""

    sizes: Mapping[str, int | None]
    exported: export.Exported


def programs(
    run: "Run", signature: Signature, weights: Arrays, state: Arrays, platforms: Sequence[str]
) -> Iterator[Program]:
    """Yield the programs of a signature, for `weights` and `state` as shapes. Where the batch
    cannot be a symbol, there is a program for each of BATCHES."""
    own = state if signature.stateful else {}

    def made(sizes: Mapping[str, int | None]) -> Program:
        dims: dict[str | int, Any] = {
            # A batch may be a symbol; a length may not, because kernels choose their blocks by it.
            name: export.symbolic_shape(name)[0] if size is None else size
            for name, size in sizes.items()
        }
        inputs = {}
        for name, array in signature.inputs.items():
            shape = tuple(dims.get(dim, dim) for dim in array.shape)
            inputs[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype))
        function = jax.jit(run.within(signature.function), donate_argnums=1)
        return Program(
            sizes, export.export(function, platforms=tuple(platforms))(weights, own, inputs)
        )

    def of_any_batch(sizes: Mapping[str, int | None]) -> Program | None:
        """Return None where the function needs to know how many rows there are."""
        try:
            return made(sizes)
        except Exception as error:
            # jax has no one type of error for this, so it is known by its words.
            if not any(word in f"{type(error).__name__} {error}" for word in SYMBOLS):
                raise
            return None

    any_batch = run.mesh.size == 1
    for sizes in signature.sizes:
        if "batch" not in sizes:
            yield made(sizes)
        elif any_batch and (program := of_any_batch(sizes)):
            yield program
        else:
            # Decided once: what fails for one length fails for all.
            any_batch = False
            yield from (made({**sizes, "batch": batch}) for batch in BATCHES)
