"""The checkpoints of one run, over its tiers: weights, optimizer, data position and step, saved
together, checked, and restored.

A save copies the arrays off the devices, then a thread writes them to each tier that is due, a
manifest last, and deletes what the tier's rule does not keep. A restore takes the newest step of
all tiers, of equal ones the nearest, and checks it while it reads: a damaged step is put aside and
the next one taken; one that cannot be read (a disk that fails) is left where it is, and no older
step is taken instead, which would lose what may be intact. `saved.json` records the newest step, so
a run whose tiers are all empty ends with an error rather than begin again.
"""

import contextlib
import errno
import functools
import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxstack import strict_json
from maxstack.checkpoint import compatibility, manifest, owner
from maxstack.checkpoint.local import Local
from maxstack.checkpoint.manifest import Damage, Unreadable
from maxstack.checkpoint.shared import Shared
from maxstack.checkpoint.weights import WeightsReader, step_of
from maxstack.cluster.peers import Peers
from maxstack.config import atomic
from maxstack.data.position import Sources
from maxstack.errors import ConfigError, TransientError, shortened
from maxstack.report import run_folder
from maxstack.schema.checkpoint import PARTS, CheckpointConfig, TierConfig
from maxstack.schema.metrics import bare, direction

if TYPE_CHECKING:
    from maxstack.data.feed import BatchFeed
    from maxstack.run import Run

Tree = Any
FORMAT = 2


class Unsaved(TransientError):
    """The last save of a process failed, as on a full disk."""


class Tier(NamedTuple):
    """Storage of a run's checkpoints, and the rule by which it saves and keeps them."""

    storage: Shared | Local
    rule: CheckpointConfig | TierConfig

    def due(self, step: int, last: bool) -> bool:
        """True for a step that is saved here; a run's last step goes to every shared tier."""
        every = self.rule.every
        # The last step goes where it outlives the hosts.
        return every > 0 and (step % every == 0 or (last and isinstance(self.storage, Shared)))


