"""Linear cross-entropy: every backend's values and gradients against the reference in float64, what
it keeps in memory, and meshes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from jax.sharding import Mesh, PartitionSpec

from maxstack import sharding
from maxstack.kernels.cross_entropy import OP, Request, linear_cross_entropy
from maxstack.kernels.cross_entropy.request import Call, Inputs
from maxstack.schema.mesh import MeshConfig
from maxstack.sharding import make_mesh

BACKENDS = {
    "reference": {},
    "blockwise": {"blocks": {"rows": 16}},
    "pallas_tpu": {
        "blocks": {"rows": 16, "tile_rows": 16, "tile_columns": 128, "depth": 128},
        "interpret": True,
    },
}
REQUESTS = {
    "plain": (Request(), False, "float32"),
    "bias and soft cap": (Request(soft_cap=5.0), True, "float32"),
    "z-loss": (Request(z_loss=0.05), False, "float32"),
    "all, rounded": (Request(5.0, 0.05), True, "bfloat16"),
}
ROWS, EMBED, VOCAB = (
    37,
    640,
    301,
)  # rows and vocabulary do not divide by a block, and a product takes five depths of a tile
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def module(backend):
    return importlib.import_module(OP[backend].module)


def arrays(dtype, bias, rows=ROWS, embed=EMBED, vocab=VOCAB):
    """x, head, bias or None, targets, weights of which a third is zero."""
    rng = np.random.default_rng(1)
    x, head = rng.normal(size=(rows, embed)), rng.normal(size=(embed, vocab)) * 2 / embed**0.5
    weights = rng.random(rows) * (np.arange(rows) % 3 > 0)
    given = (
        jnp.asarray(x, dtype),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(rng.normal(size=vocab), jnp.float32) if bias else None,
    )
    return (
        *given,
        jnp.asarray(rng.integers(0, vocab, rows), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def results(run, x, head, bias, targets, weights, request, **how):
    """Losses and the gradients by x, head and bias of 1.7 times the total, and the losses once more
    with no gradient asked for."""

    def total(x, head, bias):
        losses = run(x, head, targets, weights, request, bias, **how)
        return 1.7 * losses.total, losses

    gradients, losses, plain = jax.jit(
        lambda *floats: (*jax.grad(total, (0, 1, 2), has_aux=True)(*floats), total(*floats)[1])
    )(x, head, bias)
    return [losses, plain, gradients]


def assert_close(ours, wanted, tolerance):
    for (path, mine), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(wanted), strict=True
    ):
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        assert np.abs(mine - other).max() <= tolerance * np.abs(other).max(), (
            path,
            np.abs(mine - other).max() / np.abs(other).max(),
        )


def in_float64(x, head, bias, targets, weights, request):
    """By the reference; the head rounded as x's dtype rounds it."""
    head = head.astype(x.dtype)
    with jax.enable_x64(True):
        wide = [
            None if a is None else jnp.asarray(np.asarray(a, np.float64)) for a in (x, head, bias)
        ]
        return jax.tree.map(
            np.asarray,
            results(
                module("reference").run,
                *wide,
                targets,
                jnp.asarray(np.asarray(weights, np.float64)),
                request,
            ),
        )


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_reference_in_float64(backend, asked):
    request, bias, dtype = REQUESTS[asked]
    given = arrays(dtype, bias)
    (losses, plain, gradients), wanted = (
        results(module(backend).run, *given, request, **BACKENDS[backend]),
        in_float64(*given, request),
    )
    assert_close([losses, plain], wanted[:2], TOLERANCE["float32"])
    assert_close(gradients, wanted[2], TOLERANCE[dtype])


def test_the_reference_in_float64_is_the_closed_form():
    """p - 1[target] by the logits, and 2 z log(Z) p more for a z-loss."""
    request = Request(z_loss=0.05)
    x, head, _, targets, weights = (
        None if a is None else np.asarray(a, np.float64) for a in arrays("float32", False)
    )
    logits, picked = x @ head, np.arange(VOCAB) == targets[:, None]
    log_z = np.log(np.exp(logits).sum(1))
    d = (
        1.7
        * weights[:, None]
        * (np.exp(logits - log_z[:, None]) * (1 + 0.1 * log_z)[:, None] - picked)
    )
    losses, _, (of_x, of_head, _) = in_float64(*arrays("float32", False), request)
    nll = log_z - logits[picked]
    assert_close(
        [losses, of_x, of_head],
        [[(weights * (nll + 0.05 * log_z**2)).sum(), nll, log_z], d @ head.T, x.T @ d],
        1e-12,
    )


