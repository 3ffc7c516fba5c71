"""A tier on each host's own disk: every process writes the shards it holds, and fetches copies of
its neighbours'.

HOST/STEP/of_Q are the shards that process Q held, one file and its index, with a manifest; HOST is
the process that wrote or fetched them. A step is whole where the disks together hold the shards of
every process, all of one save. It is read by as many processes on the same mesh as wrote it.

Plain shards, because one process writes and reads what it holds; Orbax's emergency manager needs
replicas of the whole state. Processes agree through jax's coordination service, not through
devices, so that the background thread of a save may.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxstack import strict_json
from maxstack.checkpoint import manifest
from maxstack.checkpoint.manifest import Damage, Unreadable
from maxstack.checkpoint.peer_files import PeerFiles
from maxstack.cluster.peers import Peers
from maxstack.config import atomic

SHARDS, INDEX = "shards.bin", "index.json"
ALIGNED = 64
Index = list[list[int]]


class Local:
    """The steps on the disks of all hosts below `folder`, with `copies` of each process's shards on
    the disks of the next processes."""

    def __init__(self, folder: Path, peers: Peers, copies: int, layout: str):
        self.folder = folder
        self._peers = peers
        self._layout = layout
        self._own = folder / f"host_{peers.number}"
        self._copies = min(copies, peers.count - 1)
        self._files = PeerFiles(self._own, peers) if peers.count > 1 else None
        self._holders: dict[int, list[list[int]]] = {}
        self._saves: dict[int, str] = {}
        self._turn = 0
        # With the turn it names a save, the same on all hosts. Shards of one step of two histories
        # were taken together before, and the run went on with a mixed state.
        self._began = peers.exchange("local began", f"{time.time_ns():020}")[0]

    def clear(self) -> list[str]:
        """Remove unfinished steps and put aside steps with a damaged manifest; return a line for
        each, of all processes."""
        lines = []
        # A kill while retention deleted shards leaves their mark, with or without the shards.
        for mark in sorted(self._own.glob(f"*/*{manifest.UNFINISHED}")):
            part = mark.with_name(mark.name.removesuffix(manifest.UNFINISHED))
            shutil.rmtree(part, ignore_errors=True)
            mark.unlink()
            lines.append(f"cleared away: {part}: was being deleted when its process was killed")
        for path in sorted(self._own.glob("*/*")):
            try:
                manifest.read(path)
            except Unreadable:
                continue  # told where it is restored
            except Damage as error:
                # A manifest that is damaged was finished once; without one the save was cut off,
                # and nothing here can be another program's.
                if (path / manifest.NAME).exists():
                    aside = self._move(path, f"damaged_{self._peers.number}")
                    lines.append(f"DAMAGED CHECKPOINT: {error}; put aside as {aside}")
                else:
                    shutil.rmtree(path)
                    lines.append(f"cleared away: {error}")
        for path in self._own.iterdir():
            if not any(path.iterdir()):
                path.rmdir()
        return self._of_all("local cleared", lines)

    def steps(self) -> list[int]:
        """List the whole steps, oldest first. Every process calls it at the same time."""
        own: dict[str, dict[str, str]] = {}
        unreadable = ""
        try:
            for path in self._own.iterdir():
                own[path.name] = {}
                for part in path.glob("of_*"):
                    if save := self._save_of(part):
                        own[path.name][part.name[3:]] = save
        except Unreadable as error:
            unreadable = f"{error}"
        found = self._peers.exchange("local steps", [own, unreadable])
        # Exchanged first, raised afterwards: a process that raised alone would leave the others
        # waiting.
        manifest.judge([([], each) for _, each in found])
        disks = [disk for disk, _ in found]
        self._holders, self._saves = {}, {}
        for name in set[str]().union(*disks):
            parts = [disk.get(name, {}) for disk in disks]
            for save in sorted({save for part in parts for save in part.values()}):
                holders = [_holding(parts, owner, save) for owner in range(self._peers.count)]
                if all(holders):  # of several whole ones the last
                    self._holders[int(name)] = holders
                    self._saves[int(name)] = save
        return sorted(self._holders)

    def present(self) -> list[int]:
        """List every step on any disk, whole or in part, oldest first. Every process calls it at
        the same time."""
        return sorted({*self._of_all("local present", self._on_disk())})

    def begin(self, step: int, parts: Mapping[str, Any]) -> Callable[[], None]:
        """Copy this process's shards off its devices; return a function that writes them. On a CPU
        nothing is copied: jax gives the next step other memory while they are referenced."""
        arrays = {
            f"{part}/{name}": array
            for part in ("state", "data")
            for name, array in parts[part].items()
        }
        for array in arrays.values():
            # All copies begin before the first is waited for.
            array.copy_to_host_async()
        shards = [
            (name, index, array.shape, data)
            for name, array in arrays.items()
            for index, data in _own_shards(array)
        ]
        return lambda: self._write(step, shards, dict(parts["meta"]))

    def finish(self, step: int, written: Callable[[], None], facts: Mapping[str, Any]) -> None:
        """Write the shards with checksums, then fetch the neighbours'. OSError where any process
        could not."""
        number, count = self._peers.number, self._peers.count
        part = self._part(step, number)
        failures: list[str] = []
        self._turn += 1
        more = {
            "layout": self._layout,
            "processes": count,
            "save": f"{self._began} {self._turn:06}",
        }
        try:
            written()
            manifest.write(part, manifest.checksums(part), {**facts, **more})
        except Exception as error:  # the others wait for the exchange
            failures.append(f"process {number}: {error}")
        # All processes come here whatever happened to them: a copy is fetched only where every one
        # has written.
        failures = self._of_all("local written", failures)
        if not failures:
            for back in range(1, self._copies + 1):
                # The processes before this one: with as many copies as processes a host has,
                # another host has one.
                owner = (number - back) % count
                try:
                    self._fetch(step, owner, owner)
                except (OSError, Damage) as error:
                    failures.append(f"no copy on process {number}: {error}")
            failures = self._of_all("local copied", failures)
        if failures:
            # In all processes: a step that lacks one's shards is nobody's.
            shutil.rmtree(self._own / f"{step}", ignore_errors=True)
            raise OSError("; ".join(failures))

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts in the manifest of this process's part of a step."""
        return manifest.read(self._part(step, self._peers.number))[0]

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Add facts to this process's part of a step."""
        manifest.note(self._part(step, self._peers.number), facts)

    def contents(self, step: int) -> Mapping[str, Any]:
        """Return a step's parts: "meta", and of "state" and "data" name -> jax.ShapeDtypeStruct."""
        index = self._index(step)
        parts: dict[str, Any] = {"meta": index["meta"], "state": {}, "data": {}}
        for entry in index["shards"]:
            part, _, name = entry["name"].partition("/")
            parts[part][name] = jax.ShapeDtypeStruct(
                tuple(entry["whole"]), jnp.dtype(entry["dtype"])
            )
        return parts

    def load(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load parts of a step: arrays as their shardings say, from this process's shards."""
        saved = self._index(step)
        path = self._part(step, self._peers.number) / SHARDS
        # Mapped, so that no more is read than the devices take; an empty file cannot be mapped.
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        shards = {(entry["name"], json.dumps(entry["index"])): entry for entry in saved["shards"]}

        def array(name: str, abstract: Any) -> jax.Array:
            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                # Found by its exact bounds: the mesh is that which wrote it (`layout`).
                entry = shards[name, json.dumps(_index(index, abstract.shape))]
                dtype, shape = jnp.dtype(entry["dtype"]), entry["shape"]
                size = int(np.prod(shape)) * dtype.itemsize
                return data[entry["offset"] :][:size].view(dtype).reshape(shape)

            return jax.make_array_from_callback(abstract.shape, abstract.sharding, piece)

        loaded: dict[str, Any] = {"meta": saved["meta"]}
        for part in wanted.keys() - {"meta"}:
            loaded[part] = {
                name: array(f"{part}/{name}", leaf) for name, leaf in wanted[part].items()
            }
        return loaded

    @contextlib.contextmanager
    def verify(self, step: int) -> Iterator[None]:
        """Check this process's shards against their checksums before the block reads them; fetch
        them from a peer where they are lost or damaged. Damage, the same in every process, where
        none are intact."""
        number = self._peers.number
        part = self._part(step, number)
        unreadable = ""
        try:
            damages = list(manifest.damages(part))
            # Intact, but of a save that not all hosts have.
            if not damages and self._save_of(part) != self._saves.get(step):
                damages = [f"{part}: belongs to another save"]
        except Unreadable as error:
            damages = [unreadable := f"{error}"]
        holders = self._holders[step][number] if step in self._holders else []
        for process in holders:
            if damages and process != number:
                try:
                    self._fetch(step, process, number)
                    damages, unreadable = [], ""
                except (OSError, Damage) as error:
                    damages.append(str(error))
        # Before any process reads: all go on with this step, or all with the next.
        manifest.judge(self._peers.exchange("local verified", [damages, unreadable]))
        yield

    def set_aside(self, step: int, name: str) -> Path:
        """Move a step out of the way, so that it no longer counts."""
        name = f"{name}_{self._peers.number}"
        if (self._own / f"{step}").exists():
            self._move(self._own / f"{step}", name)
        self._peers.barrier("local aside")
        return self._own.parent / name / f"{step}"

    def _move(self, path: Path, name: str) -> Path:
        to = self._own.parent / name / path.relative_to(self._own)
        shutil.rmtree(to, ignore_errors=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        return path.rename(to)

    def trim(self, chosen: Callable[[list[int]], list[int]]) -> None:
        """Delete the `chosen` ones of the whole steps, and all that is older than those that stay:
        parts, and steps of another mesh. Every process calls it at the same time."""
        steps = self.steps()
        gone = chosen(steps)
        # Parts of older steps whose other parts are lost would stay for ever.
        oldest = min({*steps} - {*gone}, default=0)
        for step in self._on_disk():
            if step in gone or step < oldest:
                for part in (self._own / f"{step}").glob("of_*"):
                    # Manifests first: a kill in between leaves no step that looks whole.
                    manifest.delete(part)
                shutil.rmtree(self._own / f"{step}", ignore_errors=True)

    def _on_disk(self) -> list[int]:
        return [int(path.name) for path in self._own.iterdir() if path.name.isdecimal()]

    def _of_all(self, topic: str, own: list[Any]) -> list[Any]:
        """Return the items of every process's list."""
        return [item for items in self._peers.exchange(topic, own) for item in items]

    def _part(self, step: int, owner: int) -> Path:
        return self._own / f"{step}" / f"of_{owner}"

    def _save_of(self, part: Path) -> str | None:
        """Return the name of the save that wrote these shards; later saves have greater names. None
        for another mesh or number of processes."""
        try:
            facts, _ = manifest.read(part)
        except Damage:
            return None
        if (facts.get("layout"), facts.get("processes")) != (self._layout, self._peers.count):
            return None
        return facts.get("save", "0")

    def _index(self, step: int) -> dict[str, Any]:
        return strict_json.read_object(self._part(step, self._peers.number) / INDEX)

    def _write(
        self,
        step: int,
        shards: list[tuple[str, Index, tuple[int, ...], np.ndarray]],
        meta: dict[str, Any],
    ) -> None:
        part = self._part(step, self._peers.number)
        entries: list[dict[str, Any]] = []
        offset = 0
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with (part / SHARDS).open("wb") as file:
            for name, index, whole, data in shards:
                # Aligned, so that views into the memory map are aligned arrays.
                offset += file.write(bytes(-offset % ALIGNED))
                entries.append(
                    {
                        "name": name,
                        "index": index,
                        "whole": whole,
                        "dtype": data.dtype.name,
                        "shape": data.shape,
                        "offset": offset,
                    }
                )
                file.write(np.ascontiguousarray(data).view(np.uint8).data)
                offset += data.nbytes
        (part / INDEX).write_text(json.dumps({"meta": meta, "shards": entries}))

    def _fetch(self, step: int, process: int, owner: int) -> None:
        """Copy the shards of `owner` from a process's disk to this one's and check them. OSError or
        Damage where that fails."""
        assert self._files
        part = self._part(step, owner)
        shutil.rmtree(part, ignore_errors=True)
        for name in (SHARDS, INDEX, manifest.NAME):  # the manifest last: with it the shards count
            with atomic.writing(part / name) as unfinished, unfinished.open("wb") as file:
                file.writelines(self._files.fetch(process, f"{step}/of_{owner}/{name}"))
        if damages := list(manifest.damages(part)):
            (part / manifest.NAME).unlink()
            raise Damage(f"the copy of process {process}: " + "; ".join(damages))


def _holding(parts: list[dict[str, str]], owner: int, save: str) -> list[int]:
    """List the processes whose disks hold the shards that `owner` wrote in a save."""
    return [process for process, part in enumerate(parts) if part.get(f"{owner}") == save]


def _own_shards(array: jax.Array) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield each different part of an array that this process's devices hold."""
    # Once for each part: several devices may hold copies.
    shards = {f"{shard.index}": shard for shard in array.addressable_shards}
    for shard in shards.values():
        yield _index(shard.index, array.shape), np.asarray(shard.data)


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return [[*part.indices(size)[:2]] for part, size in zip(index, shape, strict=True)]
