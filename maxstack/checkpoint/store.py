"""Checkpoints of one run: weights, optimizer, data position and step in one atomic step folder, written by Orbax in the background."""

import contextlib
import fnmatch
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxstack import config
from maxstack.checkpoint.weights import WeightsReader, step_of
from maxstack.config import ConfigError

if TYPE_CHECKING:
    from maxstack.data.feed import Feed
    from maxstack.run import Run
    from maxstack.schema import Config

Tree = Any
FORMAT = 1
FREE = ("model.dtype", "model.weights", "model.remat", "model.unroll", "model.blocks.*.slack", "model.*.backend", "data.workers", "data.prefetch")
BOUND = ("model", "quantization", "data", "objective", "train.batch_size")


class Checkpoints:
    """The `checkpoints/` folder of a run. One save at a time runs in the background; the next waits for it and raises if it failed."""

    def __init__(self, run: "Run", folder: Path):
        self._run, cfg = run, run.cfg.checkpoint
        keep = ocp.training.preservation_policies
        policies: list[Any] = [keep.LatestN(cfg.keep)]
        if cfg.keep_every:
            policies.append(keep.EveryNSteps(cfg.keep_every))
        if cfg.keep_best:
            policies.append(keep.BestN(get_metric_fn=lambda m: m["eval_loss"], reverse=True, n=cfg.keep_best, keep_checkpoints_without_metrics=False))
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(), save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep.AnyPreservationPolicy(policies), cleanup_tmp_directories=True)
        self._restore, self.source, self.told = cfg.restore, folder, ""
        self._saving: Any = None

    def steps(self) -> list[int]:
        """The finished steps, oldest first."""
        return sorted(found.step for found in self._checkpointer.checkpoints)

    def save(self, step: int, state: Tree, feed: "Feed", eval_loss: float | None) -> None:
        """Copy the arrays off the devices, then write in the background; the step counts once all of it is on disk."""
        self.wait()
        meta = json.dumps({"config": self._run.cfg.model_dump(mode="json"), "sources": feed.identity()})
        parts = {"state": _flat(state), "data": {"position": self._position(feed.state())}, "meta": {"format": FORMAT, "json": meta}}
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        self._saving = self._checkpointer.save_checkpointables_async(step, parts, metrics=metrics)

    def wait(self) -> None:
        """Until the save under way is on disk; raises what went wrong with it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def restore(self, feed: "Feed") -> Tree | None:
        """What `checkpoint.restore` asks for, on this run's mesh whatever mesh wrote it, with the feed set to go on; None: start from scratch.

        Raises ConfigError where there is no such checkpoint, or, with the differences, where it is of another architecture, data or optimizer.
        """
        step = self._chosen()
        if step is None:
            return None
        where, run = f"{self.source}/{step}", self._run
        self.told = f"resumed from step {step} of {self.source}"
        if self._restore not in ("latest", step) and self.source == Path(self._checkpointer.directory):
            self.told += f"; checkpoint.restore={self._restore} is where this run once began, or would have, and is not read again"
        with contextlib.ExitStack() as stack:
            reader = self._checkpointer if self.source == Path(self._checkpointer.directory) else stack.enter_context(_reader(self.source))
            if "meta" not in reader.checkpointables_metadata(step).metadata:
                self.told = f"starting from the weights in {where}"
                return run.start(WeightsReader(Path(where)).load(run.abstract.params))
            meta = json.loads(reader.load_checkpointables(step, {"meta": None})["meta"]["json"])
            _refuse_changes(where, meta["config"], run.cfg)
            if meta["sources"] != feed.identity():
                raise ConfigError(f"{where}: the documents of data.sources have changed since (files added, removed or renamed), so the order of the "
                                "data would too; put them back, or start a new run with another run.name")
            wanted = _flat(run.abstract)
            found = reader.checkpointables_metadata(step).metadata["state"]
            if {k: tuple(v.shape) for k, v in found.items()} != {k: tuple(v.shape) for k, v in wanted.items()}:
                raise _other_state(where, meta["config"], run.cfg, found, wanted)
            shape = run.cfg.train.batch_size, feed.state().shape[1]
            position = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.lane_sharding)
            loaded = reader.load_checkpointables(step, {"state": wanted, "data": {"position": position}})
        feed.restore(self._local_position(loaded["data"]["position"]))
        return _unflat(run.abstract, loaded["state"])

    def _chosen(self) -> int | None:
        """The step to restore; `source` becomes the folder that holds it."""
        self.source = own = Path(self._checkpointer.directory)
        steps, wanted = self.steps(), self._restore
        if wanted == "none" and steps:
            raise ConfigError(f"checkpoint.restore: none starts from scratch, but {own} already holds step {steps[-1]}; "
                              "choose another run.name, delete that folder, or use checkpoint.restore: latest")
        if isinstance(wanted, int):
            if wanted not in steps:
                raise ConfigError(f"checkpoint.restore: {own} holds no step {wanted}; it holds {steps or 'none'}")
            self._set_aside([step for step in steps if step > wanted])
            return wanted
        if steps or wanted in ("none", "latest"):
            return steps[-1] if steps else None
        self.source, step = step_of(Path(wanted), f"checkpoint.restore: {wanted}")
        return step

    def _set_aside(self, steps: list[int]) -> None:
        """Move the steps after the one that is restored out of the way, so that the new ones take their names."""
        own = Path(self._checkpointer.directory)
        aside = own.parent / "abandoned" / str(time.time_ns())
        for step in steps if jax.process_index() == 0 else []:
            aside.mkdir(parents=True, exist_ok=True)
            (own / str(step)).rename(aside / str(step))
        self._checkpointer.reload()

    def _position(self, position: np.ndarray) -> jax.Array:
        """This process's lane positions int64 [rows, K] -> global int32 [batch_size, K], sharded like the batch."""
        if position.max() >= 2**31:
            raise OverflowError("a lane has read 2^31 documents or tokens; a checkpoint counts to 2^31 - 1")
        return self._run.place({"position": position.astype(np.int32)}, self._run.cfg.train.batch_size, whole_rows=True)["position"]

    def _local_position(self, position: jax.Array) -> np.ndarray:
        """The lane positions of this process, int64 [rows, K]."""
        found: dict[int, np.ndarray] = {}
        for shard in position.addressable_shards:
            found |= dict(zip(range(*shard.index[0].indices(position.shape[0])), np.asarray(shard.data), strict=True))
        return np.stack([found[row] for row in sorted(found)]).astype(np.int64)

    def close(self) -> None:
        """Wait for the save under way."""
        self.wait()
        self._checkpointer.close()


