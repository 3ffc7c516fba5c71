"""A whole model whose sequences are split over devices: the loss and every gradient are those of
one device."""

import functools

import jax
import numpy as np
import pytest
import tiers
import tiny
from flax import nnx

from maxstack import sharding
from maxstack.objectives.objective import Models

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8}
LONG = {
    "scaling": {
        "kind": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 5.0, 7.0],
        "original_length": 24,
    }
}
MLA = {
    "kind": "mla",
    "heads": 4,
    "q_lora": 16,
    "kv_lora": 16,
    "nope_dim": 8,
    "rope_dim": 4,
    "value_dim": 6,
    "causal": False,
}
MIXERS = {
    "local": ATTENTION | {"window": 9, "sinks": True, "rope": LONG},
    "latent": MLA,
    "reads": ATTENTION | {"share_kv": "local"},
}
MODEL = tiny.model(
    prefix=["local"],
    pattern=["latent"],
    layers=2,
    mtp={"block": "reads"},
    blocks={
        name: {"mixer": mixer, "mlp": {"kind": "gated", "hidden": 32}}
        for name, mixer in MIXERS.items()
    },
)


def loss_and_gradients(mesh, devices):
    cfg = tiny.config(model=MODEL, mesh=mesh, train={"batch_size": 4}, objective={"z_loss": 1e-3})
    run, rng = tiny.make_run(cfg, devices), np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jax.device_put(
            rng.normal(a.ndim == 1, 0.2, a.shape).astype(np.float32), a.sharding
        ),
        run.abstract.params,
    )

    def total(params, batch):
        with sharding.use(run.mesh, cfg.mesh):
            return run.objective.loss(Models(nnx.merge(run.graph, nnx.State(params))), batch).total

    return jax.jit(jax.value_and_grad(total))(params, run.batches.place(tiny.batch(cfg), 4))


@functools.cache
def on_one_device():
    return loss_and_gradients({}, 1)


@pytest.mark.parametrize("kind", tiers.of(["ring", "ulysses"], "ring"))
@pytest.mark.slow
def test_a_model_of_split_sequences_is_that_of_whole_ones(kind):
    wanted, gradients = on_one_device()
    loss, found = loss_and_gradients(
        {"data": 2, "context": 2, "tensor": 2, "context_kind": kind}, 8
    )
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(gradients), strict=True
    ):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(
            ours,
            theirs,
            rtol=1e-5,
            atol=1e-5 * np.abs(theirs).max(),
            err_msg=jax.tree_util.keystr(path),
        )