class Checkpoints:
    """Saves and restores. One save at a time runs in the background; the next waits for it.

    `say` is called, at once and from any thread, with messages for the user. `forced` are keys that
    may have changed since a checkpoint.
    """

    notes: dict[str, Any]
    """The notes of the checkpoint that `restore` read."""
    saved_config: dict[str, Any]
    """The configuration that wrote that checkpoint."""
    owed: bool
    """True where that step is still to be evaluated."""
    summary: str
    """A line about the restored step."""

    def __init__(
        self, run: "Run", folder: Path, say: Callable[[str], None], forced: Sequence[str] = ()
    ):
        compatibility.check_forced(forced, run.cfg)
        self._run, self._cfg = run, run.cfg.checkpoint
        self._say = say
        self._free = (*compatibility.FREE, *forced)
        self._peers = Peers()
        self._own = Shared(folder.absolute(), self._peers)
        self._tiers = self._open_tiers()
        self._record = folder.parent / "saved.json"
        self._went_back = self._read_record().get("went_back")
        self._saving: threading.Thread | None = None
        self._failed: str | None = None
        self.summary = ""
        self.owed = False
        self.notes, self.saved_config = {}, {}
        for tier in self._tiers:
            # Before the first save, whose files would look like what a kill left.
            for line in tier.storage.clear():
                self._say(line)

    def _open_tiers(self) -> list[Tier]:
        """Open the tiers, nearest first."""
        cfg, peers = self._cfg, self._peers
        local: list[Tier] = []
        others: list[Tier] = []
        for tier in cfg.tiers:
            path = Path(tier.path).expanduser().absolute() / self._run.cfg.run.name
            try:
                path.mkdir(parents=True, exist_ok=True)
                if not os.access(path, os.W_OK):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                owner.claim(path, self._own.folder.parent)
                if tier.replicate is not None:
                    (path / f"host_{peers.number}").mkdir(exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"checkpoint.tiers: cannot write to {error.filename or path}: "
                    f"{error.strerror}; give another path"
                ) from error
            if tier.replicate is None:
                # Damaged and abandoned steps stay on the tier's own disk, where moving them is a
                # rename.
                others.append(Tier(Shared(path, peers, aside=path), tier))
                continue
            if tier.replicate >= peers.count:
                self._say(
                    f"checkpoint.tiers: replicate={tier.replicate} for {tier.path}, but only "
                    f"{peers.count - 1} other processes can hold a copy"
                )
            local.append(Tier(Local(path, peers, tier.replicate, self._layout()), tier))
        # Nearest first: of equal steps a restore takes the first, and a host's own disk takes 0.11
        # s where a shared folder takes 1.84 (1.01 GB).
        return [*local, Tier(self._own, cfg), *others]

    def _layout(self) -> str:
        """Name how this mesh cuts the state into shards, which hosts' disks are read by."""
        leaves = [
            f"{path} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}"
            for path, leaf in _flatten(self._run.abstract).items()
        ]
        # Plain shards fit only the mesh that wrote them: those of another layout must not count.
        return f"{dict(self._run.mesh.shape)} {zlib.crc32(' '.join(leaves).encode()):08x}"

    def steps(self) -> list[int]:
        """List the finished steps of all tiers, oldest first."""
        return sorted({step for _, step in self._found()})

    def _found(self) -> list[tuple[Tier, int]]:
        """List the finished steps of each tier."""
        return [(tier, step) for tier in self._tiers for step in tier.storage.steps()]

    def due(self, step: int, last: bool = False) -> bool:
        """True for a step that any tier wants."""
        return any(tier.due(step, last) for tier in self._tiers)

    def save(
        self,
        step: int,
        state: Tree,
        feed: "BatchFeed",
        notes: Mapping[str, Any],
        evaluated: Mapping[str, float] | None = None,
        last: bool = False,
        tiers: Sequence[Tier] | None = None,
        position: np.ndarray | None = None,
        owed: bool = False,
    ) -> None:
        """Copy the arrays off the devices for `tiers`, by default those that are due, then write in
        the background. `notes` are plain data that `restore` puts into `self.notes`; `evaluated`
        are metrics of the last evaluation; `position` is the feed's after the step, by default its
        current one; `owed`: the step is still to be evaluated.
        ConfigError where another process has taken the run's folder."""
        self.wait()
        if self._peers.number == 0:
            # Where hosts do not see each other's locks, a second process may write here: the older
            # one ends.
            run_folder.check_owner(self._own.folder.parent)
        if tiers is None:
            tiers = [tier for tier in self._tiers if tier.due(step, last)]
        meta = {
            "config": self._run.cfg.model_dump(mode="json"),
            "sources": feed.mixture.described(),
            "notes": dict(notes),
        }
        if position is None:
            position = feed.state()
        parts = {
            "state": _flatten(state),
            "data": {"position": self._global_position(position)},
            "meta": {"format": FORMAT, "json": json.dumps(meta)},
        }
        # In the manifest, which can be written again: an evaluation may end after its step was
        # saved.
        facts = _facts(evaluated, owed)
        # In the loop's thread: the next step is donated these arrays, so they are copied before it
        # begins.
        begun = [(tier, tier.storage.begin(step, parts)) for tier in tiers]
        self._saving = threading.Thread(
            target=self._finish, args=(step, begun, facts), name="checkpoint"
        )
        self._saving.start()

    def note(self, step: int, evaluated: Mapping[str, float], notes: Mapping[str, Any]) -> None:
        """Add the evaluation of a step that was saved without it."""
        self.wait()
        for tier in self._tiers:
            with contextlib.suppress(Damage, Unreadable, OSError):  # not there, or evaluated again
                tier.storage.note(step, _facts(evaluated, False) | {"notes": dict(notes)})

    def complete(self, step: int, state: Tree, feed: "BatchFeed", notes: Mapping[str, Any]) -> None:
        """Save a run's last step to the shared tiers that lack it after a kill, and wait."""
        lacking = [
            tier
            for tier in self._tiers
            if tier.rule.every
            and isinstance(tier.storage, Shared)
            and step not in tier.storage.steps()
        ]
        if lacking:
            self.save(step, state, feed, notes, tiers=lacking)
        self.close()

    def _finish(
        self, step: int, begun: list[tuple[Tier, Callable[[], None]]], facts: Mapping[str, Any]
    ) -> None:
        # One tier after the other; a full disk of one does not keep the step from the next.
        for (storage, rule), written in begun:
            try:
                storage.finish(step, written, facts)
                # Old steps go only once the new one is finished.
                storage.trim(functools.partial(removable, storage, rule))
            except Exception as error:  # a thread's exception would be lost
                self._failed = (
                    f"checkpoint of step {step} was not saved to {storage.folder}: {error}"
                )
                left = manifest.steps(storage.folder)
                latest = f"; step {left[-1]} remains the latest there" if left else ""
                self._say(f"{self._failed}{latest}")
            else:
                self._write_record(step)

    def _write_record(self, step: int) -> None:
        if self._peers.number == 0:
            with (
                contextlib.suppress(OSError),  # it only serves messages
                atomic.writing(self._record) as unfinished,
            ):
                unfinished.write_text(json.dumps({"step": step, "went_back": self._went_back}))

    def _read_record(self) -> dict[str, Any]:
        """Read `step`, the newest that this run saved, and `went_back`, the step that
        checkpoint.restore made it go back to."""
        with contextlib.suppress(OSError, ValueError):
            return strict_json.parse_object(self._record.read_text(), str(self._record))
        return {}

    def wait(self, last: bool = False) -> None:
        """Wait until the save under way is on disk. Unsaved where it failed and was the last,
        ConfigError where `checkpoint.on_failure` is stop."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        failed, self._failed = self._failed, None
        if failed and (last or self._cfg.on_failure == "stop"):
            raise (Unsaved if last else ConfigError)(
                f"{failed}; make room there or repair it, and run the same command again"
            )

    def close(self) -> None:
        """Wait for the last save. Unsaved where it failed."""
        self.wait(last=True)

    def restore(self, feed: "BatchFeed", before: int | None = None) -> Tree | None:
        """Restore the state that `checkpoint.restore` asks for, on this run's mesh whatever mesh
        wrote it, and set the feed to go on; None: start from scratch. `before`: the newest step
        before this one instead; None: there is none.

        A run goes back to a step that is asked for once: the same command again goes on from what
        was saved since. ConfigError where there is no such checkpoint, where none is intact, or,
        with the differences, where it is of another architecture, data or optimizer.
        """
        self.wait()
        wanted = self._cfg.restore
        if isinstance(wanted, int) and wanted == self._went_back and before is None:
            self._say(
                f"checkpoint.restore={wanted}: this run went back to it before, and goes "
                f"on from there; to go back again, delete {self._record}"
            )
            wanted = "latest"
        candidates = self._candidates(wanted, before)
        if not candidates:
            return self._restore_elsewhere(feed, before)
        damaged: list[tuple[Tier, int]] = []
        unreadable: tuple[int, Unreadable] | None = None
        for tier, step in candidates:
            if unreadable and step < unreadable[0]:
                break  # an older one would lose steps that may be intact
            try:
                state = self._load(tier.storage, step, feed)
            except Unreadable as error:
                unreadable = step, error
                continue
            except Damage as error:
                self._say(f"DAMAGED CHECKPOINT, step {step}: {error}")
                damaged.append((tier, step))
                continue
            if unreadable:
                self._say(f"step {step} is taken from another tier: {unreadable[1]}")
            if before is None:
                saved = self._read_record().get("step") or 0
                lost = saved > step and saved not in {other for _, other in damaged}
                if lost and wanted == "latest":
                    self._say(
                        f"step {saved} was saved, but no tier holds it for this mesh and "
                        f"number of processes; going on from step {step}"
                    )
                self._went_back = self._cfg.restore if isinstance(self._cfg.restore, int) else None
            # Only now that one is restored: a start that finds none intact moves nothing.
            self._set_aside(step, damaged)
            return state
        if unreadable:
            raise unreadable[1]
        raise ConfigError(
            f"{self._own.folder}: all steps that checkpoint.restore={wanted} may take are damaged: "
            f"{[step for _, step in damaged]}; name another of {self.steps()}, or start a new run "
            "with another run.name"
        )

    def _restore_elsewhere(self, feed: "BatchFeed", before: int | None) -> Tree | None:
        """Restore where no tier has a step: from another run's checkpoint, or None."""
        if before is not None:
            # The run begins again, and all that it has saved is of the history that it gives up.
            self._set_aside(0, [])
            return None
        saved = self._read_record().get("step")
        # Never in silence: the tiers may only be not mounted.
        if self._cfg.restore != "none" and saved is not None:
            raise ConfigError(
                f"{self._record} says that step {saved} was saved, but no tier holds a checkpoint: "
                f"{', '.join(str(tier.storage.folder) for tier in self._tiers)}; put one "
                "back, or start a new run with another run.name. Steps on a host's own disk are "
                "read by the process of the same number alone"
            )
        if not (path := self._cfg.elsewhere):
            return None
        folder, step = step_of(Path(path), f"checkpoint.restore: {path}")
        try:
            return self._load(Shared(folder, self._peers), step, feed, elsewhere=True)
        except Damage as error:
            raise ConfigError(
                f"checkpoint.restore: {path} is damaged: {error}; name another step of it"
            ) from error

    def _candidates(self, wanted: int | str, before: int | None) -> list[tuple[Tier, int]]:
        """List tiers and steps to restore from, the best first."""
        # The sort is stable, so of equal steps the tiers keep their order.
        newest = sorted(self._found(), key=lambda candidate: -candidate[1])
        if before is not None:
            return [(tier, step) for tier, step in newest if step < before]
        if wanted == "none" and newest:
            folders = ", ".join(dict.fromkeys(f"{tier.storage.folder}" for tier, _ in newest))
            raise ConfigError(
                f"checkpoint.restore: none starts from scratch, but step {newest[0][1]} is already "
                f"in {folders}; choose another run.name, delete these, or use "
                "checkpoint.restore: latest"
            )
        if not isinstance(wanted, int):
            return newest
        asked = [(tier, step) for tier, step in newest if step == wanted]
        if not asked:
            raise ConfigError(
                f"checkpoint.restore: {self._own.folder} holds no step {wanted}; it "
                f"holds {self.steps() or 'none'}"
            )
        return asked

    def _set_aside(self, step: int, damaged: list[tuple[Tier, int]]) -> None:
        """Move damaged steps, and steps after the one that the run goes on from, out of the way."""
        for tier in self._tiers:
            for other in tier.storage.present():
                if (tier, other) in damaged:
                    self._say(
                        f"step {other} was put aside as "
                        f"{tier.storage.set_aside(other, 'damaged')}; going on from step {step}"
                    )
                # A history that the run does not continue: its steps would otherwise be the newest
                # at the next start.
                elif other > step:
                    tier.storage.set_aside(other, "abandoned")
        if self.steps():
            self._write_record(step)
        elif self._peers.number == 0:
            self._record.unlink(missing_ok=True)

    def _load(
        self, storage: Shared | Local, step: int, feed: "BatchFeed", elsewhere: bool = False
    ) -> Tree:
        """Load the state of a step of a tier; Damage where a file was lost or changed.

        `elsewhere`: it is another run's. Where that lacks this run's weights, but has those that
        they are made of (for quantization, adapters), its weights alone are taken.
        """
        where, run = f"{storage.folder}/{step}", self._run
        # All reading is inside: a single process checks the files while it reads them, and a
        # damaged file may make any library fail first.
        with storage.verify(step):
            parts = storage.contents(step)
            if "meta" not in parts or (elsewhere and self._lacks_weights(parts["state"])):
                return self._load_weights(where)
            # The configuration is read and compared before any array: a refusal takes no time, and
            # arrays of other shapes cannot be asked for.
            meta = strict_json.parse(storage.load(step, {"meta": None})["meta"]["json"], where)
            match = compatibility.Compatibility(where, meta["config"], run.cfg, elsewhere)
            restored = self._parts_to_restore(meta["config"])
            if restored == {"params"}:
                return self._load_weights(where)
            sources, changes = self._check_data(match, meta, feed)
            wanted = self._check_arrays(match, parts["state"], "optimizer" in restored)
            position = jax.ShapeDtypeStruct(
                parts["data"]["position"].shape, jnp.int32, sharding=run.batches.of_rows
            )
            loaded = storage.load(step, {"state": wanted, "data": {"position": position}})
        changed = bool(changes or match.changed(("data", "train.stages"), compatibility.FREE))
        positions = _local_position(loaded["data"]["position"])
        feed.restore(feed.mixture.adopt(sources, positions, step, changed))
        self._report(storage, step, match, changes)
        facts = storage.facts(step)
        # The manifest's come later: an evaluation that ended after the save adds them there.
        self.notes = meta["notes"] | facts.get("notes", {})
        self.saved_config = meta["config"]
        self.owed = not elsewhere and facts.get("owed", False)
        if "optimizer" in restored:
            return _unflatten(run.abstract, loaded["state"])
        return self._with_fresh_optimizer(loaded["state"], step)

    def _lacks_weights(self, state: Mapping[str, Any]) -> bool:
        """True where a checkpoint has other weights than this run's, which is quantized or has
        adapters."""
        weights = self._run.weights
        missing = {f"params/{path}" for path in weights.shapes}.difference(state)
        return bool(weights.rewrite.replaced and missing)

    def _check_data(
        self, match: compatibility.Compatibility, meta: Mapping[str, Any], feed: "BatchFeed"
    ) -> tuple[Sources, list[str]]:
        """Return the saved sources and a line for each that changed. ConfigError where these, or
        other keys that a checkpoint binds, may not change."""
        data = self._run.cfg.data.model_dump(mode="json")
        sources = Sources.of_meta(meta, feed.mixture.described(), data)
        feed.mixture.check_deal(sources)
        match.refuse_changes(self._free)
        changes = feed.mixture.changes(sources)
        if changes and not compatibility.under("data.sources", self._free):
            raise ConfigError(
                f"{match.where}: data.sources have changed since: "
                + "; ".join(changes)
                + f". Put them back, {match.remedy}, or go on with these from here: "
                "--force-config data.sources"
            )
        return sources, changes

    def _check_arrays(
        self, match: compatibility.Compatibility, saved: Mapping[str, Any], with_optimizer: bool
    ) -> dict[str, Any]:
        """Return the arrays to load. ConfigError where the saved ones have other names or
        shapes, or an optimizer of another kind wrote them."""
        wanted, saved = _flatten(self._run.abstract), dict(saved)
        if with_optimizer:
            match.refuse_shapes(saved, wanted)
            match.refuse_optimizer()
            return wanted
        for tree in (wanted, saved):
            for path in [path for path in tree if path.startswith("opt/")]:
                del tree[path]
        match.refuse_shapes(saved, wanted)
        return wanted

    def _report(
        self,
        storage: Shared | Local,
        step: int,
        match: compatibility.Compatibility,
        changes: Sequence[str],
    ) -> None:
        """Tell what changed since a step was saved, and set the summary."""
        for line in changes:
            self._say(f"data.sources: {line}")
        self.summary = f"resumed from step {step} of {storage.folder}"
        if match.elsewhere:
            return
        if others := match.changed(("*",), compatibility.TOLD_ELSEWHERE):
            self._say(f"changed since step {step} was saved: {shortened('; '.join(others), 500)}")
        if code := match.changed(("run.kinds",)):
            self._say(f"other code than that which wrote step {step}: {'; '.join(code)}")
        if self._cfg.elsewhere:
            self.summary += f"; checkpoint.restore={self._cfg.restore} is for its start alone"

    def _parts_to_restore(self, saved: Mapping[str, Any]) -> set[str]:
        """Return the parts of a checkpoint to take: all, where a run with the same
        checkpoint.restore_parts wrote it, since that began with them."""
        parts = [*self._cfg.restore_parts]
        # Otherwise each restart would begin the optimizer anew.
        same = saved["checkpoint"].get("restore_parts", [*PARTS]) == parts
        return {*PARTS} if same else {*parts}

    def _with_fresh_optimizer(self, loaded: dict[str, Any], step: int) -> Tree:
        """Return a saved state with the optimizer's initial state, except for the counts of its
        schedules."""
        self._say(
            f"checkpoint.restore_parts: the optimizer begins anew at step {step}, without the "
            "checkpoint's moments; its schedules go on"
        )
        given = _unflatten(self._run.abstract._replace(opt=None), loaded)
        fresh = self._run.start(given.params)

        def is_schedule(state: Any) -> bool:
            return isinstance(state, optax.ScaleByScheduleState)

        def set_count(state: Any) -> Any:
            if not is_schedule(state):
                return state
            # A copy for each schedule: the step donates the state, and one array cannot be donated
            # twice.
            updates = jnp.copy(given.guard.updates)
            return state._replace(count=jax.device_put(updates, state.count.sharding))

        opt = jax.tree.map(set_count, fresh.opt, is_leaf=is_schedule)
        return fresh._replace(step=given.step, guard=given.guard, behind=given.behind, opt=opt)

    def _load_weights(self, where: str) -> Tree:
        """Return the state before the first step, with the weights of a checkpoint."""
        run, reader = self._run, WeightsReader(Path(where))
        self.summary = f"starting from the weights in {where}"
        if adapter := run.cfg.lora and run.cfg.lora.adapter:
            if reader.shapes.keys() == run.weights.shapes.keys():
                raise ConfigError(
                    f"lora.adapter: {adapter} and {where} both give adapters; drop "
                    "lora.adapter, or restore weights without any"
                )
            self.summary += f" and the adapter in {adapter}"
        return run.begin_with(reader.load(run.weights.shapes, run.weights.sources))

    def _global_position(self, position: np.ndarray) -> jax.Array:
        """Convert this process's lane positions, int64 [rows, K], into a global int32 array
        [batch_size, K, 2] of half numbers, sharded like the batch: jax has no int64 by default."""
        halves = np.ascontiguousarray(position, "<i8").view("<i4").reshape(*position.shape, 2)
        batches = self._run.batches
        return batches.put(halves, self._run.cfg.train.batch_size, batches.of_rows)


