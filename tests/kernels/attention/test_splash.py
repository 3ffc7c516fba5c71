"""jax's splash kernels mean what ours mean wherever they are accepted; what they would get wrong is
refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.attention import reference, splash
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device

SMALL = dict(block_q=128, block_k=128, block_q_dkv=128, block_k_dkv=128)
CASE = dict(
    request=Request(0.2),
    queries=256,
    keys=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    value_dim=64,
    dtype="bfloat16",
    packed=True,
    sinks=False,
    device=Device("tpu", "TPU v5p"),
)
REQUESTS = {
    "queries without keys and keys without queries": (256, 384, Request(0.25, offset=-140)),
    "window": (256, 384, Request(0.25, window=100, soft_cap=2.0, offset=128)),
    "both ways": (256, 256, Request(0.25, causal=False)),
    "window both ways": (256, 384, Request(0.25, window=100, causal=False, offset=60)),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.slow
def test_values_and_gradients_are_the_reference_also_where_documents_hide_all_keys(name):
    t, s, request = REQUESTS[name]
    assert (
        splash.supports(AttentionCase(**{**CASE, "request": request, "queries": t, "keys": s}))
        is None
    )
    rng = np.random.default_rng(0)
    q, k, v, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, t, 2, 40), (2, s, 1, 40), (2, s, 1, 24), (2, t, 2, 24))
    )
    same = (
        (
            jnp.asarray(rng.integers(0, 3, (1, t)), jnp.int32),
            jnp.asarray(rng.integers(1, 4, (1, s)), jnp.int32),
        ),
    )

    def results(run):
        def loss(q, k, v):
            o = run(Inputs(q, k, v, None, same), request)
            return jnp.vdot(o, weights), o

        (_, o), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return o, *grads

    for got, wanted in zip(
        results(functools.partial(splash.run, blocks=SMALL, interpret=True)),
        results(reference.run),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float32"}, "rounds float32"),
        ({"request": Request(0.2, chunk=64)}, "one number a position"),
        ({"queries": 300}, "300 queries"),
        ({"keys": 300}, "300 keys"),
        ({"head_dim": 320}, "head_dim 320"),
        ({"request": Request(0.2, offset=-256)}, "offset -256"),
        ({"queries": 1 << 17, "keys": 1 << 17}, "while it traces"),
        ({"request": Request(0.2, window=10, offset=300)}, "offset 300"),
    ],
)
def test_what_it_cannot_do_is_refused(change, reason):
    assert splash.supports(AttentionCase(**CASE)) is None
    assert reason in splash.supports(AttentionCase(**{**CASE, **change}))


def test_its_tables_grow_with_tiles_and_not_with_places():
    kernel = splash._kernel(
        Request(1.0, window=1000), 2, 4096, 4096, tuple(splash._default(4096, 4096).items()), False
    )
    assert max(x.size for x in jax.tree.leaves(kernel)) <= 4096
