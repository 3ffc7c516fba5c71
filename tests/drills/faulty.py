"""`maxstack train` with a fault in it: DRILL_FAULT holds its `kind` and arguments as JSON. Worker
processes that import this file have it too.

example: DRILL_FAULT='{"kind": "clock", "seconds": 86400}' python tests/drills/faulty.py quickstart
train.steps=5
"""

import json
import os
import pkgutil
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Moment:
    """A phase of the save of a step, in which the process gets SIGKILL."""

    def __init__(self, phase: str, step: int):
        self.phase, self._step, self._saving = phase, step, 0
        self.removing = ""

    def begins(self, begin: Callable) -> Callable:
        """A `begin` that tells which step is being saved."""

        def noting(place: Any, step: int, parts: Any) -> Any:
            self._saving = step
            return begin(place, step, parts)

        return noting

    def comes(self, phase: str) -> bool:
        """True in the chosen phase of the chosen step."""
        return phase == self.phase and self._saving == self._step

    def reached(self, phase: str) -> None:
        """Be killed, if this is it."""
        if self.comes(phase):
            os.kill(os.getpid(), signal.SIGKILL)


def save(phase: str, step: int) -> None:
    """SIGKILL in a phase of the save of a step: one of SHARED or LOCAL."""
    from maxstack.checkpoint import local, shared

    moment = Moment(phase, step)
    for kind in (shared.Shared, local.Local):
        kind.begin = moment.begins(kind.begin)
    _in_orbax(moment)
    _in_manifest(moment)
    _in_shards(moment)
    _in_removal(moment)


def _in_orbax(moment: Moment) -> None:
    from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath as Temporary

    create, finalize = Temporary.create, Temporary.finalize

    async def created(self: Any, *args: Any, **more: Any) -> Any:
        found = await create(self, *args, **more)
        moment.reached("begun")
        return found

    async def finalized(self: Any, *args: Any, **more: Any) -> Any:
        moment.reached("written")
        found = await finalize(self, *args, **more)
        moment.reached("renamed")
        return found

    Temporary.create, Temporary.finalize = created, finalized


def _in_manifest(moment: Moment) -> None:
    from maxstack.checkpoint import manifest
    from maxstack.config import atomic

    checksums, write = manifest.checksums, manifest.write

    def summed(folder: Path, *share: slice) -> Any:
        found = checksums(folder, *share)
        moment.reached("checksums")
        return found

    def half_written(folder: Path, found: Any, facts: Any) -> None:
        if moment.comes("manifest"):
            (folder / f".{manifest.NAME}{atomic.UNFINISHED}").write_text('{"facts": {"eval_')
        moment.reached("manifest")
        moment.reached("local sealing")
        write(folder, found, facts)
        moment.reached("sealed")

    manifest.checksums, manifest.write = summed, half_written


def _in_shards(moment: Moment) -> None:
    from maxstack.checkpoint import local

    write = local.Local._write

    def writing(self: Any, step: int, shards: list[Any], meta: Any) -> None:
        def some() -> Iterator[Any]:
            for i, shard in enumerate(shards):
                if i == len(shards) // 2:
                    moment.reached("local writing")
                yield shard

        write(self, step, some(), meta)

    local.Local._write = writing


def _in_removal(moment: Moment) -> None:
    from maxstack.checkpoint import local, shared

    def marked(phase: str, remove: Callable) -> Callable:
        def removing(self: Any, chosen: Callable) -> None:
            moment.removing = phase
            remove(self, chosen)
            moment.removing = ""

        return removing

    whole = shutil.rmtree

    def rmtree(path: Any, *args: Any, **more: Any) -> None:
        if moment.removing and moment.comes(moment.removing):
            next(found for found in Path(path).rglob("*") if found.is_file()).unlink()
            moment.reached(moment.removing)
        whole(path, *args, **more)

    shared.Shared.trim = marked("removing", shared.Shared.trim)
    local.Local.trim = marked("local removing", local.Local.trim)
    shutil.rmtree = rmtree


SHARED = ("begun", "written", "renamed", "checksums", "manifest", "sealed", "removing")
LOCAL = ("local writing", "local sealing", "sealed", "local removing")
"""Phases of a save: orbax has its temporary folder; has written it; has renamed it; we have the
checksums; half of the manifest is written; the step counts; an old one is being removed. Of a
host's own disk: half of the shards, no manifest yet, it counts, removing."""


