"""Activations that a step saves for its backward pass, read from compiled programs: against the
shapes that the remat policy says."""

import jax
import jax.numpy as jnp
import pytest
import tiny

from maxstack.plan.activations import activations
from maxstack.plan.program import parse

ROWS, SEQ, EMBED = 8, 32, 32


def saved(layers, policy, **mesh):
    model = tiny.model(layers=layers, pattern=["global"], embed=EMBED, remat={"policy": policy})
    rows = {"data": {"seq_len": SEQ}, "train": {"batch_size": ROWS}}
    run = tiny.make_run(tiny.config(model=model, mesh=mesh, **rows), 8)
    return activations(parse(tiny.compiled(run).as_text()))


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "data": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.slow
def test_full_remat_saves_a_layers_input_alone(mesh):
    each = ROWS * SEQ * EMBED * 4 // 8
    assert saved(8, "full", **mesh) - saved(4, "full", **mesh) == 4 * each


@pytest.mark.slow
def test_without_remat_a_layer_saves_what_it_computes_but_no_copies_of_its_weights():
    each, weights = ROWS * SEQ * EMBED * 4 // 8, 4 * (EMBED * 8 * (4 + 2 + 2 + 4) + 3 * EMBED * 64)
    of_a_layer = (saved(8, "none", fsdp=8) - saved(4, "none", fsdp=8)) / 4
    assert (
        8 * each < of_a_layer < 16 * each + weights
    )  # queries, keys, values, hidden units and norms are some 22 times the input, weights 9


def test_weights_that_both_passes_read_are_no_activations():
    def step(w_DF, batch):
        def loss(w_DF):
            return jnp.square(jnp.tanh(batch["x"] @ jnp.sin(w_DF))).sum()

        return jax.grad(loss)(w_DF)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 1024), (4, 512)))
    found = activations(parse(jax.jit(step).lower(w, {"x": x}).compile().as_text()))
    assert 0 < found <= 2 * 4 * 1024 * 4
