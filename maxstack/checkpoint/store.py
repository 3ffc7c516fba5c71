"""The checkpoints of one run, over its tiers: weights, optimizer, data position and step, saved
together, checked, and restored."""

import contextlib
import errno
import functools
import json
import math
import os
import platform
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
from maxstack.errors import ConfigError, Passing, shortened
from maxstack.report import run_folder
from maxstack.schema.checkpoint import PARTS, CheckpointConfig, TierConfig
from maxstack.schema.metrics import bare, direction

if TYPE_CHECKING:
    from maxstack.data.feed import BatchFeed
    from maxstack.run import Run

Tree = Any
FORMAT = 2


class Unsaved(Passing):
    """The last save of a process failed: a full disk, a store that was away."""


class Tier(NamedTuple):
    """Storage of a run's checkpoints, and the rule by which it saves and keeps them."""

    storage: Shared | Local
    rule: CheckpointConfig | TierConfig

    def due(self, step: int, last: bool) -> bool:
        """True for a step that is saved here; the last one goes to every tier that all processes
        see."""
        every = self.rule.every
        return every > 0 and (step % every == 0 or (last and isinstance(self.storage, Shared)))


class Checkpoints:
    """Saves and restores. One save at a time runs in the background; the next waits for it.

    `say` is called, at once and from any thread, with messages for the user. A step that could
    not be written, or was damaged since, is never the latest: the run goes on from the
    newest intact one. `forced` are keys that may have changed since a checkpoint.
    """

    notes: dict[str, Any]
    """The notes of the checkpoint that `restore` read."""
    saved_config: dict[str, Any]
    """The configuration that wrote that checkpoint."""
    owed: bool
    """Whether that step is still to be evaluated."""
    summary: str
    """A line about the restored step."""

    def __init__(
        self, run: "Run", folder: Path, say: Callable[[str], None], forced: Sequence[str] = ()
    ):
        compatibility.check_forced(forced, run.cfg)
        self._run, self._cfg, self._say = run, run.cfg.checkpoint, say
        self._free = (*compatibility.FREE, *forced)
        self._peers = Peers()
        self._own = Shared(folder.absolute(), self._peers)
        self._tiers = self._opened()
        self._record = folder.parent / "saved.json"
        self._went_back = self._recorded().get("went_back")
        self._saving: threading.Thread | None = None
        self._failed: str | None = None
        self.summary, self.owed, self.notes, self.saved_config = "", False, {}, {}
        for tier in self._tiers:
            for line in tier.storage.clear():
                self._say(line)

    def _opened(self) -> list[Tier]:
        """The tiers, nearest first."""
        cfg, peers = self._cfg, self._peers
        local, others = [], []
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
                others.append(Tier(Shared(path, peers, aside=path), tier))
                continue
            if tier.replicate >= peers.count:
                self._say(
                    f"checkpoint.tiers: replicate={tier.replicate} for {tier.path}, "
                    f"but the run has {peers.count} process{'es' * (peers.count > 1)}: "
                    f"{peers.count - 1 or 'no'} other disk holds a copy"
                )
            local.append(Tier(Local(path, peers, tier.replicate, self._layout()), tier))
        return [*local, Tier(self._own, cfg), *others]

    def _layout(self) -> str:
        """Name of how this mesh cuts the state into shards; hosts' own disks are read by the same
        alone."""
        leaves = [
            f"{path} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}"
            for path, leaf in _flat(self._run.abstract).items()
        ]
        return f"{dict(self._run.mesh.shape)} {zlib.crc32(' '.join(leaves).encode()):08x}"

    def steps(self) -> list[int]:
        """The finished steps of all tiers, oldest first."""
        return sorted({step for tier in self._tiers for step in tier.storage.steps()})

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
        the background; a step counts where all of it is on disk, with its checksums. `notes` are
        plain data that `restore` leaves in `self.notes`; `evaluated` are figures of the last
        evaluation; `position` is where the feed stood after the step, by default where it stands;
        `owed`: the step is still to be evaluated.
        ConfigError where another process has taken the run's folder."""
        self.wait()
        if self._peers.number == 0:
            run_folder.check_owner(self._own.folder.parent)
        if tiers is None:
            tiers = [tier for tier in self._tiers if tier.due(step, last)]
        meta = {
            "config": self._run.cfg.model_dump(mode="json"),
            "sources": feed.mixture.described(),
            "notes": dict(notes),
        }
        parts = {
            "state": _flat(state),
            "data": {
                "position": self._global_position(feed.state() if position is None else position)
            },
            "meta": {"format": FORMAT, "json": json.dumps(meta)},
        }
        facts = _facts(evaluated, owed)
        begun = [(tier, tier.storage.begin(step, parts)) for tier in tiers]
        self._saving = threading.Thread(
            target=self._finish, args=(step, begun, facts), name="checkpoint"
        )
        self._saving.start()

    def note(self, step: int, evaluated: Mapping[str, float], notes: Mapping[str, Any]) -> None:
        """Add to a step that was saved without its evaluation what that gave: as in `save`."""
        self.wait()
        for tier in self._tiers:
            with contextlib.suppress(Damage, Unreadable, OSError):  # not there, or evaluated again
                tier.storage.note(step, _facts(evaluated, False) | {"notes": dict(notes)})

    def complete(self, step: int, state: Tree, feed: "BatchFeed", notes: Mapping[str, Any]) -> None:
        """Save the last step of a run to the tiers that all processes see, where a kill kept it
        from any of them, and wait for that."""
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
        for (storage, rule), written in begun:
            try:
                storage.finish(step, written, facts)
                storage.trim(functools.partial(removable, storage, rule))
            except Exception as error:  # in a thread of its own, where it would go unheard
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
                contextlib.suppress(OSError),  # it serves better messages alone
                atomic.writing(self._record) as unfinished,
            ):
                unfinished.write_text(json.dumps({"step": step, "went_back": self._went_back}))

    def _recorded(self) -> dict[str, Any]:
        """`step`: the newest that a save of this run reported; `went_back`: the step that
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
                f"{failed}; make room there or repair that place, and run the same command again"
            )

    def close(self) -> None:
        """Wait for the last save. Unsaved where it failed."""
        self.wait(last=True)

    def restore(self, feed: "BatchFeed", before: int | None = None) -> Tree | None:
        """The state that `checkpoint.restore` asks for, on this run's mesh whatever mesh wrote it,
        with the feed set to go on; None: start from scratch. `before`: the newest step before this
        one instead, once a save that is under way has ended; None: there is none.

        A step that is damaged is put aside, with a message, and the next one taken. A step that is
        asked for is gone back to once: the same command again goes on from what was saved since.
        ConfigError where there is no such checkpoint, where none is intact, or, with the
        differences, where it is of another architecture, data or optimizer.
        """
        self.wait()
        wanted = self._cfg.restore
        if isinstance(wanted, int) and wanted == self._went_back and before is None:
            self._say(
                f"checkpoint.restore={wanted}: this run went back to it before, and goes "
                f"on from there; to go back again, delete {self._record}"
            )
            wanted = "latest"
        candidates, saved = self._candidates(wanted, before), self._recorded().get("step")
        if not candidates:
            return self._restore_elsewhere(feed, saved, before)
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
                lost = (saved or 0) > step and saved not in {other for _, other in damaged}
                if lost and wanted == "latest":
                    self._say(
                        f"step {saved} was saved, but no tier holds it for this mesh and "
                        f"number of processes; going on from step {step}"
                    )
                self._went_back = self._cfg.restore if isinstance(self._cfg.restore, int) else None
            self._set_aside(step, damaged)
            return state
        if unreadable:
            raise unreadable[1]
        raise ConfigError(
            f"{self._own.folder}: damaged are all of the steps {[step for _, step in damaged]} "
            f"that checkpoint.restore={wanted} may take; name another of {self.steps()}, or start "
            "a new run with another run.name"
        )

    def _restore_elsewhere(
        self, feed: "BatchFeed", saved: int | None, before: int | None
    ) -> Tree | None:
        """The state where no tier has a step: that of another run's checkpoint, or None."""
        if before is not None:
            self._set_aside(0, [])
            return None
        if self._cfg.restore != "none" and saved is not None:
            raise ConfigError(
                f"{self._record} says that step {saved} was saved, but no tier holds a checkpoint: "
                f"{', '.join(str(tier.storage.folder) for tier in self._tiers)}; put one "
                f"back, or start a new run with another run.name{self._strangers()}"
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

    def _strangers(self) -> str:
        """Folders of other processes on the disks here, in words; empty for none."""
        storages = (tier.storage for tier in self._tiers if isinstance(tier.storage, Local))
        if not (found := ", ".join(path for each in storages for path in each.strangers())):
            return ""
        return (
            f". Steps of other processes lie with process {self._peers.number} on "
            f"{platform.node()}, {found}: where ranks or disks changed places, start each where "
            "its own lies"
        )

    def _candidates(self, wanted: int | str, before: int | None) -> list[tuple[Tier, int]]:
        """The tiers and steps to restore from, the best first."""
        newest = sorted(
            ((tier, step) for tier in self._tiers for step in tier.storage.steps()),
            key=lambda candidate: -candidate[1],
        )
        if before is not None:
            return [(tier, step) for tier, step in newest if step < before]
        if wanted == "none" and newest:
            folders = ", ".join(dict.fromkeys(f"{tier.storage.folder}" for tier, _ in newest))
            raise ConfigError(
                "checkpoint.restore: none starts from scratch, but step "
                f"{newest[0][1]} is already in {folders}; "
                "choose another run.name, delete these, or use checkpoint.restore: latest"
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
        """Move damaged steps, and steps after the one that the run goes on from, out of the way of
        steps to come."""
        for tier in self._tiers:
            for other in tier.storage.present():
                if (tier, other) in damaged:
                    self._say(
                        f"step {other} was put aside as "
                        f"{tier.storage.set_aside(other, 'damaged')}; going on from step {step}"
                    )
                elif other > step:
                    tier.storage.set_aside(other, "abandoned")
        if self.steps():
            self._write_record(step)
        elif self._peers.number == 0:
            self._record.unlink(missing_ok=True)

    def _load(
        self, storage: Shared | Local, step: int, feed: "BatchFeed", elsewhere: bool = False
    ) -> Tree:
        """The state of a step of a tier; Damage where a file was lost or changed. Another run's
        step that lacks this run's weights, but has those that they are made of, gives its weights
        alone."""
        where, run = f"{storage.folder}/{step}", self._run
        with storage.verified(step):
            parts = storage.holds(step)
            lacks_treated = (
                elsewhere
                and run.weights.rewrite.replaced
                and not {f"params/{path}" for path in run.weights.shapes} <= {*parts["state"]}
            )
            if "meta" not in parts or lacks_treated:
                return self._load_weights(where)
            meta = strict_json.parse(storage.load(step, {"meta": None})["meta"]["json"], where)
            match = compatibility.Compatibility(where, meta["config"], run.cfg, elsewhere)
            parts_kept = self._parts_of(meta["config"])
            if parts_kept == {"params"}:
                return self._load_weights(where)
            data = run.cfg.data.model_dump(mode="json")
            sources = Sources.of_meta(meta, feed.mixture.described(), data)
            feed.mixture.check_deal(sources)
            match.refuse_changes(self._free)
            changes = feed.mixture.changes(sources)
            if changes and not compatibility.under("data.sources", self._free):
                raise ConfigError(
                    f"{where}: data.sources have changed since: "
                    + "; ".join(changes)
                    + f". Put them back, {match.remedy}, or go on with these from here: "
                    "--force-config data.sources"
                )
            wanted, there = _flat(run.abstract), dict(parts["state"])
            if "optimizer" not in parts_kept:
                wanted, there = (
                    {path: leaf for path, leaf in tree.items() if not path.startswith("opt/")}
                    for tree in (wanted, there)
                )
            match.refuse_shapes(there, wanted)
            if "optimizer" in parts_kept:
                match.refuse_optimizer()
            position = jax.ShapeDtypeStruct(
                parts["data"]["position"].shape, jnp.int32, sharding=run.batches.of_rows
            )
            loaded = storage.load(step, {"state": wanted, "data": {"position": position}})
        states = _local_position(loaded["data"]["position"])
        changed = bool(changes or match.changed(("data", "train.stages"), compatibility.FREE))
        feed.restore(feed.mixture.adopt(sources, states, step, changed))
        for line in changes:
            self._say(f"data.sources: {line}")
        if not elsewhere and (others := match.changed(("*",), compatibility.SAID)):
            self._say(f"changed since step {step} was saved: {shortened('; '.join(others), 500)}")
        facts = storage.facts(step)
        self.notes, self.saved_config = meta["notes"] | facts.get("notes", {}), meta["config"]
        self.owed = not elsewhere and facts.get("owed", False)
        self.summary = f"resumed from step {step} of {storage.folder}"
        if self._cfg.elsewhere and not elsewhere:
            self.summary += (
                f"; checkpoint.restore={self._cfg.restore} is where this run once began, or "
                "would have, and is not read again"
            )
        if "optimizer" in parts_kept:
            return _unflat(run.abstract, loaded["state"])
        self._say(
            f"checkpoint.restore_parts: the optimizer begins anew at step {step}: without the "
            "moments of the checkpoint, its schedules where they would be"
        )
        return self._with_fresh_optimizer(loaded["state"])

    def _parts_of(self, saved: Mapping[str, Any]) -> set[str]:
        """Parts of a checkpoint that are taken: all, where a run with the same
        checkpoint.restore_parts wrote it, since it began with them."""
        parts = [*self._cfg.restore_parts]
        same = saved["checkpoint"].get("restore_parts", [*PARTS]) == parts
        return {*PARTS} if same else {*parts}

    def _with_fresh_optimizer(self, loaded: dict[str, Any]) -> Tree:
        """A state of a checkpoint, by path, with an optimizer's state from the start but the counts
        of its schedules."""
        abstract = self._run.abstract._replace(opt=None)
        given = _unflat(abstract, loaded)
        begun = self._run.start(given.params)

        def counted(state: Any) -> Any:
            if not isinstance(state, optax.ScaleByScheduleState):
                return state
            count = state.count
            return state._replace(
                count=jax.device_put(jnp.copy(given.guard.updates), count.sharding)
            )

        opt = jax.tree.map(
            counted, begun.opt, is_leaf=lambda s: isinstance(s, optax.ScaleByScheduleState)
        )
        return begun._replace(step=given.step, guard=given.guard, behind=given.behind, opt=opt)

    def _load_weights(self, where: str) -> Tree:
        """The state before the first step, with the weights of a checkpoint."""
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
        """This process's lane positions int64 [rows, K] -> global int32 [batch_size, K, 2], halves
        of the numbers, sharded like the batch."""
        halves = np.ascontiguousarray(position, "<i8").view("<i4").reshape(*position.shape, 2)
        batches = self._run.batches
        return batches.put(halves, self._run.cfg.train.batch_size, batches.of_rows)


def _local_position(position: jax.Array) -> np.ndarray:
    """The lane positions of this process, int64 [rows, K]; older versions kept int32 [rows, K]."""
    shards = {shard.index[0].start or 0: shard.data for shard in position.addressable_shards}
    rows = np.concatenate([shards[first] for first in sorted(shards)])
    return rows.view("<i8")[..., 0] if rows.ndim == 3 else rows.astype(np.int64)


def removable(storage: Any, cfg: CheckpointConfig | TierConfig, steps: list[int]) -> list[int]:
    """The finished steps that no rule keeps; kept are the newest, multiples of keep_every, and
    the best by each metric of keep_best, the earlier of equals."""
    stay = {*steps[-cfg.keep :]}
    if isinstance(cfg, CheckpointConfig):  # the rule of the run's own folder, a Shared
        stay |= {step for step in steps if cfg.keep_every and step % cfg.keep_every == 0}
        figures: dict[int, dict[str, float | None]] = {}
        for step in steps if cfg.best else ():
            try:
                facts = storage.facts(step)
            except Unreadable:
                stay.add(step)
            except Damage:  # reported when it is restored or verified
                continue
            else:
                figures[step] = {"eval_loss": facts.get("eval_loss"), **facts.get("evaluated", {})}
        for metric, count in cfg.best.items():
            found = {
                step: -direction(metric) * value
                for step, figure in figures.items()
                if (value := figure.get(bare(metric))) is not None and not math.isnan(value)
            }
            stay |= {*sorted(found, key=found.__getitem__)[:count]}
    return [step for step in steps if step not in stay]


def _facts(evaluated: Mapping[str, float] | None, owed: bool) -> dict[str, Any]:
    """Those of a step's manifest."""
    figures = dict(evaluated or {})
    return {"eval_loss": figures.get("eval_loss"), "evaluated": figures, "owed": owed}


def _flat(state: Tree) -> dict[str, Any]:
    """Path -> array; random keys as their bits. A dict, because Orbax does not keep the types of an
    Optax state."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _unflat(state: Tree, values: Mapping[str, Any]) -> Tree:
    """The values of `_flat` in the shape of `state`."""
    leaves = [
        jax.random.wrap_key_data(values[path]) if _is_key(leaf) else values[path]
        for path, leaf in zip(_flat(state), jax.tree.leaves(state), strict=True)
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
