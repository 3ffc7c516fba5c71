"""The checkpoints of one run, over its tiers: weights, optimizer, data position and step, saved
together, checked, and found again."""

import contextlib
import errno
import fnmatch
import functools
import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxstack import config
from maxstack.checkpoint import manifest, owner
from maxstack.checkpoint.local import Local
from maxstack.checkpoint.manifest import Damage
from maxstack.checkpoint.shared import Shared
from maxstack.checkpoint.weights import WeightsReader, step_of
from maxstack.cluster.peers import Processes
from maxstack.config import annotations
from maxstack.config.spelling import did_you_mean
from maxstack.config.writer import inline
from maxstack.errors import ConfigError
from maxstack.schema.checkpoint import CheckpointConfig, TierConfig

if TYPE_CHECKING:
    from maxstack.data.feed import Feed
    from maxstack.run import Run
    from maxstack.schema.config import Config

Tree = Any
FORMAT = 2
FREE = (
    "model.dtype",
    "model.weights",
    "model.remat",
    "model.unroll",
    "model.blocks.*.slack",
    "model.*.backend",
    "data.workers",
    "data.prefetch",
    "data.quarantine",
    "lora.dropout",
    "lora.adapter",
)
HARMLESS: dict[str, list[tuple[Any, Any]]] = {
    "data.sources.*.encoding_errors": [
        (config.ABSENT, "refuse"),
        (config.ABSENT, "keep"),
        ("refuse", "keep"),
        ("refuse", "replace"),
    ],
    "data.sources.*.normalize": [(config.ABSENT, [])],
    "model.blocks.*.mixer.causal": [(config.ABSENT, True)],
}
"""Changes, old and new, that leave the model and every document that was read before as they were;
ABSENT: older checkpoints lack the key."""
BOUND = ("model", "quantization", "lora", "data", "objective", "train.batch_size")


class Tier(NamedTuple):
    """One place of a run's checkpoints, and when and what it keeps."""

    place: Shared | Local
    every: int
    rule: "CheckpointConfig | TierConfig"

    def due(self, step: int, last: bool) -> bool:
        """Whether a step is saved here; the last one goes to every tier that all processes see."""
        return self.every > 0 and (
            step % self.every == 0 or (last and isinstance(self.place, Shared))
        )


