"""Weights alone in a checkpoint: found whole or not at all, on any mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack.checkpoint import weights
from maxstack.checkpoint.weights import WeightsReader, WeightsWriter
from maxstack.errors import ConfigError

WEIGHTS = {
    "blocks/block/up": np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8),
    "norm": np.zeros(8, np.float32),
    "scalar": np.float32(3),
}
SHAPES = {
    path: jax.ShapeDtypeStruct(np.shape(weight), np.float32) for path, weight in WEIGHTS.items()
}


def fill(writer, path):
    writer.fill(
        path, int(path.startswith("blocks")), lambda index: np.asarray(WEIGHTS[path])[index]
    )


def written(folder):
    writer = WeightsWriter(folder, SHAPES)
    for path in WEIGHTS:
        fill(writer, path)
    writer.finish()
    return WeightsReader(folder)


@pytest.mark.parametrize("chunk", [1 << 20, 32])
def test_chunked_weights_are_read_back(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(weights, "CHUNK", chunk)
    reader = written(tmp_path)
    assert reader.weights_only
    assert reader.config() is None
    for path, weight in WEIGHTS.items():
        np.testing.assert_array_equal(reader.read(path), weight)


def test_weights_are_read_onto_a_mesh(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    axes = {"blocks/block/up": PartitionSpec(None, None, "fsdp")}
    wanted = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes.get(path, PartitionSpec()))
        )
        for path, leaf in SHAPES.items()
    }
    loaded = written(tmp_path).load(wanted)
    assert loaded["blocks/block/up"].addressable_shards[0].data.shape == (4, 6, 1)
    np.testing.assert_array_equal(loaded["blocks/block/up"], WEIGHTS["blocks/block/up"])


def test_the_weights_of_another_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"another model: .*scalar"):
        written(tmp_path).load({"norm": SHAPES["norm"]})
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        WeightsReader(tmp_path / "elsewhere")


def test_a_writer_killed_within_a_line_of_its_journal_is_resumed(tmp_path):
    fill(WeightsWriter(tmp_path, SHAPES), "norm")
    with (tmp_path / ".importing" / "done.txt").open("a") as file:
        file.write("blocks/bl")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        WeightsReader(tmp_path)
    writer = WeightsWriter(tmp_path, SHAPES)
    assert writer.done == {"norm"}
    for path in WEIGHTS.keys() - writer.done:
        fill(writer, path)
    writer.finish()
    np.testing.assert_array_equal(WeightsReader(tmp_path).read("norm"), WEIGHTS["norm"])
