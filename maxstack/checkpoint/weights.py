"""Weights alone in a checkpoint: written in chunks, so that memory stays bounded, and read one at a
time or into shards.

Orbax writes a state that is in memory whole. An import writes one that is not: Orbax makes the
checkpoint with a placeholder of one element for each weight, then tensorstore lays each array out
anew (zarr3 in OCDBT, as Orbax has it) and fills it chunk by chunk. A journal notes whole weights,
so a later writer resumes after a kill.
"""

import itertools
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from maxstack import strict_json
from maxstack.checkpoint import manifest
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.optimizer import EmaConfig

log = logging.getLogger(__name__)
Index = tuple[slice, ...]
Made = Callable[[Iterable[tuple[str, jax.Array]]], dict[str, jax.Array]]
PREFIX = "params/"
CHUNK = 64 << 20
Choice = Literal["evaluated", "train", "average"]
BESIDE = {"average": "steps", "slow": "steps_since_sync", "z": "weight_sum"}
"""Field of an optimizer's state that holds weights -> another field of the same state, which tells
it from a weight of that name: WeightEmaState and LookaheadState of optim.wrappers, and Optax's
ScheduleFreeState."""
WORDS = {
    "average": "the moving average of the weights (optimizer.ema)",
    "slow": "the slow weights of lookahead",
    "z": "the averaged weights of schedule-free",
}


class WeightsWriter:
    """Writer of step 0 of a run's checkpoints, weights alone; it appears when `finish` is
    called."""

    def __init__(self, run: Path, weights: Mapping[str, jax.ShapeDtypeStruct]):
        self._run = run.absolute()
        self._weights = weights
        self._partial = self._run / ".importing"
        self._step = self._partial / "0"
        self._journal = self._partial / "done.txt"
        # The journal comes last: without it the placeholders may be incomplete, so all begins anew.
        if not self._journal.exists():
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            blanks = {
                PREFIX + path: np.zeros((1,) * len(leaf.shape), leaf.dtype)
                for path, leaf in weights.items()
            }
            ocp.save_checkpointables(self._step, {"state": blanks})
            self._journal.touch()
        lines = self._journal.read_text().splitlines(keepends=True)
        # A line without its end was cut off by a kill, before or after its weight was whole.
        self.done = {line[:-1] for line in lines if line.endswith("\n")}
        """Paths of the weights that are on disk."""
        # A kill may leave half a line, which the next path would be glued to.
        self._journal.write_text("".join(f"{path}\n" for path in sorted(self.done)))

    def fill(self, path: str, lead: int, values: Callable[[Index], np.ndarray]) -> None:
        """Write a weight; `values` returns its elements at an index, and its first `lead`
        dimensions are layers and experts."""
        shape, dtype = self._weights[path].shape, np.dtype(self._weights[path].dtype)
        chunk = _chunk(shape, lead, dtype.itemsize)
        metadata = {
            "shape": [*shape],
            "data_type": dtype.name,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{self._step}/state/",
                "path": f"{PREFIX}{path}/",
            },
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        # In place of the placeholder, or of what a kill left of this weight.
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
        for corner in itertools.product(*starts):
            sides = zip(corner, chunk, shape, strict=True)
            index = tuple(slice(at, min(at + step, size)) for at, step, size in sides)
            array[index].write(values(index)).result()
        with self._journal.open("a") as file:
            file.write(f"{path}\n")

    def finish(self) -> None:
        """Make the checkpoint visible, with its manifest."""
        assert self.done | {*self._journal.read_text().splitlines()} >= self._weights.keys()
        manifest.write(self._step, manifest.checksums(self._step), {"eval_loss": None})
        (self._run / "checkpoints").mkdir(exist_ok=True)
        # A rename after the manifest: the step appears whole or not at all.
        self._step.rename(self._run / "checkpoints" / "0")
        shutil.rmtree(self._partial)


