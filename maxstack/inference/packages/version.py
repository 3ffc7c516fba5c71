"""A version of a package that is served: its warmed signatures and their queues."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxstack.inference.packages.batching import Queue, Settings
from maxstack.inference.packages.metrics import SignatureMetrics
from maxstack.inference.packages.tensors import NAMES
from maxstack.inference.packages.worker import Worker
from maxstack.package.loader import Package, PackageError, path_of, read_manifest

LONGEST_NAME = 200
Stamp = tuple[tuple[str, int, int, int], ...]


class Version:
    """An opened package. PackageError, or any other error, for one that cannot be served."""

    def __init__(
        self,
        folder: Path,
        number: int,
        settings: Settings,
        metrics: Callable[[str, str], SignatureMetrics],
    ):
        self.folder, self.number = folder, number
        # Hashes of all files are checked here.
        self.package = Package(folder)
        self.name = _check_name(folder, self.package.manifest["name"])
        self.refused: dict[str, str] = {}
        """Signatures that cannot be served, and why."""
        self.queues: dict[str, Queue] = {}
        """Queues of signatures by their names in the API."""
        for name, signature in self.package.signatures.items():
            full = f"{self.name}.{_check_name(folder, name)}"
            if why := _not_served(signature.spec):
                self.refused[full] = why
                continue
            queue = Queue(signature, settings, metrics(full, str(number)))
            # The package's own name is its first signature.
            self.queues.setdefault(self.name, queue)
            self.queues[full] = queue
        if not self.queues:
            why = "; ".join(f"{name} {why}" for name, why in self.refused.items())
            raise PackageError(f"{folder}: has no signature that can be served: {why or 'none'}")
        self._uses = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def warm(self, worker: Worker) -> str:
        """Compile all programs in all allowed sizes -> what was done. Other packages answer
        meanwhile, unless this one runs on several devices."""
        began, count = time.monotonic(), 0
        # A program of several devices that starts beside another may wait for it for ever
        # (worker.py).
        alone = self.package.manifest["devices"] > 1
        for queue in dict.fromkeys(self.queues.values()):
            for sizes in queue.sizes():
                # Between programs: compiling takes seconds each, and a stop should not wait for
                # all.
                if worker.stopped:
                    raise PackageError(f"{self.folder}: the server ends")
                with worker.running if alone else contextlib.nullcontext():
                    queue.warm(sizes)
                count += 1
        took = time.monotonic() - began
        return f"{count} programs and sizes of batches compiled in {took:.1f} s"

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Count a request that this version answers. On the event loop."""
        self._uses += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    def metadata(self, name: str) -> dict[str, Any]:
        """Describe a signature as the protocol does."""
        spec = self.queues[name].signature.spec
        return {
            "name": name,
            "versions": [str(self.number)],
            "platform": "maxstack_package",
            "inputs": _tensors(spec["inputs"]),
            "outputs": _tensors(spec["outputs"]),
            "parameters": {
                "signature": self.queues[name].signature.name,
                "served": ",".join(self.queues),
                "not_served": ",".join(f"{name} {why}" for name, why in self.refused.items()),
            },
        }

    def config(self, name: str) -> dict[str, Any]:
        """Describe it as Triton's model configuration does, of which clients read the largest batch
        and the shapes without it."""
        queue = self.queues[name]
        spec, batched = queue.signature.spec, queue.batched
        programs = [program["sizes"] for program in spec["programs"]]
        largest = [sizes.get("batch") or max(queue.settings.sizes) for sizes in programs]

        def tensors(kind: str) -> list[dict[str, Any]]:
            return [
                {
                    "name": each["name"],
                    "data_type": f"TYPE_{each['datatype']}",
                    # Triton leaves the batch out of the shape where max_batch_size is above 0.
                    "dims": each["shape"][1:] if batched else each["shape"],
                }
                for each in _tensors(spec[kind])
            ]

        config: dict[str, Any] = {
            "name": name,
            "platform": "maxstack_package",
            "max_batch_size": max(largest) if batched else 0,
            "input": tensors("inputs"),
            "output": tensors("outputs"),
        }
        if batched:
            config["dynamic_batching"] = {
                "max_queue_delay_microseconds": round(queue.settings.timeout * 1e6),
                "default_queue_policy": {"max_queue_size": queue.settings.queue},
            }
        return config


def stamp(folder: Path) -> Stamp:
    """Return a value that changes with any file of a package."""
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            # The inode too: a file that was replaced within the clock's resolution may have the
            # same size.
            found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)


def check_sizes(folder: Path) -> None:
    """Raise PackageError for a file that is missing or of another size, before any is read: a copy
    may be under way."""
    for name, said in read_manifest(folder)["files"].items():
        path = path_of(folder, name)
        if not path.is_file():
            raise PackageError(f"{path}: is missing")
        if (size := path.stat().st_size) != said["bytes"]:
            raise PackageError(f"{path}: is {size:,} bytes; manifest.json says {said['bytes']:,}")


def _check_name(folder: Path, name: Any) -> str:
    """Return the name if it can stand in a URL; PackageError otherwise."""
    whole = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()
    if not whole or "/" in name or name != name.strip():
        raise PackageError(
            f"{folder}/manifest.json: names of packages and signatures have 1 to {LONGEST_NAME} "
            f"characters and no /: {json.dumps(name)[:LONGEST_NAME]}"
        )
    return name


def _not_served(spec: Mapping[str, Any]) -> str | None:
    """Return why the protocol cannot serve a signature; None where it can."""
    # The protocol has no place for arrays that calls replace.
    if spec["state"]:
        return "has a state, which the protocol has not"
    for kind in ("inputs", "outputs"):
        for name, each in spec[kind].items():
            if each["dtype"] not in NAMES:
                return f"has {each['dtype']} for {name}, which the protocol has not"
    return None


def _tensors(specs: Mapping[str, Any]) -> list[dict[str, Any]]:
    tensors = []
    for name, spec in specs.items():
        # The protocol writes -1 for a dimension of any size.
        shape = [-1 if isinstance(dim, str) else dim for dim in spec["shape"]]
        tensors.append({"name": name, "datatype": NAMES[spec["dtype"]], "shape": shape})
    return tensors
