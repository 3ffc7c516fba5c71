"""Loader of a package: a folder of programs, weights and a manifest. It needs jax, numpy,
flatbuffers and safetensors, nothing else: copy it to wherever the model is to run. A program is
code; load packages of people whom you trust.

    Package("digits").signatures["classify"](images=images)["logits"]

Opening checks every file's size and hash and the kind of devices. A call checks its arguments by
the manifest, picks the smallest program that takes their sizes, pads them with zeros, runs it and
cuts the results. Programs and weights are loaded when they are first needed.
"""

import datetime
import hashlib
import json
import re
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

FORMAT, LARGEST_MANIFEST = "maxstack.package/1", 64 << 20
CALLS = {
    *"shape_assertion Sharding SPMDFullToShardShape SPMDShardToFullShape ApproxTopK".split(),
    *"annotate_device_placement cu_threefry2x32_ffi hip_threefry2x32_ffi tpu_custom_call".split(),
    *"stablehlo.dynamic_top_k stablehlo.dynamic_approx_top_k".split(),
    *"stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator".split(),
}
"""Functions outside of StableHLO that a program may call: parts of the compiler, random bits, and
kernels that run on a TPU."""
KEYS = {*"name good_until versions platforms devices signatures states weights files".split()}


class PackageError(ValueError):
    """A folder that is no package, or is damaged, or arguments that a signature does not take."""


