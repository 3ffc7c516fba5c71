"""What jax's splash kernels would compute wrongly is refused or mended; test_grid.py has values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxstack.kernels.attention import splash
from maxstack.kernels.attention.request import AttentionCase, Inputs, Request
from maxstack.kernels.backends import Device

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


@pytest.mark.slow
def test_a_query_whose_document_has_no_key_gives_nothing_and_adds_to_no_gradient():
    """Without a sink, splash gives it the mean of hidden values."""
    draw = np.random.default_rng(0).normal(size=(3, 1, 128, 1, 64))
    blind = jnp.arange(128) >= 64
    same = ((jnp.where(blind, 2, 1)[None], jnp.ones((1, 128), jnp.int32)),)

    def attend(q, k, v):
        return splash.run(Inputs(q, k, v, None, same), Request(0.2), interpret=True)

    out, pull = jax.vjp(attend, *jnp.asarray(draw, jnp.bfloat16))
    assert out[:, ~blind].any() and not out[:, blind].any()
    gradients = pull(jnp.broadcast_to(blind[:, None, None], out.shape).astype(out.dtype))
    assert not any(x.any() for x in gradients)