def poison(steps: list[int], where: str, value: float = float("nan")) -> None:
    """Inside the compiled step, at these batches: the loss, all gradients (`gradient`), or one
    element of one (`element`) becomes `value`."""
    import jax
    import jax.numpy as jnp

    from maxstack import step

    gradient, whole = step._gradient, step.TrainingStep.__call__

    def tainted(loss: Callable, params: Any, batch: Any, pieces: int, bad: Any) -> Any:
        summed, grads = gradient(loss, params, batch, pieces)
        if where == "loss":
            return summed._replace(total=jnp.where(bad, value, summed.total)), grads
        leaves, tree = jax.tree.flatten(grads)
        if where == "gradient":
            leaves = [jnp.where(bad, value, leaf) for leaf in leaves]
        else:
            leaves[-1] = (
                leaves[-1]
                .at[(0,) * leaves[-1].ndim]
                .set(jnp.where(bad, value, leaves[-1][(0,) * leaves[-1].ndim]))
            )
        return summed, jax.tree.unflatten(tree, leaves)

    def tainted_step(own: Any, state: Any, *rest: Any) -> Any:
        bad = jnp.isin(state.step + 1, jnp.asarray(steps))
        step._gradient = lambda loss, params, batch, pieces: tainted(
            loss, params, batch, pieces, bad
        )
        try:
            return whole(own, state, *rest)
        finally:
            step._gradient = gradient

    step.TrainingStep.__call__ = tainted_step


def clock(seconds: float) -> None:
    """The wall clock is wrong by so much; the steady one is not."""
    plain, nanoseconds, local_time, shown = time.time, time.time_ns, time.localtime, time.strftime
    time.time = lambda: plain() + seconds
    time.time_ns = lambda: nanoseconds() + int(seconds * 1e9)
    time.localtime = lambda at=None: local_time(time.time() if at is None else at)
    time.strftime = lambda text, at=None: shown(text, time.localtime() if at is None else at)


def hang(after: int, seconds: float = 1e9) -> None:
    """The data source stands still at the document that it is asked for after so many others,
    whichever process reads it."""
    from maxstack.data import records, sources

    asked = [0]

    def standing(plain: Callable) -> Callable:
        def get(self: Any, index: int) -> Any:
            asked[0] += 1
            if asked[0] > after:
                time.sleep(seconds)
            return plain(self, index)

        return get

    for kind in (sources.Synthetic, sources.WholeFiles, records.Jsonl):
        kind.__getitem__ = standing(kind.__getitem__)


STANDS = {
    "data": ("maxstack.data.feed:Feed", "__next__"),
    "evaluation": ("maxstack.evals.evaluation:Evaluation", "__call__"),
    "compiler": ("maxstack.compiled_steps:CompiledSteps", "at"),
    "rollout": ("maxstack.rollouts.maker:Maker", "groups"),
    "save": ("maxstack.checkpoint.shared:Shared", "finish"),
    "step": ("maxstack.meter:Meter", "flush"),
}
"""Where a process may stand still: a class, and the method of it that does not return."""


