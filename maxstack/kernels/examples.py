"""Random inputs of the shapes that a case describes, to measure a kernel with or to try it against
its reference."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack.kernels import attention, cross_entropy, grouped_matmul
from maxstack.kernels.attention.request import AttentionCase
from maxstack.kernels.backends import Op
from maxstack.kernels.cross_entropy.request import Case as CrossEntropyCase
from maxstack.kernels.grouped_matmul.case import Case as GroupedCase

DOCUMENTS, LONGEST = 3, 640


@dataclasses.dataclass(frozen=True)
class Example:
    """Arguments of an op's `run`."""

    args: tuple[Any, ...]
    floats: tuple[int, ...]
    """Which of them are differentiated."""
    result: Callable[[Any], jax.Array] = lambda out: out
    """The array, or number, that is differentiated."""


def of_attention(case: AttentionCase, batch: int = 1, seed: int = 0) -> Example:
    """Rows of a few documents of unequal lengths, and the chunks that are asked for; queries, keys
    and values of deviation 1."""
    rng = np.random.default_rng(seed)

    def numbers(length: int, heads: int, size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, length, heads, size)), case.dtype)

    def documents(length: int) -> jax.Array:
        return jnp.asarray(
            np.sort(rng.integers(1, 1 + DOCUMENTS, (batch, length)), axis=1), jnp.int32
        )

    q, k, v = (
        numbers(*shape)
        for shape in (
            (case.queries, case.heads, case.head_dim),
            (case.keys, case.kv_heads, case.head_dim),
            (case.keys, case.kv_heads, case.value_dim),
        )
    )
    sinks = jnp.asarray(rng.normal(size=case.heads), jnp.float32) if case.sinks else None
    chunk = case.request.chunk
    own = [documents(case.queries)] * case.packed
    same = [(mine, mine if case.queries == case.keys else documents(case.keys)) for mine in own]
    if chunk:
        same.append(
            (
                (jnp.arange(case.queries)[None] + case.request.offset) // chunk,
                jnp.arange(case.keys)[None] // chunk,
            )
        )
    return Example(
        (q, k, v, sinks, tuple(same), case.request), (0, 1, 2, 3) if case.sinks else (0, 1, 2)
    )


def smaller_attention(case: AttentionCase) -> AttentionCase:
    """Fewer positions, since the reference makes every score."""
    return dataclasses.replace(
        case, queries=min(case.queries, LONGEST), keys=min(case.keys, LONGEST)
    )


def of_cross_entropy(case: CrossEntropyCase, seed: int = 0) -> Example:
    """Hidden states of deviation 1 and logits of deviation 1; a tenth of the weights is 0."""
    rng = np.random.default_rng(seed)
    x, head = (
        jnp.asarray(rng.normal(size=shape) / over, case.dtype)
        for shape, over in (
            ((case.rows, case.embed), 1),
            ((case.embed, case.vocab), case.embed**0.5),
        )
    )
    targets, weights = (
        jnp.asarray(rng.integers(0, case.vocab, case.rows), jnp.int32),
        jnp.asarray(rng.random(case.rows) > 0.1, jnp.float32),
    )
    bias = jnp.asarray(rng.normal(size=case.vocab), jnp.float32) if case.bias else None
    return Example(
        (x, head, targets, weights, case.request, bias),
        (0, 1, 5) if case.bias else (0, 1),
        lambda losses: losses.total,
    )


def smaller_cross_entropy(case: CrossEntropyCase) -> CrossEntropyCase:
    """Fewer tokens."""
    return dataclasses.replace(case, rows=min(case.rows, LONGEST))


def of_grouped_matmul(case: GroupedCase, seed: int = 0) -> Example:
    """Groups of unequal sizes that hold most of the rows."""
    rng = np.random.default_rng(seed)
    x, w = (
        jnp.asarray(rng.normal(size=shape) / over, case.dtype)
        for shape, over in (
            ((case.rows, case.contracted), 1),
            ((case.groups, case.contracted, case.columns), case.contracted**0.5),
        )
    )
    share = rng.random(case.groups) + 0.5
    return Example((x, w, jnp.asarray(0.95 * case.rows * share / share.sum(), jnp.int32)), (0, 1))


def smaller_grouped_matmul(case: GroupedCase) -> GroupedCase:
    """Fewer rows, but some for each group."""
    return dataclasses.replace(case, rows=min(case.rows, max(LONGEST, 8 * case.groups)))


OPS: dict[str, tuple[Op, Callable[..., Example], Callable[..., Any]]] = {
    attention.OP.name: (attention.OP, of_attention, smaller_attention),
    cross_entropy.OP.name: (cross_entropy.OP, of_cross_entropy, smaller_cross_entropy),
    grouped_matmul.OP.name: (grouped_matmul.OP, of_grouped_matmul, smaller_grouped_matmul),
}
"""Op -> (its backends, an example of a case, a case like it that is small enough for the
reference)."""