class Checkpoints:
    """Saves and restores. One save at a time runs in the background; the next waits for it.

    `say` is told, at once and from any thread, what a user should not miss. A step that could not
    be written, or is not what was written, is never the latest: the run goes on from the newest
    intact one. `forced` are keys that may have changed since a checkpoint.
    """

    def __init__(
        self, run: "Run", folder: Path, say: Callable[[str], None], forced: Sequence[str] = ()
    ):
        self._run, self._cfg, self._say, self._free = run, run.cfg.checkpoint, say, (*FREE, *forced)
        for key in forced:
            if not _under(key, BOUND):
                raise ConfigError(
                    f"--force-config {key}: no key that a checkpoint binds; those are "
                    f"{', '.join(BOUND)} and what is below them"
                )
            _check_key(key, run.cfg.model_dump(mode="json"))
            if key == "train.batch_size":
                raise ConfigError(
                    "--force-config train.batch_size: cannot be forced, because each row "
                    "of a batch has its own place in the data; "
                    "start a new run with another run.name"
                )
        self._processes = Processes()
        self._own = Shared(folder.absolute(), self._processes)
        self._tiers = self._opened()
        self._told = folder.parent / "saved.json"
        self._went_back = self._said_saved().get("went_back")
        self._saving: threading.Thread | None = None
        self._failed: str | None = None
        self.told, self.notes, self.written = "", dict[str, Any](), dict[str, Any]()
        for tier in self._tiers:
            for line in tier.place.clear():
                self._say(line)

    def _opened(self) -> list[Tier]:
        """Nearest first."""
        cfg, run = self._cfg, self._run.cfg.run
        own, others = [], []
        for tier in cfg.tiers:
            path = Path(tier.path).expanduser().absolute() / run.name
            try:
                path.mkdir(parents=True, exist_ok=True)
                if not os.access(path, os.W_OK):
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                owner.claim(path, self._own.folder.parent)
                if tier.replicate is not None:
                    (path / f"host_{self._processes.number}").mkdir(exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"checkpoint.tiers: cannot write to {error.filename or path}: "
                    f"{error.strerror}; give another path"
                ) from error
            if tier.replicate is None:
                others.append(Tier(Shared(path, self._processes, aside=path), tier.every, tier))
            else:
                if tier.replicate >= self._processes.count:
                    self._say(
                        f"checkpoint.tiers: replicate={tier.replicate} for {tier.path}, "
                        f"but the run has {self._processes.count} process"
                        f"{'es' * (self._processes.count > 1)}: "
                        f"{self._processes.count - 1 or 'no'} other disk holds a copy"
                    )
                local = Local(path, self._processes, tier.replicate, self._layout())
                own.append(Tier(local, tier.every, tier))
        return [*own, Tier(self._own, cfg.every, cfg), *others]

    def _layout(self) -> str:
        """Of the shards on this mesh: others than these cannot be read from hosts' own disks."""
        places = [
            f"{path} {leaf.shape} {leaf.dtype} {leaf.sharding.spec}"
            for path, leaf in _flat(self._run.abstract).items()
        ]
        return f"{dict(self._run.mesh.shape)} {zlib.crc32(' '.join(places).encode()):08x}"

    def steps(self) -> list[int]:
        """The finished steps of all tiers, oldest first."""
        return sorted({step for tier in self._tiers for step in tier.place.steps()})

    def due(self, step: int, last: bool = False) -> bool:
        """Whether any tier wants this step."""
        return any(tier.due(step, last) for tier in self._tiers)

    def save(
        self,
        step: int,
        state: Tree,
        feed: "Feed",
        notes: Mapping[str, Any],
        eval_loss: float | None = None,
        last: bool = False,
    ) -> None:
        """Copy the arrays off the devices for each tier that is due, then write in the background;
        a step counts where all of it is on disk, with its checksums. `notes` are plain data that
        `restore` leaves in `self.notes`, beside the configuration `self.written`."""
        self._save(
            [tier for tier in self._tiers if tier.due(step, last)],
            step,
            state,
            feed,
            notes,
            eval_loss,
        )

    def complete(self, step: int, state: Tree, feed: "Feed", notes: Mapping[str, Any]) -> None:
        """Save the last step of a run where a kill kept it from a place that all processes see, and
        wait for it."""
        lacking = [
            tier
            for tier in self._tiers
            if tier.every and isinstance(tier.place, Shared) and step not in tier.place.steps()
        ]
        if lacking:
            self._save(lacking, step, state, feed, notes, None)
        self.wait(last=True)

    def _save(
        self,
        tiers: list[Tier],
        step: int,
        state: Tree,
        feed: "Feed",
        notes: Mapping[str, Any],
        eval_loss: float | None,
    ) -> None:
        self.wait()
        meta = json.dumps(
            {
                "config": self._run.cfg.model_dump(mode="json"),
                "sources": feed.identity(),
                "notes": dict(notes),
            }
        )
        parts = {
            "state": _flat(state),
            "data": {"position": self._position(feed.state())},
            "meta": {"format": FORMAT, "json": meta},
        }
        begun = [(tier, tier.place.begin(step, parts)) for tier in tiers]
        self._saving = threading.Thread(
            target=self._finish, args=(step, begun, {"eval_loss": eval_loss}), name="checkpoint"
        )
        self._saving.start()

    def _finish(
        self, step: int, begun: list[tuple[Tier, Callable[[], None]]], facts: Mapping[str, Any]
    ) -> None:
        for tier, written in begun:
            try:
                tier.place.finish(step, written, facts)
                tier.place.trim(functools.partial(removable, tier.place, tier.rule))
            except Exception as error:  # in a thread of its own, where it would go unheard
                self._failed = (
                    f"checkpoint of step {step} was not saved to {tier.place.folder}: {error}"
                )
                kept = manifest.steps(tier.place.folder)
                self._say(
                    f"{self._failed}{f'; step {kept[-1]} remains the latest there' if kept else ''}"
                )
            else:
                self._tell_saved(step)

    def _tell_saved(self, step: int) -> None:
        if self._processes.number == 0:
            with contextlib.suppress(OSError):  # it serves better messages alone
                self._told.parent.mkdir(parents=True, exist_ok=True)
                self._told.write_text(json.dumps({"step": step, "went_back": self._went_back}))

    def _said_saved(self) -> dict[str, Any]:
        """`step`: the newest that a save of this run told of; `went_back`: the step that
        checkpoint.restore made it go back to."""
        with contextlib.suppress(OSError, ValueError):
            if isinstance(found := json.loads(self._told.read_text()), dict):
                return found
        return {}

    def wait(self, last: bool = False) -> None:
        """Until the save under way is on disk. ConfigError where it failed, and it was the last or
        `checkpoint.on_failure` is stop."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        told, self._failed = self._failed, None
        if told and (last or self._cfg.on_failure == "stop"):
            raise ConfigError(
                f"{told}; make room there or repair that place, and run the same command again"
            )

    def restore(self, feed: "Feed", before: int | None = None) -> Tree | None:
        """What `checkpoint.restore` asks for, on this run's mesh whatever mesh wrote it, with the
        feed set to go on; None: start from scratch. `before`: the newest step before this one
        instead, with a save that is under way awaited; None: there is none.

        A step that is damaged is said to be and put aside, and the next one taken. A step that is
        asked for is gone back to once: the same command again goes on from what was saved since.
        Raises ConfigError where there is no such checkpoint, where none is intact, or, with the
        differences, where it is of another architecture, data or optimizer.
        """
        self.wait()
        wanted = self._cfg.restore
        if isinstance(wanted, int) and wanted == self._went_back and before is None:
            self._say(
                f"checkpoint.restore={wanted}: this run went back to it before, and goes "
                f"on from there; to go back again, delete {self._told}"
            )
            wanted = "latest"
        found, saved = self._candidates(wanted, before), self._said_saved().get("step")
        if not found and before is not None:
            self._set_aside(0, [])
            return None
        if not found and wanted != "none" and saved is not None:
            raise ConfigError(
                f"{self._told} says that step {saved} was saved, but no tier holds a checkpoint: "
                f"{', '.join(str(tier.place.folder) for tier in self._tiers)}; put one "
                "back, or start a new run with another run.name"
            )
        if not found and (path := self._cfg.elsewhere):
            folder, step = step_of(Path(path), f"checkpoint.restore: {path}")
            try:
                return self._load(Shared(folder, self._processes), step, feed, elsewhere=True)
            except Damage as error:
                raise ConfigError(
                    f"checkpoint.restore: {wanted} is damaged: {error}; name another step of it"
                ) from error
        damaged: list[tuple[Tier, int]] = []
        for tier, step in found:
            try:
                state = self._load(tier.place, step, feed)
            except Damage as error:
                self._say(f"DAMAGED CHECKPOINT, step {step}: {error}")
                damaged.append((tier, step))
                continue
            if (
                (saved or 0) > step
                and saved not in {other for _, other in damaged}
                and wanted == "latest"
                and before is None
            ):
                self._say(
                    f"step {saved} was saved, but no tier holds it for this mesh and "
                    f"number of processes; going on from step {step}"
                )
            if before is None:
                self._went_back = self._cfg.restore if isinstance(self._cfg.restore, int) else None
            self._set_aside(step, damaged)
            return state
        if damaged:
            raise ConfigError(
                f"{self._own.folder}: damaged are all of the steps "
                f"{[step for _, step in damaged]} that checkpoint.restore={wanted} "
                f"may take; name another of {self.steps()}, or start a new run with "
                "another run.name"
            )
        return None

    def _candidates(self, wanted: int | str, before: int | None) -> list[tuple[Tier, int]]:
        """What to restore from, the best first."""
        found = [(tier, step) for tier in self._tiers for step in tier.place.steps()]
        if before is not None:
            return sorted((one for one in found if one[1] < before), key=lambda one: -one[1])
        if wanted == "none" and found:
            places = ", ".join({f"{tier.place.folder}": 0 for tier, _ in found})
            raise ConfigError(
                "checkpoint.restore: none starts from scratch, but step "
                f"{max(step for _, step in found)} is already in {places}; "
                "choose another run.name, delete these, or use checkpoint.restore: latest"
            )
        if isinstance(wanted, int) and not (asked := [one for one in found if one[1] == wanted]):
            raise ConfigError(
                f"checkpoint.restore: {self._own.folder} holds no step {wanted}; it "
                f"holds {self.steps() or 'none'}"
            )
        return asked if isinstance(wanted, int) else sorted(found, key=lambda one: -one[1])

    def _set_aside(self, step: int, damaged: list[tuple[Tier, int]]) -> None:
        """Move what is damaged, and what is later than the step that the run goes on from, out of
        the way of steps to come."""
        for tier in self._tiers:
            for other in tier.place.there():
                if (tier, other) in damaged:
                    self._say(
                        f"step {other} was put aside as "
                        f"{tier.place.set_aside(other, 'damaged')}; going on from step "
                        f"{step}"
                    )
                elif other > step:
                    tier.place.set_aside(other, "abandoned")
        if self.steps():
            self._tell_saved(step)
        elif self._processes.number == 0:
            self._told.unlink(missing_ok=True)

    def _load(self, tier: Shared | Local, step: int, feed: "Feed", elsewhere: bool = False) -> Tree:
        """A step of a tier; Damage where it is not what was written. Of another run's step that has
        not the weights of this one, but those that they are made of, the weights alone."""
        where, run = f"{tier.folder}/{step}", self._run
        with tier.verified(step):
            parts = tier.holds(step)
            if "meta" not in parts or (
                elsewhere
                and run.weights.rewrite.replaced
                and not {f"params/{path}" for path in run.weights.shapes} <= {*parts["state"]}
            ):
                reader, adapter = WeightsReader(Path(where)), run.cfg.lora and run.cfg.lora.adapter
                if adapter and reader.shapes.keys() == run.weights.shapes.keys():
                    raise ConfigError(
                        f"lora.adapter: {adapter} and {where} both give adapters; drop "
                        "lora.adapter, or restore weights without any"
                    )
                self.told = (
                    f"starting from the weights in {where}"
                    + f" and the adapter in {adapter}" * bool(adapter)
                )
                return run.begun(reader.load(run.weights.shapes, run.weights.sources))
            meta = json.loads(tier.load(step, {"meta": None})["meta"]["json"])
            _refuse_changes(where, meta["config"], run.cfg, self._free, elsewhere)
            if meta["sources"] != feed.identity() and not _under("data.sources", self._free):
                raise ConfigError(
                    f"{where}: the documents of data.sources have changed since (files "
                    "added, removed or renamed), so the order of the "
                    f"data would too; put them back, or {_otherwise(where, elsewhere)}"
                )
            wanted, found = _flat(run.abstract), parts["state"]
            if {k: tuple(v.shape) for k, v in found.items()} != {
                k: tuple(v.shape) for k, v in wanted.items()
            }:
                raise _other_state(where, meta["config"], run.cfg, found, wanted, elsewhere)
            shape = run.cfg.train.batch_size, feed.state().shape[1]
            if tuple(parts["data"]["position"].shape) != shape:
                raise ConfigError(
                    f"{where}: has positions in another number of data.sources, which "
                    "cannot be forced: put these back, or "
                    f"{_otherwise(where, elsewhere)}"
                )
            position = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.lane_sharding)
            loaded = tier.load(step, {"state": wanted, "data": {"position": position}})
        feed.restore(self._local_position(loaded["data"]["position"]))
        self.notes, self.written = meta["notes"], meta["config"]
        self.told = f"resumed from step {step} of {tier.folder}"
        if self._cfg.elsewhere and any(tier is one.place for one in self._tiers):
            self.told += (
                f"; checkpoint.restore={self._cfg.restore} is where this run once began, or "
                "would have, and is not read again"
            )
        return _unflat(run.abstract, loaded["state"])

    def _position(self, position: np.ndarray) -> jax.Array:
        """This process's lane positions int64 [rows, K] -> global int32 [batch_size, K], sharded
        like the batch."""
        if position.max() >= 2**31:
            raise OverflowError(
                "a lane has read 2^31 documents or tokens; a checkpoint counts to 2^31 - 1"
            )
        return self._run.place(
            {"position": position.astype(np.int32)}, self._run.cfg.train.batch_size, whole_rows=True
        )["position"]

    def _local_position(self, position: jax.Array) -> np.ndarray:
        """The lane positions of this process, int64 [rows, K]."""
        found: dict[int, np.ndarray] = {}
        for shard in position.addressable_shards:
            found |= dict(
                zip(
                    range(*shard.index[0].indices(position.shape[0])),
                    np.asarray(shard.data),
                    strict=True,
                )
            )
        return np.stack([found[row] for row in sorted(found)]).astype(np.int64)

    def close(self) -> None:
        """Wait for the save under way. ConfigError where it failed."""
        self.wait(last=True)


def removable(
    place: Shared | Local, cfg: CheckpointConfig | TierConfig, steps: list[int]
) -> list[int]:
    """Of the finished steps of a place those that no rule keeps: of the newest, of multiples of
    keep_every, of the lowest eval_loss."""
    stay = {*steps[-cfg.keep :]}
    if isinstance(cfg, TierConfig) or isinstance(place, Local):
        return [step for step in steps if step not in stay]
    stay |= {step for step in steps if cfg.keep_every and step % cfg.keep_every == 0}
    losses: dict[int, float] = {}
    for step in steps if cfg.keep_best else ():
        with contextlib.suppress(Damage):  # told when it is restored or verified
            if (loss := place.facts(step).get("eval_loss")) is not None:
                losses[step] = loss
    return [
        step
        for step in steps
        if step not in stay | {*sorted(losses, key=losses.__getitem__)[: cfg.keep_best]}
    ]


def _flat(state: Tree) -> dict[str, Any]:
    """Path -> array; random keys as their bits. A dict, because Orbax does not keep the types of an
    Optax state."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _unflat(state: Tree, flat: dict[str, Any]) -> Tree:
    def leaf(path: Any, wanted: Any) -> Any:
        value = flat[jax.tree_util.keystr(path, simple=True, separator="/")]
        return (
            jax.random.wrap_key_data(value)
            if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key)
            else value
        )

    return jax.tree_util.tree_map_with_path(leaf, state)


