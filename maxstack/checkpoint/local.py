"""A tier on each host's own disk: every process writes the shards it holds, and fetches copies of
its neighbours'.

HOST/STEP/of_Q are the shards that process Q held, one file and its index, with a manifest; HOST is
the process that wrote or fetched them. A step is whole where the disks together hold the shards of
every process, all of one save. It is read by as many processes on the same mesh as wrote it.
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

from maxstack.checkpoint import manifest
from maxstack.checkpoint.manifest import Damage
from maxstack.checkpoint.peer_files import Peers
from maxstack.cluster.peers import Processes

SHARDS, INDEX = "shards.bin", "index.json"
ALIGNED = 64
Index = list[list[int]]


class Local:
    """The steps on the disks of all hosts below `folder`, with `copies` of each process's shards on
    the disks of those after it."""

    def __init__(self, folder: Path, processes: Processes, copies: int, layout: str):
        self.folder, self._processes, self._layout = folder, processes, layout
        self._own = folder / f"host_{processes.number}"
        self._copies = min(copies, processes.count - 1)
        self._peers = Peers(self._own, processes) if processes.count > 1 else None
        self._holders: dict[int, list[list[int]]] = {}
        self._saves: dict[int, str] = {}
        self._turn, self._began = 0, processes.tell("local began", f"{time.time_ns():020}")[0]

    def clear(self) -> list[str]:
        """Remove what was never finished, and put aside what has a damaged manifest -> a line for
        each, of all processes."""
        found = []
        for path in sorted(self._own.glob("*/*")):
            try:
                manifest.read(path)
            except Damage as error:
                if (path / manifest.NAME).exists():
                    found.append(
                        f"DAMAGED CHECKPOINT: {error}; put aside as "
                        f"{self._move(path, f'damaged_{self._processes.number}')}"
                    )
                else:
                    shutil.rmtree(path)
                    found.append(f"cleared away: {error}")
        for path in self._own.iterdir():
            if not any(path.iterdir()):
                path.rmdir()
        return [line for lines in self._processes.tell("local cleared", found) for line in lines]

    def steps(self) -> list[int]:
        """The whole steps, oldest first. Every process asks at the same time."""
        here = {
            path.name: {
                part.name[3:]: save for part in path.glob("of_*") if (save := self._save_of(part))
            }
            for path in self._own.iterdir()
        }
        told = self._processes.tell("local steps", here)
        self._holders, self._saves = {}, {}
        for name in {name for one in told for name in one}:
            for save in sorted(
                {save for one in told for save in one.get(name, {}).values()}
            ):  # of several whole ones the last
                each = [
                    [j for j, one in enumerate(told) if one.get(name, {}).get(f"{q}") == save]
                    for q in range(self._processes.count)
                ]
                if all(each):
                    self._holders[int(name)], self._saves[int(name)] = each, save
        return sorted(self._holders)

    def there(self) -> list[int]:
        """Every step of which anything lies on any disk, whole or not, oldest first. Every process
        asks at the same time."""
        told = self._processes.tell(
            "local there", [int(path.name) for path in self._own.iterdir() if path.name.isdigit()]
        )
        return sorted({step for one in told for step in one})

    def begin(self, step: int, parts: Mapping[str, Any]) -> Callable[[], None]:
        """Copy this process's shards off its devices; what comes back writes them. On a CPU they
        are looked at where they are: jax gives the next step other memory while somebody looks."""
        arrays = {
            f"{part}/{name}": array
            for part in ("state", "data")
            for name, array in parts[part].items()
        }
        for array in arrays.values():
            array.copy_to_host_async()
        shards = [
            (name, index, array.shape, np.asarray(data))
            for name, array in arrays.items()
            for index, data in _own_shards(array)
        ]
        return lambda: self._write(step, shards, dict(parts["meta"]))

    def finish(self, step: int, written: Callable[[], None], facts: Mapping[str, Any]) -> None:
        """Write, with checksums; then fetch the neighbours'. OSError where any process could
        not."""
        each, wrong, self._turn = self._processes, "", self._turn + 1
        more = {
            "layout": self._layout,
            "processes": each.count,
            "save": f"{self._began} {self._turn:06}",
        }
        try:
            written()
            self._seal(self._part(step, each.number), {**facts, **more})
        except Exception as error:  # the others wait to hear of it
            wrong = f"process {each.number}: {error}"
        failures = [told for told in each.tell("local written", wrong) if told]
        if not failures:
            for back in range(1, self._copies + 1):
                try:
                    self._fetch(
                        step, (each.number - back) % each.count, (each.number - back) % each.count
                    )
                except (OSError, Damage) as error:
                    wrong = f"no copy on process {each.number}: {error}"
            failures = [told for told in each.tell("local copied", wrong) if told]
        if failures:
            shutil.rmtree(self._own / f"{step}", ignore_errors=True)
            raise OSError("; ".join(failures))

    def holds(self, step: int) -> Mapping[str, Any]:
        """Names of a step's parts; of the state, name -> what has a shape."""
        found = self._index(step)
        shapes = {
            entry["name"]: jax.ShapeDtypeStruct(tuple(entry["whole"]), jnp.dtype(entry["dtype"]))
            for entry in found["shards"]
        }
        return {"meta": found["meta"]} | {
            part: {
                name.partition("/")[2]: shape
                for name, shape in shapes.items()
                if name.startswith(f"{part}/")
            }
            for part in ("state", "data")
        }

    def load(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Parts of a step: arrays where their shardings put them, from this process's shards."""
        found, path = self._index(step), self._part(step, self._processes.number) / SHARDS
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        shards = {(entry["name"], json.dumps(entry["index"])): entry for entry in found["shards"]}

        def array(name: str, abstract: Any) -> jax.Array:
            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                entry = shards[name, json.dumps(_index(index, abstract.shape))]
                dtype, shape = jnp.dtype(entry["dtype"]), entry["shape"]
                return (
                    data[entry["offset"] :][: int(np.prod(shape)) * dtype.itemsize]
                    .view(dtype)
                    .reshape(shape)
                )

            return jax.make_array_from_callback(abstract.shape, abstract.sharding, piece)

        return {
            part: found["meta"]
            if part == "meta"
            else {name: array(f"{part}/{name}", leaf) for name, leaf in leaves.items()}
            for part, leaves in wanted.items()
        }

    @contextlib.contextmanager
    def verified(self, step: int) -> Iterator[None]:
        """Before the step is read inside, this process's shards are held against their checksums,
        and fetched from a peer where they are lost or damaged. Damage, the same in every process,
        where no intact ones are left."""
        each, part = self._processes, self._part(step, self._processes.number)
        found = list(manifest.damages(part)) or [f"{part}: is of another save"] * (
            self._save_of(part) != self._saves.get(step)
        )
        sources = [
            j for j in self._holders.get(step, [[]] * each.count)[each.number] if j != each.number
        ]
        while found and sources:
            try:
                self._fetch(step, sources[0], each.number)
                found = []
            except (OSError, Damage) as error:
                found.append(str(error))
            sources = sources[1:]
        if told := [line for one in each.tell("local verified", found) for line in one]:
            raise Damage("\n".join(told))
        yield

    def set_aside(self, step: int, name: str) -> Path:
        """Move a step out of the way, where it no longer counts."""
        name = f"{name}_{self._processes.number}"
        if (self._own / f"{step}").exists():
            self._move(self._own / f"{step}", name)
        self._processes.wait("local aside")
        return self._own.parent / name / f"{step}"

    def _move(self, path: Path, name: str) -> Path:
        to = self._own.parent / name / path.relative_to(self._own)
        shutil.rmtree(to, ignore_errors=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        return path.rename(to)

    def trim(self, chosen: Callable[[list[int]], list[int]]) -> None:
        """Delete those of the whole steps that are chosen, and whatever is older than all that
        stay: parts, and steps of another mesh. Every process does at the same time."""
        gone = chosen(steps := self.steps())
        oldest = min({*steps} - {*gone}, default=0)
        self.remove(
            [
                step
                for path in self._own.iterdir()
                if path.name.isdigit() and ((step := int(path.name)) in gone or step < oldest)
            ]
        )

    def remove(self, steps: list[int]) -> None:
        """Delete steps from this host's disk."""
        for step in steps:
            shutil.rmtree(self._own / f"{step}", ignore_errors=True)

    def _part(self, step: int, owner: int) -> Path:
        return self._own / f"{step}" / f"of_{owner}"

    def _save_of(self, part: Path) -> str | None:
        """Which save wrote these shards, if they are for this mesh and number of processes; later
        saves have greater names."""
        try:
            facts, _ = manifest.read(part)
        except Damage:
            return None
        return (
            facts.get("save", "0")
            if (facts.get("layout"), facts.get("processes"))
            == (self._layout, self._processes.count)
            else None
        )

    def _index(self, step: int) -> dict[str, Any]:
        return json.loads((self._part(step, self._processes.number) / INDEX).read_text())

    def _write(
        self,
        step: int,
        shards: list[tuple[str, Index, tuple[int, ...], np.ndarray]],
        meta: dict[str, Any],
    ) -> None:
        part, entries, offset = self._part(step, self._processes.number), [], 0
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with (part / SHARDS).open("wb") as file:
            for name, index, whole, data in shards:
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

    def _seal(self, part: Path, facts: Mapping[str, Any]) -> None:
        manifest.write(part, manifest.checksums(part, manifest.files(part)), facts)

    def _fetch(self, step: int, process: int, owner: int) -> None:
        """Copy the shards of `owner` from a process's disk to this one's, each file checked on the
        way. OSError or Damage where that fails."""
        assert self._peers
        part, there = self._part(step, owner), f"{step}/of_{owner}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        sealed = part / manifest.NAME
        unfinished = sealed.with_suffix(".fetched")
        for name in (manifest.NAME, SHARDS, INDEX):
            with (unfinished if name == manifest.NAME else part / name).open("wb") as file:
                for block in self._peers.fetch(process, f"{there}/{name}"):
                    file.write(block)
        unfinished.replace(sealed)
        if wrong := list(manifest.damages(part)):
            sealed.unlink()
            raise Damage(f"the copy of process {process}: " + "; ".join(wrong))


def _own_shards(array: jax.Array) -> Iterator[tuple[Index, np.ndarray]]:
    """Each different part of an array that this process's devices hold."""
    seen: set[str] = set()
    for shard in array.addressable_shards:
        index = _index(shard.index, array.shape)
        if (key := json.dumps(index)) not in seen:
            seen.add(key)
            yield index, np.asarray(shard.data)


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return [[*part.indices(size)[:2]] for part, size in zip(index, shape, strict=True)]