class Package:
    """An opened package. PackageError where a file is not as its hash says, or it is not for these
    devices; a warning after the day to which jax promises to read programs."""

    def __init__(self, folder: str | Path, devices: list[Any] | None = None):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        try:
            self._open(devices)
        except PackageError:
            raise
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            wrong = f"{folder}/manifest.json: does not describe a package: {error!r}"
            raise PackageError(wrong) from error

    def _open(self, devices: list[Any] | None) -> None:
        folder = self.folder
        read = {weight["file"] for weight in self.manifest["weights"].values()}
        # Also files that only the weights name: they would be read without a hash.
        for name in read | {*self.manifest["files"]}:
            checked(self.folder, self.manifest, name)
        devices = jax.devices() if devices is None else devices
        count, version = self.manifest["devices"], devices[0].client.platform_version.lower()
        # jax calls CUDA and ROCm "gpu"; exported programs are for one of them.
        here = "rocm" if "rocm" in version else devices[0].platform.replace("gpu", "cuda")
        if here not in (platforms := self.manifest["platforms"]) or len(devices) < count:
            there = f"there are {len(devices)} of {here}"
            raise PackageError(f"{folder}: made for {count} of {', '.join(platforms)}; {there}")
        if (until := self.manifest["good_until"]) < datetime.date.today().isoformat():
            told = f"{folder}: good until {until}: make it again by `maxstack package`"
            warnings.warn(told, stacklevel=2)
        # Programs of one device have no named sharding: jax would ask any loader for a mesh of the
        # same axes.
        axes = self.manifest.get("mesh") or {"devices": 1}
        self.mesh = Mesh(np.array(devices[:count]).reshape(*axes.values()), (*axes,))
        self.signatures = {name: Signature(self, name) for name in self.manifest["signatures"]}
        self._weights: dict[str, Any] = {}

    def weights(self, shardings: dict[str, Any]) -> dict[str, Any]:
        """Return the weights on the devices; they are read once."""
        read: dict[str, Any] = {}
        for name, spec in () if self._weights else self.manifest["weights"].items():
            path, dtype = path_of(self.folder, spec["file"]), jnp.dtype(spec["dtype"])
            try:
                array = safe_open(path, "np").get_tensor(name)
                # Types that safetensors' numpy reader does not know are stored as bytes.
                array = array if array.dtype == dtype else array.view(dtype)
                if [*array.shape] != spec["shape"]:
                    raise ValueError(f"its shape is {array.shape}")
            except Exception as error:
                raise PackageError(f"{path}: {name} cannot be read: {error}") from error
            read[name] = jax.device_put(array, shardings[name])
        # All of them or none: after an error the next call tries again.
        self._weights |= read
        return self._weights

    def state(self, name: str = "cache") -> dict[str, Any]:
        """Return the arrays that calls of some signatures read and replace, as before the first
        call."""
        specs = self.manifest["states"][name]
        return {key: jnp.zeros(specs[key]["shape"], specs[key]["dtype"]) for key in specs}

    def tables(self) -> dict[str, np.ndarray]:
        """Return page tables for requests 1, 2, and so on, each with pages of its own; windows of
        attention use theirs in turn. Page 0 and request 0 stay unused."""
        sizes = self.manifest["cache"]
        row, page = np.ogrid[: sizes["slots"], : sizes["width"]]
        real = (row > 0) & (row <= sizes["requests"])
        # A group with a window has fewer pages for a request than its text; they are used in turn.
        most = [count // sizes["requests"] for count in sizes["pages"]]
        tables = [np.where(real, 1 + (row - 1) * each + page % each, 0) for each in most]
        return {f"tables.{group}": table for group, table in enumerate(tables)}


class Signature:
    """A function of a package. Arguments are arrays by name; so are results."""

    def __init__(self, package: Package, name: str):
        self.package, self.name = package, name
        self.spec = package.manifest["signatures"][name]
        self._programs: dict[str, Any] = {}

    def __call__(self, state: dict[str, Any] | None = None, /, **inputs: Any) -> Any:
        """Return the results, numpy arrays by name; of a signature with a state (results, next
        state). The given state is used up. Batches and lengths without a program of their own are
        padded with zeros, and the results cut."""
        return self.compute(*self.arrays(inputs), state)

    def compute(
        self, arrays: dict[str, Any], sizes: dict[str, int], state: dict[str, Any] | None = None
    ) -> Any:
        """Compute a call from what `arrays` returns."""
        program = self.program(sizes)
        call, (weights, states, places) = self.loaded(program["file"])
        padded = dict[str, Any]()
        for name, array in arrays.items():
            dims = zip(self.spec["inputs"][name]["shape"], array.shape, strict=True)
            pads = [(0, (program["sizes"].get(dim) or size) - size) for dim, size in dims]
            padded[name] = np.pad(array, pads) if pads else array
        own, given = jax.device_put((state or {}, padded), (states, places))
        results, after = call(self.package.weights(weights), own, given)
        used = {}
        for name, spec in self.spec["outputs"].items():
            real = tuple(slice(sizes.get(dim, dim)) for dim in spec["shape"])
            used[name] = np.asarray(results[name])[real]
        return (used, after) if self.spec["state"] else used

    def lower(self, sizes: dict[str, int]) -> Any:
        """Lower the program that takes these sizes; calls of such sizes need no other, once it is
        compiled."""
        program, manifest = self.program(sizes), self.package.manifest
        call, places = self.loaded(program["file"])
        padded = {dim: most or sizes[dim] for dim, most in program["sizes"].items()}
        states = manifest["states"].get(self.spec["state"], {})
        shapes: list[dict[str, Any]] = []
        for specs, there in zip(
            (manifest["weights"], states, self.spec["inputs"]), places, strict=True
        ):
            own = {}
            for name, spec in specs.items():
                shape = tuple(padded.get(dim, dim) for dim in spec["shape"])
                dtype, place = jnp.dtype(spec["dtype"]), there[name]
                own[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
            shapes.append(own)
        return call.lower(*shapes)

    def arrays(self, inputs: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Return arguments as arrays of their types, and the sizes of named dimensions.
        PackageError for wrong names, types or shapes, and for values beyond a range of the
        manifest."""
        wanted, where = self.spec["inputs"], f"{self.package.manifest['name']}.{self.name}"
        if odd := [name for name in {**wanted, **inputs} if (name in wanted) != (name in inputs)]:
            word = "is missing" if odd[0] in wanted else "is unknown"
            raise PackageError(f"{where}: {odd[0]} {word}; it takes {', '.join(wanted)}")
        given, sizes = dict[str, Any](), dict[str, int]()
        for name, spec in wanted.items():
            array, dtype = np.asarray(inputs[name]), jnp.dtype(spec["dtype"])
            given[name] = array.astype(dtype)
            # Integers may be given in any integer type, such as Python's int64, if no value
            # changes.
            same = np.can_cast(array.dtype, dtype, "same_kind")
            if not (np.array_equal(given[name], array) if array.dtype.kind in "iu" else same):
                raise PackageError(f"{where}: {name} is {array.dtype}; it must be {dtype}")
            dims = [*zip(spec["shape"], array.shape, strict=False)]
            # A named dimension has one size in all arguments: the first that has it decides.
            known = {dim: sizes.setdefault(dim, n) for dim, n in dims if isinstance(dim, str)}
            if [*array.shape] != [known.get(dim, dim) for dim in spec["shape"]]:
                shape, must = [*array.shape], spec["shape"]
                raise PackageError(f"{where}: {name} is {shape}; it must be {must} ({known})")
        for name, array in given.items():
            # An index out of range is no error in XLA: the answer would be wrong without a word.
            low, high = wanted[name].get("range", (None, None))
            high = sizes.get(high, high)
            if low is None or not array.size:
                continue
            wrong = ~((array >= low) & ((array <= high) if high is not None else True))
            if wrong.any():
                beyond = f"from {low} to {high}" if high is not None else f"at least {low}"
                raise PackageError(f"{where}: {name} holds {array[wrong][0]}; it must be {beyond}")
        return given, sizes

    def program(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Return the smallest program that takes these sizes. PackageError where there is none."""
        fitting = []
        for program in self.spec["programs"]:
            if all(most is None or most >= sizes[dim] for dim, most in program["sizes"].items()):
                fitting.append(program)
        # Empty arrays would be padded to a text of nothing.
        if not fitting or not all(sizes.values()):
            there = "; ".join(str(program["sizes"]) for program in self.spec["programs"])
            raise PackageError(f"{self.name}: {sizes}: no program takes these sizes: {there}")
        return min(fitting, key=lambda program: [size or 0 for size in program["sizes"].values()])

    def loaded(self, file: str) -> tuple[Any, Any]:
        """Return the function of a program, and the shardings of its arguments."""
        if file not in self._programs:
            package, data = self.package, checked(self.package.folder, self.package.manifest, file)
            try:
                exported = export.deserialize(bytearray(data))
                flat = exported.in_shardings_jax(package.mesh)
            except Exception as error:
                made = f"{package.manifest['versions']}; jax {jax.__version__} cannot read it"
                raise PackageError(f"{package.folder}/{file}: made by {made}: {error}") from error
            # Before compiling, so that nothing of a refused program is used.
            check_calls(f"{package.folder}/{file}", data, exported)
            whole = NamedSharding(package.mesh, PartitionSpec())
            places, _ = jax.tree.unflatten(exported.in_tree, [each or whole for each in flat])
            # The state is donated: a cache is large, and its next value takes its place.
            self._programs[file] = jax.jit(exported.call, donate_argnums=1), places
        return self._programs[file]


def check_calls(where: str, data: bytes, exported: Any) -> None:
    """Raise PackageError for a program that calls functions of its host, by which it could do
    anything. Bytecode holds the names of operations in plain text."""
    # Few programs have any (6 of 66 tried), and only these are printed as text.
    if b"custom_call" in data:
        text = exported.mlir_module()
        called = {*re.findall(r'custom_call @"?([^\s"(]+)', text)}
        # A call that is printed in another form must not pass unseen.
        if len(re.findall(r"\bcustom_call @", text)) < text.count("custom_call"):
            called.add("what is not named")
        if odd := sorted(called - CALLS):
            raise PackageError(f"{where}: calls {', '.join(odd)} of its host, as no package does")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a package."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise PackageError(f"{folder}: is no package: it has no manifest.json")
    if file.stat().st_size > LARGEST_MANIFEST:
        raise PackageError(f"{file}: is larger than {LARGEST_MANIFEST:,} bytes")
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        if manifest["format"] == FORMAT and manifest.keys() >= KEYS:
            return manifest
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise PackageError(f"{file}: cannot be read: {error!r}") from error
    raise PackageError(f"{file}: format {manifest['format']}; {FORMAT} has {KEYS}")


def checked(folder: Path, manifest: dict[str, Any], name: str) -> bytes:
    """Return the bytes of a file of the manifest; PackageError where their size or hash differs."""
    path, said = path_of(folder, name), manifest["files"].get(name)
    if said is None or not path.is_file():
        raise PackageError(f"{path}: is {'missing' if said else 'not in manifest.json'}")
    if (size := path.stat().st_size) != said["bytes"]:
        raise PackageError(f"{path}: is {size:,} bytes; manifest.json says {said['bytes']:,}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != said["sha256"]:
        raise PackageError(f"{path}: is damaged: its sha256 is not that of manifest.json")
    return data


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a file of a package. PackageError for one that leads out of the folder."""
    pure = PurePosixPath(name)
    parts = [folder.joinpath(*pure.parts[: i + 1]) for i in range(len(pure.parts))]
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not parts:
        raise PackageError(f"{folder}/manifest.json: {name!r} is no path inside the package")
    # Each part of the path: a linked folder leads out as well.
    if any(part.is_symlink() for part in parts):
        raise PackageError(f"{parts[-1]}: is a symbolic link; a package holds its own files")
    return parts[-1]
