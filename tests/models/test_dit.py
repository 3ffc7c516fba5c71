"""Diffusion transformers: parity with diffusers, folders both ways."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
from flax import nnx

from maxstack.errors import ConfigError
from maxstack.hf.contents import Contents
from maxstack.hf.export import export
from maxstack.load import load
from maxstack.models.model import abstract, weights_of
from maxstack.state import tree

SYNTHETIC = {"kind": "synthetic", "vocab": 10}
GOLDEN = parity.GOLDENS / "dit"


def given(golden):
    """The model's inputs."""
    time = jnp.asarray(golden["time"], jnp.float32)
    return {"time": time} | {name: jnp.asarray(golden[name]) for name in ("pixels", "label")}


def computed(folder, golden):
    """(what the folder's model makes, the gradient of half its square for the patches)."""
    _, graph, params = parity.model_and_params(folder)

    def half(params):
        made, _ = nnx.merge(graph, nnx.State(params))(given(golden))
        return (made**2).sum() / 2, made

    (_, made), grads = jax.value_and_grad(half, has_aux=True)(params)
    return made, grads["patch"]


@pytest.mark.slow
def test_output_and_gradients_are_those_of_diffusers():
    """The output to 1e-5 of its deviation, the gradient of the patches to 1e-3."""
    golden = np.load(GOLDEN / "dit.npz")
    made, grad = computed(GOLDEN, golden)
    assert np.abs(made - golden["output"]).max() < 1e-5 * golden["output"].std()
    wanted = np.moveaxis(golden["patch_grad"], (0, 1), (3, 2))
    assert np.abs(grad - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.slow
def test_one_condition_is_exported_into_every_block(tmp_path):
    golden, own = np.load(GOLDEN / "dit.npz"), Contents(GOLDEN).model
    shared = {"modulation": "shared"}
    blocks = {name: block.model_copy(update=shared) for name, block in own.blocks.items()}
    model = own.model_copy(update={"blocks": blocks, "out_channels": None, "dtype": "float32"})
    shapes = {path: leaf.shape for path, leaf in weights_of(model).items()}
    rng, out = np.random.default_rng(0), tmp_path / "out"
    ours = {path: 0.2 * rng.normal(size=shapes[path]).astype(np.float32) for path in shapes}
    export(model, shapes, ours.__getitem__, out, shard_size=20_000)
    assert not (out / "model.safetensors").exists()
    made, _ = computed(out, golden)
    wanted, _ = nnx.merge(abstract(model)[0], nnx.State(tree(ours)))(given(golden))
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_type": "layer_norm"}, "norm_type='layer_norm' (supported: 'ada_norm_zero')"),
        ({"caption_channels": 8}, "unknown keys: caption_channels"),
        ({"_class_name": "DiTTransformer3DModel"}, "did you mean DiTTransformer2DModel"),
    ],
)
def test_another_model_of_diffusers_is_refused(change, message, tmp_path):
    folder = shutil.copytree(GOLDEN, tmp_path / "dit")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(message)):
        Contents(folder)


def test_a_pipelines_folder_names_the_one_inside(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "pipeline" / "transformer")
    with pytest.raises(ConfigError, match=r"give .*transformer, of the pipeline"):
        Contents(tmp_path / "pipeline")


@pytest.mark.slow
def test_a_folder_is_drawn_from_once_it_is_said_what_it_predicts(tmp_path, maxstack):
    run, grid, npz = tmp_path / "run", tmp_path / "grid.png", tmp_path / "made.npz"
    drawing = "--classes 1,3 --count 2 --steps 2"
    for words in (f"sample {GOLDEN} {drawing} --out {grid}", f"import {GOLDEN} --out {tmp_path}"):
        assert "does not say what its model predicts" in maxstack(words, code=1)
    said = "objective.prediction=eps objective.path=vp"
    maxstack(f"import {GOLDEN} --out {run} {said}")
    assert load(run / "config.yml").objective.path == "vp"
    with pytest.raises(ConfigError, match="say what the weights of model.from were trained to"):
        load({"model": {"from": str(GOLDEN)}, "data": {"sources": [SYNTHETIC]}})
    for model in (f"{GOLDEN} {said}", run):
        latents = maxstack(f"sample {model} {drawing} --out {grid}", code=1)
        assert "a model of 4 channels makes latents; give a .npz" in latents
        maxstack(f"sample {model} {drawing} --out {npz}")
        assert np.load(npz)["latents"].shape == (2, 8, 8, 4)
    assert "objective cannot be changed" in maxstack(f"sample {run} {said}", code=1)
