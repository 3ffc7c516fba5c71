"""Weights alone in a checkpoint: written a piece at a time, so that memory stays bounded, and read
one at a time or into shards."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from maxstack.checkpoint import manifest
from maxstack.errors import ConfigError

Index = tuple[slice, ...]
Made = Callable[[Iterable[tuple[str, jax.Array]]], dict[str, jax.Array]]
PREFIX = "params/"
CHUNK = 64 << 20


class WeightsWriter:
    """Step 0 of a run's checkpoints, weights alone, that appears when `finish` is called. What a
    killed writer left is gone on with.

    Orbax makes the checkpoint, with a placeholder for each weight; the arrays are then laid out and
    filled a chunk at a time, so that no weight is ever whole in memory.
    """

    def __init__(self, run: Path, weights: Mapping[str, jax.ShapeDtypeStruct]):
        self._run, self._partial, self._weights = (
            run.absolute(),
            run.absolute() / ".importing",
            weights,
        )
        self._journal = self._partial / "done.txt"
        if not self._journal.exists():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            blanks = {
                PREFIX + path: np.zeros((1,) * len(leaf.shape), leaf.dtype)
                for path, leaf in weights.items()
            }
            ocp.save_checkpointables(self._partial / "0", {"state": blanks})
            self._journal.touch()
        lines = self._journal.read_text().splitlines(keepends=True)
        self.done = {line[:-1] for line in lines if line.endswith("\n")}
        """Paths of the weights that are on disk."""

    def fill(self, path: str, lead: int, values: Callable[[Index], np.ndarray]) -> None:
        """Write a weight; `values` gives what lies at an index of it, and `lead` is how many
        dimensions are of layers and experts."""
        leaf = self._weights[path]
        chunk = _chunk(leaf.shape, lead, np.dtype(leaf.dtype).itemsize)
        metadata = {
            "shape": [*leaf.shape],
            "data_type": np.dtype(leaf.dtype).name,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        base = {
            "driver": "ocdbt",
            "base": f"file://{self._partial}/0/state/",
            "path": f"{PREFIX}{path}/",
        }
        spec = {
            "driver": "zarr3",
            "kvstore": base,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        for corner in itertools.product(
            *(range(0, size, step) for size, step in zip(leaf.shape, chunk, strict=True))
        ):
            index = tuple(
                slice(at, min(at + step, size))
                for at, step, size in zip(corner, chunk, leaf.shape, strict=True)
            )
            array[index].write(values(index)).result()
        with self._journal.open("a") as file:
            file.write(f"{path}\n")

    def finish(self) -> None:
        """Make the checkpoint visible, with its manifest."""
        assert self.done | {*self._journal.read_text().splitlines()} >= self._weights.keys()
        step = self._partial / "0"
        manifest.write(step, manifest.checksums(step, manifest.files(step)), {"eval_loss": None})
        (self._run / "checkpoints").mkdir(exist_ok=True)
        (self._partial / "0").rename(self._run / "checkpoints" / "0")
        shutil.rmtree(self._partial)


class WeightsReader:
    """The weights of a checkpoint's step, whatever else it holds; ConfigError where its files are
    not what was written."""

    def __init__(self, path: Path):
        folder, self.step = step_of(path, f"{path}:")
        self._path = folder / f"{self.step}"
        if wrong := list(manifest.damages(self._path)):
            raise ConfigError(
                "\n".join([f"{self._path} is damaged:", *wrong]) + "\ngive another step"
            )
        found = ocp.checkpointables_metadata(self._path).metadata
        self.weights_only = "meta" not in found
        self.shapes: dict[str, tuple[int, ...]] = {
            key.removeprefix(PREFIX): tuple(leaf.shape)
            for key, leaf in found["state"].items()
            if key.startswith(PREFIX)
        }
        """Path -> shape."""
        self._dtypes = {
            key.removeprefix(PREFIX): leaf.dtype for key, leaf in found["state"].items()
        }

    def config(self) -> dict[str, Any] | None:
        """The configuration of the run that wrote the checkpoint; None in one of weights alone."""
        if self.weights_only:
            return None
        return json.loads(ocp.load_checkpointables(self._path, {"meta": None})["meta"]["json"])[
            "config"
        ]

    def read(self, path: str) -> np.ndarray:
        """One weight."""
        return self._load({PREFIX + path: np.empty(self.shapes[path], self._dtypes[path])})[
            PREFIX + path
        ]

    def under(self, path: str) -> dict[str, np.ndarray]:
        """All that is kept of one weight, by path."""
        return {
            name: self.read(name)
            for name in self.shapes
            if name == path or name.startswith(f"{path}/")
        }

    def load(
        self, wanted: Mapping[str, Any], sources: Sequence[tuple[Mapping[str, Any], Made]] = ()
    ) -> dict[str, Any]:
        """All weights by path, as jax.ShapeDtypeStruct with shardings ask for them; ConfigError
        where the checkpoint holds others.

        It may also hold what one of the `sources` asks for, of which the wanted weights are made as
        they are read.
        """
        for abstract, made in ((wanted, dict), *sources):
            if {path: tuple(leaf.shape) for path, leaf in abstract.items()} == self.shapes:
                return made(
                    (path, self._load({PREFIX + path: leaf})[PREFIX + path])
                    for path, leaf in abstract.items()
                )
        odd = sorted(
            path
            for path in {*wanted, *self.shapes}
            if path not in wanted or self.shapes.get(path) != tuple(wanted[path].shape)
        )
        low = (
            ", or its quantization and lora, where these are what differs (maxstack "
            "export makes floats of all)"
            if sources
            else ""
        )
        raise ConfigError(
            f"{self._path}: holds the weights of another model: {', '.join(odd[:5])} "
            f"differ; give the model that it is of{low}"
        )

    def _load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            return ocp.load_checkpointables(self._path, {"state": dict(wanted)})["state"]


def _chunk(shape: tuple[int, ...], lead: int, itemsize: int) -> list[int]:
    """One layer and expert, cut along its first dimensions to at most CHUNK bytes."""
    chunk = [1] * lead + [*shape[lead:]]
    for dim in range(lead, len(shape)):
        rest = math.prod(chunk[lead:]) // max(chunk[dim], 1) * itemsize
        chunk[dim] = max(1, min(chunk[dim], CHUNK // max(rest, 1)))
    return [max(size, 1) for size in chunk]


def step_of(path: Path, told: str) -> tuple[Path, int]:
    """The checkpoints folder and step that a run, its checkpoints folder or one step is;
    ConfigError, begun with `told`, where there is none."""
    if path.name.isdigit() and path.is_dir():
        return path.parent.absolute(), int(path.name)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = manifest.steps(folder)
    if not steps and any(folder.glob("host_*")):
        raise ConfigError(
            f"{told} holds the shards of hosts' own disks, which only the run that wrote "
            "them reads; give that run's folder"
        )
    if not steps:
        raise ConfigError(
            f"{told} holds no checkpoint; give a run's folder, or one step inside its "
            "checkpoints folder"
        )
    return folder.absolute(), steps[-1]
