"""Quantized products against Qwix's own training provider, and what a rule's words mean for single
operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from maxstack.kernels.grouped_matmul import grouped_matmul
from maxstack.weights.arithmetic import (
    Operand,
    QuantSpec,
    dequantize,
    fake_quantize,
    in_range,
    product,
    quantize,
)
from maxstack.weights.experts import QuantizedExperts, RoundedExperts, codes

ROWS, INPUTS, OUTPUTS = 24, 32, 16
RULES = [
    {"weight_qtype": "int8", "act_qtype": "int8"},
    {"weight_qtype": "int4"},
    {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 8},
    {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8", "tile_size": 8},
    {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"},
    {
        "weight_qtype": "int8",
        "act_qtype": "int8",
        "bwd_qtype": "int8",
        "bwd_weight_grad_tile_size": 8,
    },
    {"weight_qtype": "nf4", "tile_size": 8},
    {
        "weight_qtype": "int4",
        "act_qtype": "int8",
        "weight_calibration_method": "rms,2",
        "act_calibration_method": "absmax,0.8",
    },
    {"weight_qtype": "int8", "act_qtype": "int8", "weight_calibration_method": "minmax"},
    {
        "weight_qtype": "int8",
        "act_qtype": "int8",
        "bwd_qtype": "int8",
        "disable_channelwise_axes": True,
    },
    {"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 32},
]


def operands(weights=(INPUTS, OUTPUTS)):
    """Inputs, weights and the gradient of their product."""
    rng, shapes = np.random.default_rng(0), ((ROWS, INPUTS), weights, (ROWS, OUTPUTS))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def how(
    weight_qtype,
    act_qtype=None,
    bwd_qtype=None,
    tile_size=None,
    weight_calibration_method="absmax",
    act_calibration_method="absmax",
    bwd_weight_grad_tile_size=None,
    disable_channelwise_axes=False,
):
    each = not disable_channelwise_axes
    return QuantSpec(
        Operand(weight_qtype, tile_size, weight_calibration_method, each),
        Operand(act_qtype, tile_size, act_calibration_method, each) if act_qtype else None,
        Operand(bwd_qtype, None, "absmax", each) if bwd_qtype else None,
        Operand(bwd_qtype, bwd_weight_grad_tile_size, "absmax", each) if bwd_qtype else None,
    )


class Linear(nnx.Module):
    def __init__(self, w):
        self.kernel = nnx.Param(w)

    def __call__(self, x):
        return jax.lax.dot_general(x, self.kernel[...], (((1,), (0,)), ((), ())))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(map(str, rule.values())))
def test_a_product_and_its_gradients_are_those_of_qwix(rule):
    x, w, g = operands()
    graph, state = nnx.split(
        qwix.quantize_model(Linear(w), qwix.QtProvider([qwix.QtRule(**rule)]), x)
    )

    def theirs(x, w):
        return nnx.merge(graph, nnx.State({"kernel": state["kernel"].replace(w)}))(x)

    def ours(x, w):
        return product(how(**rule), "", x, w)

    for f in (
        lambda f: f(x, w),
        lambda f: jax.vjp(f, x, w)[1](g)[0],
        lambda f: jax.vjp(f, x, w)[1](g)[1],
    ):
        np.testing.assert_allclose(f(ours), f(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "qtype",
    [
        "int2",
        "int4",
        "int8",
        "nf4",
        "float8_e4m3fn",
        "mxfp8",
        "mxfp4",
    ],
)
def test_rounding_errs_by_half_a_step_at_most_and_passes_gradients_straight_through(qtype):
    x = operands()[0]
    steps = {
        "nf4": 0.16,
        "float8_e4m3fn": 2**-4,
        "float8_e5m2": 2**-3,
        "mxfp8": 2**-3,
        "mxfp4": 2**-2,
    }
    step = steps.get(qtype) or 0.5 / (2 ** (int(qtype[3:]) - 1) - 0.5)
    rounded = Operand(qtype, 32)
    largest = jnp.abs(x).max(axis=1, keepdims=True)
    assert (jnp.abs(fake_quantize(x, rounded, -1) - x) <= step * 1.001 * largest).all()
    np.testing.assert_array_equal(jax.grad(lambda x: fake_quantize(x, rounded, -1).sum())(x), 1.0)


def test_what_lies_beyond_a_given_range_is_cut_off_and_has_no_gradient():
    x, narrow = jnp.linspace(-3.0, 3.0, 32)[None], Operand("int8", method="fixed,-1,1")
    assert jnp.abs(fake_quantize(x, narrow, -1)).max() <= 128 / 127.5
    np.testing.assert_array_equal(
        jax.grad(lambda x: fake_quantize(x, narrow, -1).sum())(x),
        (jnp.abs(x) <= 1.0).astype(jnp.float32),
    )
    q = quantize(x, narrow, -1)
    np.testing.assert_array_equal(in_range(x, q, narrow), jnp.abs(x) <= 1.0)


def test_bfloat16_operands_are_rounded_by_scales_of_float32():
    x = operands()[0].astype(jnp.bfloat16)
    q = quantize(x, Operand("int8"), -1)
    assert q.scale.dtype == jnp.float32
    np.testing.assert_array_equal(
        dequantize(q, jnp.float32),
        dequantize(quantize(x.astype(jnp.float32), Operand("int8"), -1), jnp.float32),
    )


@pytest.mark.parametrize(("tile", "bwd"), [(None, None), (8, None), (None, "int8")])
@pytest.mark.slow
def test_experts_in_low_precision_are_products_one_by_one(tile, bwd):
    sizes = jnp.asarray([5, 0, 12, 3])
    x, w, g = operands((4, INPUTS, OUTPUTS))
    rule = how("int8", "int8", bwd, tile)

    def ours(x, w):
        return QuantizedExperts(
            codes(w, rule.weight, jnp.float32), quantize(w, rule.weight, 1).scale, rule
        ).multiply(x, sizes, "auto")

    def one_by_one(x, w):
        ends = np.cumsum(sizes)
        parts = [
            product(how("int8", "int8", None, tile), "", x[end - size : end], w[e])
            for e, (end, size) in enumerate(zip(ends, sizes, strict=True))
            if size
        ]
        return jnp.concatenate([*parts, jnp.zeros((ROWS - ends[-1], OUTPUTS))])

    np.testing.assert_allclose(ours(x, w), one_by_one(x, w), rtol=1e-5, atol=1e-5)
    mine, known = (jax.vjp(f, x, w)[1](g) for f in (ours, one_by_one))
    plain = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, "reference"), x, w)[1](g)
    for ours_, theirs, float_ in zip(mine, known, plain, strict=True):
        assert np.abs(ours_ - theirs).max() <= (0.02 if bwd is None else 0.05) * np.abs(
            theirs
        ).max() and not np.array_equal(ours_, float_)


@pytest.mark.slow
def test_gradients_of_experts_are_rounded_where_activations_are_not():
    sizes = np.array([5, 0, 12, 7])
    x, w, g = operands((4, INPUTS, OUTPUTS))
    rule, of = how("int4", None, "int4"), np.repeat(np.arange(4), sizes)
    dx, dw = jax.vjp(
        lambda x, w: RoundedExperts(w, rule).multiply(x, jnp.asarray(sizes), "reference"), x, w
    )[1](g)
    by_rows, by_columns = fake_quantize(g, rule.grad, -1), fake_quantize(g, rule.weight_grad, 0)
    np.testing.assert_allclose(dx, jnp.einsum("SN,SKN->SK", by_rows, w[of]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        dw, jnp.stack([x[of == e].T @ by_columns[of == e] for e in range(4)]), rtol=1e-4, atol=1e-4
    )
    assert jnp.abs(by_rows - g).max() > 0.1