def _bits(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        bits = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def _refuse_changes(
    where: str, saved: dict[str, Any], cfg: "Config", free: tuple[str, ...], elsewhere: bool
) -> None:
    if changed := [line for line in _changes(saved, cfg, BOUND) if not _under(line, free)]:
        raise ConfigError(
            f"{where} was written by another configuration (checkpoint -> now):\n"
            + "\n".join(f"  {line}" for line in changed)
            + f"\n  Put these back, {_otherwise(where, elsewhere)}, or, where no array "
            "changes its shape, --force-config KEY."
        )


def _otherwise(where: str, elsewhere: bool) -> str:
    """What else can be done where a run does not go on from a checkpoint: of another run, its
    weights can be had whatever was trained on them."""
    return (
        f"begin on its weights alone (maxstack export {where} --out FOLDER, then model.from=FOLDER)"
        if elsewhere
        else "start a new run with another run.name"
    )


def _changes(saved: dict[str, Any], cfg: "Config", keys: tuple[str, ...]) -> list[str]:
    """`key: old -> new` of what differs below some keys."""
    return [
        f"{key}: {_shown(key, old, cfg)} -> {_shown(key, new, cfg)}"
        for key, old, new in config.difference(saved, cfg.model_dump(mode="json"))
        if _under(key, keys) and not _harmless(key, old, new)
    ]


def _harmless(key: str, old: Any, new: Any) -> bool:
    return any(
        (old, new) in changes
        for pattern, changes in HARMLESS.items()
        if fnmatch.fnmatchcase(key, pattern)
    )


def _shown(key: str, value: Any, cfg: "Config") -> str:
    """In YAML's flow style; of the rules of a recipe what is no default."""
    if key == "quantization.rules" and isinstance(value, list):
        rule = annotations.section(
            annotations.item(annotations.of_field(type(cfg.quantization).model_fields["rules"]))
        )
        defaults = (
            {name: field.get_default() for name, field in rule.model_fields.items()} if rule else {}
        )
        value = [
            {name: item for name, item in each.items() if item not in (defaults.get(name), [])}
            for each in value
        ]
    return value if value == config.ABSENT else inline(value)


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    name = key.partition(":")[0]
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for prefix in prefixes
        for pattern in (prefix, f"{prefix}.*")
    )