@pytest.mark.parametrize("backend", ["blockwise", "pallas_tpu"])
def test_no_logits_of_all_rows_are_in_the_program(backend):
    rows = 64
    x, head, _, targets, weights = arrays("float32", False, rows, 16, 512)

    def total(x, head):
        how = BACKENDS[backend]
        return module(backend).run(x, head, targets, weights, Request(), **how).total

    program = jax.make_jaxpr(jax.grad(total, (0, 1)))(x, head).jaxpr
    sizes = [var.aval.size for each in trees.equations(program) for var in each.outvars]
    assert max(sizes) <= 16 * 512 < rows * 512


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_slices_of_the_vocabulary_on_two_devices_make_one(backend):
    request, module_ = Request(5.0, 0.05), module(backend)
    call = Call(request, ("tensor",), **BACKENDS[backend])
    x, head, bias, targets, weights = arrays("float32", True, embed=16, vocab=VOCAB + 1)

    def local(x, head, bias, targets, weights):
        targets = targets - jax.lax.axis_index("tensor") * head.shape[1]
        inputs = Inputs(x, head, bias, targets, weights)
        scores, (d_x, d_head, d_bias) = module_.forward_with_gradients(inputs, call)
        return module_.forward(inputs, call), scores, (jax.lax.psum(d_x, "tensor"), d_head, d_bias)

    whole, split = PartitionSpec(), PartitionSpec("tensor")
    specs = (whole, PartitionSpec(None, "tensor"), split, whole, whole)
    both = jax.shard_map(
        local,
        mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        in_specs=specs,
        out_specs=((whole,) * 2, (whole,) * 2, (whole, specs[1], split)),
        check_vma=False,
    )
    losses, plain, gradients = in_float64(x, head, bias, targets, weights, request)
    assert_close(
        jax.jit(both)(x, head, bias, targets, weights),
        (plain[1:], losses[1:], jax.tree.map(lambda g: g / 1.7, gradients)),
        5e-6,
    )


@pytest.mark.parametrize("kept", ["embed vocab", "vocab embed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 4},
        {"data": 2, "context": 2, "tensor": 2},
        {"stage": 2, "expert": 2, "tensor": 2},
        {"slices": 2, "fsdp": 4},
    ],
    ids=str,
)
def test_a_mesh_means_the_same(sizes, kept):
    request = Request(5.0, 0.05)
    x, head, bias, targets, weights = arrays("float32", True, 64, 16, 64)
    cfg = MeshConfig(**({"data": 1} | sizes))
    mesh = make_mesh(cfg, jax.devices())
    tokens = 8, 8

    def on_mesh(x, head, targets, weights, request, bias):
        with sharding.use(mesh, cfg):
            x_BTD, (targets_BT, weights_BT) = (
                x.reshape(*tokens, -1),
                (a.reshape(tokens) for a in (targets, weights)),
            )
            return linear_cross_entropy(
                x_BTD, head, targets_BT, weights_BT, request, "blockwise", bias, kept
            )

    ours = results(on_mesh, x, head, bias, targets, weights, request)
    assert_close(
        jax.tree.map(np.ravel, ours),
        jax.tree.map(np.ravel, in_float64(x, head, bias, targets, weights, request)),
        2e-6,
    )


def test_on_a_mesh_the_gradient_of_the_head_is_kept_in_shards():
    cfg = MeshConfig(data=1, fsdp=4, tensor=2)
    mesh = make_mesh(cfg, jax.devices())
    x, head, _, targets, weights = arrays("float32", False, 64, 16, 64)

    def total(x, head):
        with sharding.use(mesh, cfg):
            return linear_cross_entropy(
                x.reshape(8, 8, -1), head, targets.reshape(8, 8), weights.reshape(8, 8), Request()
            ).total

    _, back = jax.jit(lambda x, head: jax.vjp(total, x, head))(x, head)
    kept = [
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(back)
        if leaf.shape == head.shape
    ]
    assert kept == [(4, 32)]
