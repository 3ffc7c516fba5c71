"""Vision transformers: parity with transformers, positions of another size, mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pydantic
import pytest
from flax import nnx

from maxstack.hf.contents import Contents
from maxstack.hf.reader import bicubic, pieces_of, slab_reader
from maxstack.layers.patches import sincos2d
from maxstack.models.model import weights_of
from maxstack.schema.encoder import EncoderConfig

FAMILIES = sorted(path.parent.name for path in parity.GOLDENS.glob("*/vision.npz"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_states_and_gradients_are_those_of_transformers(family):
    """States and outputs to 1e-5 of their deviation, the gradient of the patches to 1e-3."""
    golden = np.load(parity.GOLDENS / family / "vision.npz")
    cfg, graph, params = parity.model_and_params(parity.GOLDENS / family)

    def computed(params):
        model = nnx.merge(graph, nnx.State(params))
        x_BTD, _, _ = model.trunk({"pixels": jnp.asarray(golden["pixels"])})
        features = model.features(x_BTD)
        output = model.logits(features) if cfg.classes else features
        return (output**2).sum() / 2, (model.norm(x_BTD), output)

    (_, made), grads = jax.value_and_grad(computed, has_aux=True)(params)
    for ours, theirs in zip(made, (golden["hidden"], golden["output"]), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * theirs.std()
    wanted = np.moveaxis(golden["patch_grad"], (0, 1), (3, 2))
    assert np.abs(grads["patch"] - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_positions_are_resized_as_torch_does():
    """torch.nn.functional.interpolate(mode="bicubic", align_corners=False) of a row of 3, to 4 and
    to 2."""
    row = np.array([1.0, 2.0, 4.0], np.float32)
    np.testing.assert_allclose(
        bicubic(3, 4) @ row, [0.92822265625, 1.419921875, 2.83056640625, 4.1435546875], rtol=1e-6
    )
    np.testing.assert_allclose(bicubic(3, 2) @ row, [1.15625, 3.58203125], rtol=1e-6)
    np.testing.assert_array_equal(bicubic(5, 5), np.eye(5))


def positions_of(contents, model):
    """A reader of the table of positions, and its size."""
    shapes = shapes_of(model)
    pieces = pieces_of(contents, shapes, model)
    return slab_reader(pieces["positions"], shapes["positions"], np.dtype("float32"))


def shapes_of(model):
    return {path: leaf.shape for path, leaf in weights_of(model).items()}


def test_a_folder_serves_images_of_another_size():
    """The class token's position stays, those of patches are resized."""
    contents, whole = Contents(parity.GOLDENS / "vit"), (slice(None), slice(None))
    read = positions_of(contents, contents.model.model_copy(update={"image_size": 20}))
    before, table = positions_of(contents, contents.model)(whole), read(whole)
    assert table.shape == (26, 16)
    np.testing.assert_array_equal(table[0], before[0])
    grid = before[1:].reshape(3, 3, 16)
    made = np.einsum("ik,jl,kld->ijd", bicubic(3, 5), bicubic(3, 5), grid)
    np.testing.assert_allclose(table[1:], made.reshape(25, 16), rtol=1e-5)
    np.testing.assert_array_equal(read((slice(3, 9), slice(4, 8))), table[3:9, 4:8])


def test_a_new_head_leaves_the_folders_own():
    contents = Contents(parity.GOLDENS / "vit")
    wanted = contents.model.model_copy(update={"classes": 3})
    shapes = shapes_of(wanted)
    assert shapes.keys() - pieces_of(contents, shapes, wanted).keys() == {"head", "head_bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 3, "patch": 4}, "is not a multiple of patch=4; use 4"),
        ({"pool": {"kind": "cls"}, "cls": False}, "reads the class token"),
        ({"pool": {"kind": "map", "heads": 3, "hidden": 8}}, "heads=3 does not divide embed=16"),
        ({"positions": "rope2d"}, "needs a rope in every block"),
        ({"positions": "sincos2d", "embed": 18}, "must be a multiple of 4"),
    ],
)
def test_a_mistake_is_named(changes, message):
    block = {
        "mixer": {"kind": "attention", "causal": False, "heads": 2, "head_dim": 8, "rope": None},
        "mlp": {"kind": "dense", "hidden": 8},
    }
    base = {"kind": "encoder", "image_size": 8, "patch": 4, "embed": 16, "layers": 1}
    with pytest.raises(pydantic.ValidationError, match=message):
        EncoderConfig.model_validate(base | {"blocks": {"block": block}} | changes)


def test_fixed_positions_tell_rows_from_columns():
    """The two halves are of columns and of rows, the first place being the origin."""
    table = sincos2d(3, 8)
    assert table.shape == (9, 8) and len({tuple(row) for row in table.round(6)}) == 9
    np.testing.assert_allclose(table[0], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_allclose(table[1, 4:], table[0, 4:])
    np.testing.assert_allclose(table[3, :4], table[0, :4])