def _reader(folder: Path) -> Any:
    return ocp.training.Checkpointer(folder)


def _flat(state: Tree) -> dict[str, Any]:
    """Path -> array; random keys as their bits. A dict, because Orbax does not keep the types of an Optax state."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _unflat(state: Tree, flat: dict[str, Any]) -> Tree:
    def leaf(path: Any, wanted: Any) -> Any:
        value = flat[jax.tree_util.keystr(path, simple=True, separator="/")]
        return jax.random.wrap_key_data(value) if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key) else value

    return jax.tree_util.tree_map_with_path(leaf, state)


def _bits(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        bits = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def _refuse_changes(where: str, saved: dict[str, Any], cfg: "Config") -> None:
    if changed := [line for line in _changes(saved, cfg, BOUND) if not _under(line, FREE)]:
        raise ConfigError(f"{where} was written by another configuration (checkpoint -> now):\n" + "\n".join(f"  {line}" for line in changed) +
                          "\n  Put these back, or start a new run with another run.name.")


def _changes(saved: dict[str, Any], cfg: "Config", keys: tuple[str, ...]) -> list[str]:
    """`key: old -> new` of what differs below some keys."""
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in config.difference(saved, cfg.model_dump(mode="json")) if _under(key, keys)]


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    name = key.partition(":")[0]
    return any(fnmatch.fnmatchcase(name, pattern) for prefix in prefixes for pattern in (prefix, f"{prefix}.*"))


def _other_state(where: str, saved: dict[str, Any], cfg: "Config", found: Mapping[str, Any], wanted: Mapping[str, Any]) -> ConfigError:
    """Told by the keys of the optimizer that changed; by the arrays, where the keys are the same and so a library must have changed."""
    shapes = [{key: tuple(leaf.shape) for key, leaf in tree.items()} for tree in (found, wanted)]
    arrays = [f"{key}: {shapes[0].get(key, 'absent')} -> {shapes[1].get(key, 'absent')}" for key in sorted({*found, *wanted})
              if shapes[0].get(key) != shapes[1].get(key)]
    lines = _changes(saved, cfg, ("optimizer",)) or arrays
    more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
    return ConfigError(f"{where} holds the state of another optimizer (checkpoint -> now):\n" + "\n".join(f"  {line}" for line in lines[:10]) + more +
                       "\n  Put the optimizer back, or start a new run with another run.name.")