def stand(where: str, after: int, away: bool = False, seconds: float = 0.0) -> None:
    """One of STANDS does not return, after so many calls of it that did: it is in C, and no handler
    of Python's is called meanwhile. `away`: it ends as where a store is away for too long;
    `seconds`: each takes so many."""
    import ctypes

    from maxstack.errors import StoreUnavailable

    name, method = STANDS[where]
    kind, calls = pkgutil.resolve_name(name), [0]
    plain = getattr(kind, method)

    def standing(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            print(f"stands still: {where}", flush=True)
            if seconds:
                time.sleep(seconds)
                return plain(*arguments, **more)
            if away:
                raise StoreUnavailable("s3://data/a.txt: nobody answers")
            lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, (ctypes.c_byte * 64)()
            lock(mutex)
            lock(mutex)  # it is held
        return plain(*arguments, **more)

    setattr(kind, method, standing)


class _Called:
    """A compiled step in every way, but for what a call of it does."""

    def __init__(self, step: Any, call: Callable):
        self._step, self._call = step, call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def flip(step: int, replica: int, often: str, leaf: int, element: int, bit: int) -> None:
    """A bit of a gradient, in the update that one replica (by its place on the axis `data`)
    computes of this batch: `once` or `always`."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from maxstack import sharding
    from maxstack import step as program
    from maxstack.compiled_steps import CompiledSteps

    plain, hit, spoiling = program._gradient, [0], [False]

    def spoiled(grad: jax.Array) -> jax.Array:
        def local(grad: jax.Array) -> jax.Array:
            bits = jax.lax.bitcast_convert_type(grad, jnp.uint32).reshape(-1)
            mask = (jax.lax.axis_index("data") == replica).astype(jnp.uint32) << bit
            at = element % bits.size
            return jax.lax.bitcast_convert_type(
                bits.at[at].set(bits[at] ^ mask).reshape(grad.shape), jnp.float32
            )

        mesh, _ = sharding.current()  # type: ignore[misc]
        return jax.shard_map(
            local, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )(grad)

    def gradient(*args: Any) -> Any:
        summed, grads = plain(*args)
        leaves, tree = jax.tree.flatten(grads)
        if spoiling[0]:
            leaves[leaf % len(leaves)] = spoiled(leaves[leaf % len(leaves)])
        return summed, jax.tree.unflatten(tree, leaves)

    program._gradient = gradient
    compiled = CompiledSteps._compiled

    def both(steps: Any, shape: tuple[int, int]) -> Any:
        """The compiled step, and that with the fault for the batch that it hits."""
        honest, spoiling[0] = compiled(steps, shape), True
        jax.clear_caches()
        one = honest.run
        bad = one.step.lower(one.abstract, one.batches.abstract()).compile()

        def chosen(state: Any, batch: Any) -> Any:
            now = int(state.step) + 1 == step and (often == "always" or not hit[0])
            hit[0] += now
            return (bad if now else honest.step)(state, batch)

        return honest._replace(step=_Called(honest.step, chosen))

    CompiledSteps._compiled = both


def spoil(step: int, replica: int, leaf: int) -> None:
    """NaN in the memory of one replica (by its place on the axis `data`), in a weight, before the
    update of this step, once."""
    import jax
    import jax.numpy as jnp

    from maxstack.compiled_steps import CompiledSteps

    compiled, done = CompiledSteps._compiled, [False]

    def spoiled(array: Any, device: Any) -> Any:
        parts = [
            (jnp.full_like(shard.data, jnp.nan) if shard.device == device else shard.data)
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    def updating(steps: Any, shape: tuple[int, int]) -> Any:
        shaped = compiled(steps, shape)

        def call(state: Any, batch: Any) -> Any:
            if int(state.step) + 1 == step and not done[0]:
                done[0] = True
                leaves, tree = jax.tree.flatten(state.params)
                at, device = leaf % len(leaves), shaped.run.mesh.devices.flat[replica]
                leaves[at] = spoiled(leaves[at], device)
                state = state._replace(params=jax.tree.unflatten(tree, leaves))
            return shaped.step(state, batch)

        return shaped._replace(step=_Called(shaped.step, call))

    CompiledSteps._compiled = updating


def learning(phase: str, updates: int, after: int) -> None:
    """SIGKILL in a run that learns from its own samples, after so many updates of this process the
    so manieth time that it is in one of LEARNING."""
    from maxstack.compiled_steps import CompiledSteps
    from maxstack.inference.engine import Engine
    from maxstack.inference.programs import Programs

    updated, seen, compiled = [0], [0], CompiledSteps._compiled

    def reached(now: str) -> None:
        seen[0] += now == phase and updated[0] >= updates
        if seen[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(now: str, plain: Callable) -> Callable:
        def calling(*args: Any, **more: Any) -> Any:
            reached(now)
            found = plain(*args, **more)
            reached(now)
            updated[0] += now == "update"
            return found

        return calling

    def updating(steps: Any, shape: tuple[int, int]) -> Any:
        """The compiled step, which goes on in the background once it is called."""
        shaped = compiled(steps, shape)
        return shaped._replace(step=_Called(shaped.step, around("update", shaped.step)))

    CompiledSteps._compiled = updating
    Engine.step = around("answering", Engine.step)
    Programs.prepare = around("handing over", Programs.prepare)


LEARNING = ("answering", "handing over", "update")
"""Phases of learning from samples: the engine computes a step, or has done so; it is given weights,
or has them and still knows what it cached by the last ones; an update is dispatched."""


def refuse() -> None:
    """A checkpoint that this process alone refuses."""
    from maxstack.checkpoint.compatibility import Compatibility
    from maxstack.errors import ConfigError

    def refusing(*_: Any) -> None:
        raise ConfigError("this process alone refuses")

    Compatibility.refuse_changes = refusing


def hold(folder: str) -> None:
    """A reward of sevens.py waits when it is told to, in the folder."""


FAULTS: dict[str, Callable[..., None]] = {
    "save": save,
    "poison": poison,
    "clock": clock,
    "hang": hang,
    "stand": stand,
    "flip": flip,
    "spoil": spoil,
    "learning": learning,
    "hold": hold,
    "refuse": refuse,
}

if "DRILL_FAULT" in os.environ:
    given = json.loads(os.environ["DRILL_FAULT"])
    FAULTS[given.pop("kind")](**given)

if __name__ == "__main__":
    from maxstack import cli, train

    sys.exit(cli.run(train.program, sys.argv[1:]))