class WeightsReader:
    """Reads the weights of a checkpoint's step. ConfigError where files were lost or changed."""

    def __init__(self, path: Path):
        folder, self.step = step_of(path, f"{path}:")
        self._path = folder / f"{self.step}"
        # Checked before, not while it is read: commands read a few weights at a time, in any order.
        if damages := list(manifest.damages(self._path)):
            raise ConfigError(
                "\n".join([f"{self._path} is damaged:", *damages, "give another step"])
            )
        parts = ocp.checkpointables_metadata(self._path).metadata
        self.weights_only = "meta" not in parts
        self._state = parts["state"]
        self._keys = {
            key.removeprefix(PREFIX): key for key in self._state if key.startswith(PREFIX)
        }
        self._between: dict[str, tuple[str, float]] = {}
        """Path -> (key of Schedule-Free's z, b1): its weights are (y - (1 - b1) z) / b1."""
        self._leaves = {path: self._state[key] for path, key in self._keys.items()}
        self.shapes: dict[str, tuple[int, ...]] = {
            path: tuple(leaf.shape) for path, leaf in self._leaves.items()
        }
        """Path -> shape."""

    def choose(self, choice: Choice, ema: "EmaConfig | None") -> str:
        """Select the weights to read: those that training evaluates (`optim.eval_params`), those
        that it updates (`train`), or their moving `average`. Return a description, empty for
        `train`. ConfigError where there is no average."""
        kept = {field: self._find_kept(field) for field in BESIDE}
        if choice == "average" and not kept["average"]:
            raise ConfigError(
                f"{self._path}: holds no moving average (optimizer.ema); take other weights"
            )
        if choice == "train":
            return ""
        # As optim.eval_params chooses: with the trained weights, eval of a lookahead run said 0.96
        # where training had said 1.76.
        averaged = choice == "average" or (ema and ema.eval and kept["average"])
        wanted = ("average",) if averaged else ("slow", "z")
        chosen = [field for field in wanted if kept[field]]
        # Schedule-Free keeps y and z; the averaged weights x are in neither and are computed as
        # they are read (Defazio et al. 2024, arXiv:2405.15682).
        for field in {*chosen} - {"z"}:
            self._keys |= {path: key for path, (key, _) in kept[field].items()}
        if "z" in chosen:
            between = kept["z"].items()
            bases = {base for _, (_, base) in between}
            b1 = {base: float(self._read(f"{base}b1", np.empty((), np.float32))) for base in bases}
            self._between = {path: (key, b1[base]) for path, (key, base) in between}
        return " and ".join(WORDS[field] for field in chosen)

    def _find_kept(self, field: str) -> dict[str, tuple[str, str]]:
        """Map each weight's path to (key of its copy in the optimizer's state, prefix of the
        key)."""
        # A weight of the model may be named `average` or `z`; the field beside it tells.
        beside = f"/{BESIDE[field]}"
        bases = [
            key.removesuffix(beside[1:])
            for key in self._state
            if key.startswith("opt/") and key.endswith(beside)
        ]
        return {
            key.removeprefix(f"{base}{field}/"): (key, base)
            for base in bases
            for key in self._state
            if key.startswith(f"{base}{field}/")
        }

    def config(self) -> dict[str, Any] | None:
        """Return the configuration of the run that wrote the checkpoint; None for weights alone."""
        if self.weights_only:
            return None
        meta = ocp.load_checkpointables(self._path, {"meta": None})["meta"]
        return strict_json.parse_object(meta["json"], str(self._path))["config"]

    def read(self, path: str) -> np.ndarray:
        """Read one weight."""
        return self._load(path, np.empty(self.shapes[path], self._leaves[path].dtype))

    def under(self, path: str) -> dict[str, np.ndarray]:
        """Read all arrays of one weight, which may be quantized or have an adapter, by path."""
        return {
            name: self.read(name)
            for name in self.shapes
            if name == path or name.startswith(f"{path}/")
        }

    def load(
        self, wanted: Mapping[str, Any], sources: Sequence[tuple[Mapping[str, Any], Made]] = ()
    ) -> dict[str, Any]:
        """Load all weights by path; `wanted` has a jax.ShapeDtypeStruct with its sharding for each.
        ConfigError where the checkpoint holds others.

        It may also hold the weights of one of the `sources` (weights, function); the function makes
        the wanted ones of them as they are read.
        """
        # The run's own form first; then those that it can be made of, such as the base without
        # adapters.
        for abstract, made in ((wanted, dict), *sources):
            if {path: tuple(leaf.shape) for path, leaf in abstract.items()} == self.shapes:
                # A generator: weights are read as `made` asks for them, so both forms are never
                # whole in memory.
                return made((path, self._load(path, leaf)) for path, leaf in abstract.items())
        odd = sorted(
            path
            for path in {*wanted, *self.shapes}
            if path not in wanted or self.shapes.get(path) != tuple(wanted[path].shape)
        )
        text = (
            f"{self._path}: holds the weights of another model: {', '.join(odd[:5])} "
            "differ; give the model that it was trained with"
        )
        if sources:
            text += (
                ", or its quantization and lora where these differ (maxstack export converts all "
                "to floats)"
            )
        raise ConfigError(text)

    def _load(self, path: str, wanted: Any) -> Any:
        if path not in self._between:
            return self._read(self._keys[path], wanted)
        key, b1 = self._between[path]
        if isinstance(wanted, np.ndarray):
            wide: Any = np.empty(wanted.shape, np.float32)
        else:
            wide = jax.ShapeDtypeStruct(wanted.shape, np.float32, sharding=wanted.sharding)
        y, z = self._read(self._keys[path], wide), self._read(key, wide)
        return ((y - (1.0 - b1) * z) / b1).astype(wanted.dtype)

    def _read(self, key: str, wanted: Any) -> Any:
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with context:
            read = ocp.load_checkpointables(self._path, {"state": {key: wanted}})["state"][key]
        # Arrays whose files are gone may read as zeros, without an error.
        if not manifest.is_whole(self._path):
            raise manifest.deleted_error(self._path)
        return read


