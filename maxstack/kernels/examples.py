"""Random inputs of the shapes that a case describes, to measure a kernel with or to compare it with
its reference."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels import attention, cross_entropy, grouped_matmul
from maxstack.kernels.attention.request import AttentionCase, Inputs
from maxstack.kernels.backends import Op
from maxstack.kernels.cross_entropy import CrossEntropyCase
from maxstack.kernels.grouped_matmul import GroupedMatmulCase

DOCUMENTS, LONGEST = 3, 640
Run = Callable[..., Any]
"""The `run` of a backend."""


class Example(NamedTuple):
    """A call of an op."""

    floats: tuple[jax.Array, ...]
    """Arguments that are differentiated."""
    outputs: Callable[..., jax.Array]
    """(a backend's `run`, *floats) -> the array, or number, that is differentiated."""


def attention_example(case: AttentionCase, batch: int = 1, seed: int = 0) -> Example:
    """Rows of a few documents of unequal lengths, in the chunks of the request; queries, keys and
    values of deviation 1."""
    rng = np.random.default_rng(seed)

    def documents(length: int) -> jax.Array:
        numbers = np.sort(rng.integers(1, 1 + DOCUMENTS, (batch, length)), axis=1)
        return jnp.asarray(numbers, jnp.int32)

    floats = [
        _normal(rng, (batch, length, heads, dim), case.dtype)
        for length, heads, dim in (
            (case.queries, case.heads, case.head_dim),
            (case.keys, case.kv_heads, case.head_dim),
            (case.keys, case.kv_heads, case.value_dim),
        )
    ]
    if case.sinks:
        floats.append(_normal(rng, (case.heads,)))
    same = []
    if case.packed:
        mine = documents(case.queries)
        same.append((mine, mine if case.queries == case.keys else documents(case.keys)))
    if chunk := case.request.chunk:
        queries = jnp.arange(case.queries)[None] + case.request.offset
        same.append((queries // chunk, jnp.arange(case.keys)[None] // chunk))

    def outputs(
        run: Run, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        return run(Inputs(q, k, v, sinks, tuple(same)), case.request)

    return Example(tuple(floats), outputs)


def cross_entropy_example(case: CrossEntropyCase, seed: int = 0) -> Example:
    """Hidden states and logits of deviation 1; a tenth of the weights is 0."""
    rng = np.random.default_rng(seed)
    x = _normal(rng, (case.rows, case.embed), case.dtype)
    head = _normal(rng, (case.embed, case.vocab), case.dtype, case.embed**0.5)
    targets = jnp.asarray(rng.integers(0, case.vocab, case.rows), jnp.int32)
    weights = jnp.asarray(rng.random(case.rows) > 0.1, jnp.float32)
    bias = [_normal(rng, (case.vocab,))] if case.bias else []

    def outputs(
        run: Run, x: jax.Array, head: jax.Array, bias: jax.Array | None = None
    ) -> jax.Array:
        return run(x, head, targets, weights, case.request, bias).total

    return Example((x, head, *bias), outputs)


def grouped_matmul_example(case: GroupedMatmulCase, seed: int = 0) -> Example:
    """Groups of unequal sizes that hold most of the rows."""
    rng = np.random.default_rng(seed)
    x = _normal(rng, (case.rows, case.contracted), case.dtype)
    shape = case.groups, case.contracted, case.columns
    w = _normal(rng, shape, case.dtype, case.contracted**0.5)
    share = rng.random(case.groups) + 0.5
    sizes = jnp.asarray(0.95 * case.rows * share / share.sum(), jnp.int32)
    return Example((x, w), lambda run, x, w: run(x, w, sizes))


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", divisor: float = 1
) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) / divisor, dtype)


def shrink(case: Any) -> Any:
    """Reduce the positions or rows of a case, but leave some rows for each group: the reference
    computes every score."""
    most = {"queries": LONGEST, "keys": LONGEST, "rows": LONGEST}
    if isinstance(case, GroupedMatmulCase):
        most["rows"] = max(LONGEST, 8 * case.groups)
    sizes = {name: min(size, most[name]) for name, size in vars(case).items() if name in most}
    return dataclasses.replace(case, **sizes)


OPS: dict[str, tuple[Op, Callable[..., Example]]] = {
    attention.OP.name: (attention.OP, attention_example),
    cross_entropy.OP.name: (cross_entropy.OP, cross_entropy_example),
    grouped_matmul.OP.name: (grouped_matmul.OP, grouped_matmul_example),
}
"""Op -> (its backends, an example of a case)."""
