"""Recipes on a mesh against one device, as near as docs/QUANTIZATION.md says."""

import jax
import numpy as np
import pytest
import tiny
from test_meshes import GRADIENT

from maxstack.config.compose import plain, presets_dir, read_file

MODEL = tiny.one_block(
    {"kind": "attention", "heads": 4, "head_dim": 32},
    {"kind": "gated", "hidden": 128},
    embed=128,
    layers=1,
)


def one_step(recipe: str, devices: int, **mesh: int):
    """-> (loss, all gradients in one)."""
    rules = plain(read_file(presets_dir() / "quantization" / f"{recipe}.yml"))
    sections = {"mesh": {"data": 1} | mesh, "optimizer": GRADIENT, "data": {"seq_len": 32}}
    run = tiny.make_run(tiny.config(model=MODEL, quantization=rules, **sections), devices)
    state, scalars = run.step(run.init(), tiny.place(run))
    gradients = [jax.device_get(leaf).ravel() for leaf in jax.tree.leaves(state.opt) if leaf.ndim]
    return float(scalars["loss"]), np.concatenate(gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "loss", "gradient"),
    [({"data": 2, "fsdp": 4}, 1e-6, 2e-6), ({"fsdp": 2, "tensor": 4}, 5e-4, 1e-2)],
    ids=["rows split", "contractions split"],
)
def test_int8_on_a_mesh_is_as_near_to_one_device_as_documented(mesh, loss, gradient):
    (ours, mine), (theirs, other) = one_step("int8", 8, **mesh), one_step("int8", 1)
    assert ours == pytest.approx(theirs, rel=loss)
    assert np.linalg.norm(mine - other) <= gradient * np.linalg.norm(other)