def _check_key(key: str, cfg: Any) -> None:
    """ConfigError where the configuration has no such key."""
    for i, part in enumerate(parts := key.split(".")):
        names = (
            [*map(str, range(len(cfg)))]
            if isinstance(cfg, list | tuple)
            else [*cfg]
            if isinstance(cfg, dict)
            else []
        )
        if part == "*":
            return
        if part not in names:
            raise ConfigError(
                f"--force-config {key}: unknown key "
                f"{'.'.join(parts[: i + 1])}{did_you_mean(part, names)}"
            )
        cfg = cfg[int(part)] if isinstance(cfg, list | tuple) else cfg[part]


def _other_state(
    where: str,
    saved: dict[str, Any],
    cfg: "Config",
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    elsewhere: bool,
) -> ConfigError:
    """Told by the keys of the optimizer that changed, or of a model that was forced; by the arrays,
    where no key changed, so a library must have."""
    shapes = [{key: tuple(leaf.shape) for key, leaf in tree.items()} for tree in (found, wanted)]
    arrays = [
        f"{key}: {shapes[0].get(key, 'absent')} -> {shapes[1].get(key, 'absent')}"
        for key in sorted({*found, *wanted})
        if shapes[0].get(key) != shapes[1].get(key)
    ]
    model = any(line.startswith("params/") for line in arrays)
    what, key = (
        ("weights of another model", "model")
        if model
        else ("the state of another optimizer", "optimizer")
    )
    lines = _changes(saved, cfg, (key,)) or arrays
    more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
    return ConfigError(
        f"{where} holds {what} (checkpoint -> now):\n"
        + "\n".join(f"  {line}" for line in lines[:10])
        + more
        + f"\n  Arrays of other shapes cannot be forced: put the {key} back, or "
        f"{_otherwise(where, elsewhere)}."
    )
