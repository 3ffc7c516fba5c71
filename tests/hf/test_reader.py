"""Weights are read into the shards that a mesh wants, the same on any mesh."""

import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from parity import GOLDENS, loaded, poisoned

from maxstack.errors import DataError
from maxstack.hf.contents import Contents
from maxstack.hf.reader import load_params, pieces_of
from maxstack.hf.tensors import check_finite
from maxstack.models.model import abstract


def weights_of(contents, dtype="float32"):
    return nnx.to_pure_dict(abstract(contents.model.model_copy(update={"param_dtype": dtype}))[1])


def shapes_of(tree):
    return {
        "/".join(map(str, path)): leaf.shape
        for path, leaf in nnx.traversals.flatten_mapping(tree).items()
    }


def spread(leaf, mesh):
    """The leaf with each mesh axis over the first dimension that it divides."""
    axes, free = [], [*mesh.axis_names]
    for size in leaf.shape:
        fitting = [axis for axis in free if size % mesh.shape[axis] == 0]
        axes.append(fitting[0] if fitting else None)
        free = [axis for axis in free if axis != axes[-1]]
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_eight_devices_get_what_one_gets(name):
    contents, mesh = Contents(GOLDENS / name), jax.make_mesh((4, 2), ("fsdp", "tensor"))
    wanted = weights_of(contents)
    eight = loaded(contents, jax.tree.map(lambda leaf: spread(leaf, mesh), wanted))
    assert sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(eight)) > 5
    jax.tree.map(np.testing.assert_array_equal, loaded(contents, wanted), eight)


def test_numbers_are_cast_to_what_the_run_wants():
    contents, dtypes = Contents(GOLDENS / "llama"), ("float32", "bfloat16")
    exact, cast = (loaded(contents, weights_of(contents, dtype))["embed"] for dtype in dtypes)
    assert cast.dtype == "bfloat16"
    np.testing.assert_array_equal(exact.astype("bfloat16"), cast)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.norm.weight", None, "missing model.norm.weight"),
        (
            "model.layers.0.mlp.extra.weight",
            np.zeros(3, np.float32),
            "unknown .*tensor model.layers.0.mlp.extra.weight",
        ),
        (
            "model.norm.weight",
            np.zeros(3, np.float32),
            r"tensor model.norm.weight has shape \[3\], and this model",
        ),
        (
            "model.norm.weight",
            np.zeros(16, np.int32),
            "tensor model.norm.weight has dtype int32",
        ),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_refused(tmp_path, name, tensor, reason):
    shutil.copyfile(GOLDENS / "llama" / "config.json", tmp_path / "config.json")
    found = safetensors.numpy.load_file(GOLDENS / "llama" / "model.safetensors") | {name: tensor}
    held = {key: value for key, value in found.items() if value is not None}
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    contents = Contents(tmp_path)
    with pytest.raises(DataError, match=reason):
        pieces_of(contents, shapes_of(weights_of(contents)))


@pytest.mark.parametrize(
    ("family", "value"), [("llama", np.nan), ("qwen3_moe", np.inf), ("gpt_oss", -np.inf)]
)
def test_a_tensor_that_is_not_finite_is_named_unless_such_are_allowed(family, value, tmp_path):
    name = poisoned(GOLDENS / family, tmp_path / "model", value)
    contents = Contents(tmp_path / "model")
    wanted = nnx.traversals.flatten_mapping(weights_of(contents), sep="/")
    with pytest.raises(DataError, match=rf"model.safetensors: tensor {name}: 1 of [0-9,]+ numbers"):
        dict(load_params(contents, wanted, progress=False))
    leaves = [leaf for _, leaf in load_params(contents, wanted, progress=False, finite=False)]
    assert not all(np.isfinite(leaf).all() for leaf in leaves)


def test_a_number_too_large_for_the_runs_dtype_is_told(tmp_path):
    name = poisoned(GOLDENS / "llama", tmp_path / "model", 1e6)
    contents = Contents(tmp_path / "model")
    wanted = nnx.traversals.flatten_mapping(weights_of(contents, "float16"), sep="/")
    with np.errstate(over="ignore"), pytest.raises(DataError, match=f"{name}.*in float16"):
        dict(load_params(contents, wanted, progress=False))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_the_largest_and_smallest_numbers_are_finite_wherever_they_stand(dtype):
    limits = ml_dtypes.finfo(dtype)
    values = np.array([limits.max, limits.min, limits.smallest_subnormal, -0.0] * 40_000, dtype)
    check_finite(values, "here")
    for place in (0, 65_535, 65_536, values.size - 1):
        odd = values.copy()
        odd[place] = np.nan
        with pytest.raises(DataError, match="here: 1 of 160,000"):
            check_finite(odd, "here")