def _local_position(position: jax.Array) -> np.ndarray:
    """Return this process's lane positions, int64 [rows, K]; older versions kept int32 [rows,
    K]."""
    # By first row, since devices that hold copies of the same rows give them once.
    shards = {shard.index[0].start or 0: shard.data for shard in position.addressable_shards}
    rows = np.concatenate([shards[first] for first in sorted(shards)])
    return rows.view("<i8")[..., 0] if rows.ndim == 3 else rows.astype(np.int64)


def removable(storage: Any, cfg: CheckpointConfig | TierConfig, steps: list[int]) -> list[int]:
    """List the finished steps that no rule keeps; kept are the newest, multiples of keep_every, and
    the best by each metric of keep_best, of equals the earlier."""
    stay = {*steps[-cfg.keep :]}
    if isinstance(cfg, CheckpointConfig):  # the rule of the run's own folder, a Shared
        stay |= {step for step in steps if cfg.keep_every and step % cfg.keep_every == 0}
        metrics: dict[int, dict[str, float | None]] = {}
        for step in steps if cfg.best else ():
            try:
                facts = storage.facts(step)
            except Unreadable:
                # Its metrics are unknown: it may be the best.
                stay.add(step)
            except Damage:  # reported when it is restored or verified
                continue
            else:
                metrics[step] = {"eval_loss": facts.get("eval_loss"), **facts.get("evaluated", {})}
        for metric, count in cfg.best.items():
            found: dict[int, float] = {}
            for step, values in metrics.items():
                value = values.get(bare(metric))
                if value is not None and not math.isnan(value):
                    found[step] = -direction(metric) * value
            stay |= {*sorted(found, key=found.__getitem__)[:count]}
    return [step for step in steps if step not in stay]


def _facts(evaluated: Mapping[str, float] | None, owed: bool) -> dict[str, Any]:
    """Return the facts for a step's manifest."""
    metrics = dict(evaluated or {})
    return {"eval_loss": metrics.get("eval_loss"), "evaluated": metrics, "owed": owed}


def _flatten(state: Tree) -> dict[str, Any]:
    """Map paths to arrays, random keys as their bits. A dict, since Orbax does not keep the types
    of an Optax state."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _unflatten(state: Tree, values: Mapping[str, Any]) -> Tree:
    """Put the values of `_flatten` into the structure of `state`."""
    leaves = [
        jax.random.wrap_key_data(values[path]) if _is_key(leaf) else values[path]
        for path, leaf in zip(_flatten(state), jax.tree.leaves(state), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _bits(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        bits = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
