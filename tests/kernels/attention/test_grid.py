"""Every backend of attention over a grid of features and odd sizes, values and gradients, against
the reference in float64.

Splash runs in interpret mode, for what it would accept on a TPU; hopper has tests of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from maxstack.kernels.attention import OP
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device
from maxstack.kernels.examples import attention_example

DEVICES = {
    "blockwise": Device("cpu", "cpu"),
    "splash": Device("tpu", "TPU v5p"),
}
HOW = {"blockwise": {"blocks": {"rows": 64, "keys": 32}}, "splash": {"interpret": True}}
"""Tiles so small that rows of at most 150 positions are loops over several sizes of them."""
EXAMPLES = {"blockwise": 16, "splash": 6}
DIMS = [16, 24, 64, 128]
ROUNDING = {"float32": 2e-5, "bfloat16": 3e-2}


@st.composite
def cases(draw, device):
    whole = device == DEVICES["splash"]
    queries, kv, dim = (
        draw(st.sampled_from([128, 384]) if whole else st.integers(1, 150)),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(DIMS)),
    )
    keys = draw(st.sampled_from([queries, queries + (128 if whole else 37), max(1, queries - 20)]))
    limit = draw(st.sampled_from(["none", "window", "chunk"]))
    request = Request(
        dim**-0.5,
        draw(st.integers(1, 90)) if limit == "window" else None,
        draw(st.sampled_from([None, 1.5])),
        draw(st.integers(1, 90)) if limit == "chunk" else None,
        draw(st.booleans()),
        keys - queries if keys > queries else 0,
    )
    return AttentionCase(
        request,
        queries,
        keys,
        kv * draw(st.sampled_from([1, 3])),
        kv,
        dim,
        draw(st.sampled_from([dim, 32])),
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.booleans()),
        draw(st.booleans()),
        device,
    )


def outputs(run, example, dtype):
    """The result and all gradients of it, weighted at random."""

    def both(*floats):
        out, pull = jax.vjp(functools.partial(example.outputs, run), *floats)
        return out, *pull(jnp.asarray(np.random.default_rng(1).normal(size=out.shape), out.dtype))

    floats = (x.astype(dtype) for x in example.floats)
    return [np.asarray(x, np.float64) for x in jax.jit(both)(*floats)]


@pytest.mark.parametrize("name", tiers.of(DEVICES))
def test_values_and_gradients_are_those_of_the_reference_in_float64(name):
    backend = OP[name]
    run = functools.partial(backend.run, **HOW[name])

    @settings(
        max_examples=EXAMPLES[name],
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(DEVICES[name]))
    def check(case):
        assume(backend.supports(case) is None)
        example = attention_example(case, batch=2, seed=case.queries)
        with jax.enable_x64(True):
            wanted = outputs(OP["reference"].run, example, jnp.float64)
        for got, want in zip(outputs(run, example, case.dtype), wanted, strict=True):
            np.testing.assert_allclose(
                got, want, rtol=0, atol=ROUNDING[case.dtype] * max(1.0, np.abs(want).max())
            )

    check()


@pytest.mark.parametrize("name", tiers.of(["reference", *DEVICES], "blockwise"))
def test_changing_one_document_never_changes_another(name):
    """Bit for bit, forward and backward, in both directions."""
    device = DEVICES.get(name, DEVICES["blockwise"])
    case = AttentionCase(Request(0.1), 384, 384, 4, 2, 128, 128, "bfloat16", True, False, device)
    assert OP[name].supports(case) is None
    run = functools.partial(OP[name].run, **HOW.get(name, {}))
    floats = attention_example(case).floats
    first = np.asarray(jnp.arange(384) < 170)
    numbers = jnp.where(first, 7, 3)[None].astype(jnp.int32)

    @jax.jit
    def both(q, k, v):
        out, pull = jax.vjp(
            lambda *floats: run(Inputs(*floats, None, ((numbers, numbers),)), case.request),
            q,
            k,
            v,
        )
        return out, *pull(jnp.ones_like(out))

    before = both(*floats)
    for changed in (first, ~first):
        after = both(*(jnp.where(changed[None, :, None, None], x + 1, x) for x in floats))
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old[:, ~changed], new[:, ~changed])
            assert not np.array_equal(old[:, changed], new[:, changed])