def _chunk(shape: tuple[int, ...], lead: int, itemsize: int) -> list[int]:
    """Return the chunk's shape: one layer and expert, cut along its first dimensions to at most
    CHUNK bytes."""
    chunk = [1] * lead + [*shape[lead:]]
    # The first dimensions are cut first: the last ones lie together in memory and on disk.
    for dim in range(lead, len(shape)):
        rest = math.prod(chunk[lead:]) // max(chunk[dim], 1) * itemsize
        chunk[dim] = max(1, min(chunk[dim], CHUNK // max(rest, 1)))
    return [max(size, 1) for size in chunk]


def with_newest_step(path: Path, work: Callable[[Path], manifest.T]) -> manifest.T:
    """Call `work` with the folder of the step that `path` names. Of a run, take the next newest one
    where its retention deletes that meanwhile; one of several processes gets ConfigError."""

    def find() -> Path:
        folder, step = step_of(path, f"{path}:")
        return folder / f"{step}"

    return manifest.retry_if_deleted(find, work, retry=jax.process_count() == 1)


def load_newest(path: str, run: "Run", choice: Choice) -> dict[str, jax.Array]:
    """Load the weights of an assembled run by path, in shards, from a checkpoint or a run's newest;
    `choice`: see WeightsReader.choose."""

    def load(step: Path) -> dict[str, jax.Array]:
        reader = WeightsReader(step)
        if words := reader.choose(choice, run.cfg.optimizer.ema):
            log.info("%s: %s", path, words)
        return reader.load(run.weights.shapes, run.weights.sources)

    return with_newest_step(Path(path), load)


def step_of(path: Path, subject: str) -> tuple[Path, int]:
    """Return the checkpoints folder and the step that `path` names: a step's folder, or the latest
    of a run or of its checkpoints folder. ConfigError about `subject` where there is none."""
    if path.name.isdigit() and manifest.is_whole(path):
        return path.parent.absolute(), int(path.name)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = manifest.steps(folder)
    if not steps and any(folder.glob("host_*")):
        raise ConfigError(
            f"{subject} holds shards of hosts' own disks, which only the run that wrote them can "
            "read; give that run's folder"
        )
    if not steps and path.name.isdigit():
        raise manifest.deleted_error(path)
    if not steps:
        raise ConfigError(
            f"{subject} holds no checkpoint; give a run's folder, or one step inside its "
            "checkpoints folder"
        )
    return folder.absolute(), steps[-1]
