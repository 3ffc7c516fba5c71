"""Loader of a package: a folder with the programs and weights of a trained model, and a manifest.

It needs jax, numpy, flatbuffers and safetensors, nothing else: copy it to wherever the model is to
run. A program is code; load packages of people whom you trust.

    model = Package("digits")
    model.signatures["classify"](images=images)["logits"]

    decoder, cache = Package("code"), decoder.state("cache")
    outputs, cache = decoder.signatures["prefill"](cache, tokens=..., positions=..., ...)
"""

import datetime
import hashlib
import json
import math
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

FORMAT = "maxstack.package/1"
LARGEST_MANIFEST = 64 << 20


class PackageError(ValueError):
    """A folder that is no package, or is damaged, or arguments that a signature does not take."""


class Package:
    """An opened package, its files checked by their hashes. PackageError where it is damaged, or
    not made for the devices at hand; a warning where the time for which jax promises to read its
    programs is over."""

    def __init__(self, folder: str | Path, devices: list[Any] | None = None, verify: bool = True):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if verify:
            for name in self.manifest["files"]:
                checked(self.folder, self.manifest, name)
        devices = jax.devices() if devices is None else devices
        mesh, here = self.manifest["mesh"] or {"devices": 1}, platform(devices[0])
        count = math.prod(mesh.values())
        if here not in self.manifest["platforms"]:
            made = ", ".join(self.manifest["platforms"])
            raise PackageError(f"{folder}: made for {made}; the devices here are {here}")
        if len(devices) < count:
            raise PackageError(f"{folder}: made for {count} devices; there are {len(devices)}")
        if outdated(self.manifest):
            warnings.warn(
                f"{folder}: good until {self.manifest['good_until']}; newer versions of jax may "
                "refuse it: make it again by `maxstack package` from the model it came from",
                stacklevel=2,
            )
        self.mesh = Mesh(np.array(devices[:count]).reshape(*mesh.values()), (*mesh,))
        self.signatures = {name: Signature(self, name) for name in self.manifest["signatures"]}
        self._weights: dict[str, Any] | None = None

    def weights(self, shardings: dict[str, Any]) -> dict[str, Any]:
        """The weights on the devices; read once."""
        if self._weights is None:
            self._weights = {}
            opened: dict[str, Any] = {}
            for name, spec in self.manifest["weights"].items():
                if spec["file"] not in opened:
                    path = path_of(self.folder, spec["file"])
                    opened[spec["file"]] = safe_open(path, "np")
                array, dtype = opened[spec["file"]].get_tensor(name), jnp.dtype(spec["dtype"])
                array = array if array.dtype == dtype else array.view(dtype)
                if list(array.shape) != spec["shape"]:
                    raise PackageError(f"{self.folder}/{spec['file']}: {name} is {array.shape}")
                self._weights[name] = jax.device_put(array, shardings[name])
        return self._weights

    def state(self, name: str) -> dict[str, Any]:
        """The arrays that the calls of some signatures read and replace, before the first call."""
        specs = self.manifest["states"][name]
        return {
            array: jnp.zeros(spec["shape"], jnp.dtype(spec["dtype"]))
            for array, spec in specs.items()
        }


class Signature:
    """A function of a package. Arguments are arrays by name; so are results."""

    def __init__(self, package: Package, name: str):
        self.package, self.name = package, name
        self.spec = package.manifest["signatures"][name]
        self._programs: dict[str, Any] = {}

    def __call__(self, state: dict[str, Any] | None = None, /, **inputs: Any) -> Any:
        """Results, numpy arrays by name; for a signature with a state, (results, the next state):
        the state that is given is used up. Batches and lengths for which there is no program are
        padded with zeros, and the results cut."""
        given, sizes = self.arrays(inputs)
        program = self.program(sizes)
        padded = {name: self._padded(name, array, program) for name, array in given.items()}
        call, places = self.loaded(program["file"])
        weights = self.package.weights(places[0])
        given = jax.device_put((state or {}, padded), (places[1], places[2]))
        results, after = call(weights, *given)
        whole = {
            name: np.asarray(array)[self._used(name, sizes)] for name, array in results.items()
        }
        return (whole, after) if self.spec["state"] else whole

    def arrays(self, inputs: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Arguments as arrays of their types, and the sizes of named dimensions. PackageError for
        wrong names, types or shapes."""
        wanted, where = self.spec["inputs"], f"{self.package.manifest['name']}.{self.name}"
        if inputs.keys() != wanted.keys():
            raise PackageError(f"{where}: takes {', '.join(wanted)}; not {', '.join(inputs)}")
        given, sizes = {}, {}
        for name, spec in wanted.items():
            array, dtype = np.asarray(inputs[name]), jnp.dtype(spec["dtype"])
            if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
                raise PackageError(f"{where}: {name} is {array.dtype}; it must be {dtype}")
            fits = array.ndim == len(spec["shape"])
            for dim, size in zip(spec["shape"], array.shape, strict=True) if fits else ():
                fits &= sizes.setdefault(dim, size) == size and (
                    isinstance(dim, str) or dim == size
                )
            if not fits:
                known = ", ".join(f"{key}={size}" for key, size in sizes.items() if key != size)
                raise PackageError(
                    f"{where}: {name} is {list(array.shape)}; it must be {spec['shape']} ({known})"
                )
            given[name] = array.astype(dtype)
        return given, {dim: size for dim, size in sizes.items() if isinstance(dim, str)}

    def program(self, sizes: dict[str, int]) -> dict[str, Any]:
        """The smallest program that takes these sizes."""
        fitting = [
            program
            for program in self.spec["programs"]
            if all(most is None or most >= sizes[dim] for dim, most in program["sizes"].items())
        ]
        if not fitting or not all(sizes.values()):
            there = "; ".join(str(program["sizes"]) for program in self.spec["programs"])
            raise PackageError(f"{self.name}: {sizes}: no program takes these sizes: {there}")
        return min(fitting, key=lambda program: [size or 0 for size in program["sizes"].values()])

    def _padded(self, name: str, array: np.ndarray, program: dict[str, Any]) -> np.ndarray:
        shape = self.spec["inputs"][name]["shape"]
        dims = zip(shape, array.shape, strict=True)
        return np.pad(array, [(0, (program["sizes"].get(dim) or n) - n) for dim, n in dims])

    def _used(self, name: str, sizes: dict[str, int]) -> tuple[slice, ...]:
        return tuple(slice(sizes.get(dim, dim)) for dim in self.spec["outputs"][name]["shape"])

    def loaded(self, file: str) -> tuple[Any, Any]:
        """The function of a program, and where its arguments lie, as trees of shardings."""
        if file not in self._programs:
            package = self.package
            data = checked(package.folder, package.manifest, file)
            try:
                exported = export.deserialize(bytearray(data))
                flat = exported.in_shardings_jax(package.mesh)
            except Exception as error:
                made = package.manifest["versions"]["jax"]
                raise PackageError(
                    f"{package.folder}/{file}: made by jax {made}; jax {jax.__version__} cannot "
                    f"read it: {error}; make it again by `maxstack package`"
                ) from error
            whole = NamedSharding(package.mesh, PartitionSpec())
            (places, _) = jax.tree.unflatten(exported.in_tree, [each or whole for each in flat])
            self._programs[file] = jax.jit(exported.call, donate_argnums=1), places
        return self._programs[file]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a package."""
    file = folder / "manifest.json"
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise PackageError(f"{file}: is larger than {LARGEST_MANIFEST:,} bytes")
        manifest = json.loads(file.read_bytes())
        if not str(manifest["format"]).startswith(FORMAT):
            raise PackageError(f"{file}: format {manifest['format']}; this loader reads {FORMAT}")
    except FileNotFoundError:
        raise PackageError(f"{folder}: is no package: it has no manifest.json") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"{file}: cannot be read: {error!r}") from error
    return manifest


def checked(folder: Path, manifest: dict[str, Any], name: str) -> bytes:
    """The bytes of a file of the manifest; PackageError where they are not those that were
    written."""
    path, said = path_of(folder, name), manifest["files"].get(name)
    if said is None:
        raise PackageError(f"{path}: is not among the files of manifest.json")
    if not path.is_file():
        raise PackageError(f"{path}: is missing")
    if (size := path.stat().st_size) != said["bytes"]:
        raise PackageError(f"{path}: is {size:,} bytes; manifest.json says {said['bytes']:,}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != said["sha256"]:
        raise PackageError(f"{path}: is damaged: its sha256 is not that of manifest.json")
    return data


def path_of(folder: Path, name: str) -> Path:
    """The path of a file of a package. PackageError for one that leads out of the folder."""
    pure = PurePosixPath(name)
    parts = [folder.joinpath(*pure.parts[: i + 1]) for i in range(len(pure.parts))]
    if pure.is_absolute() or {"..", ""} & {*pure.parts} or "\\" in name or not parts:
        raise PackageError(f"{folder}/manifest.json: {name!r} is no path inside the package")
    if any(part.is_symlink() for part in parts):
        raise PackageError(f"{parts[-1]}: is a symbolic link; a package holds its own files")
    return parts[-1]


def outdated(manifest: dict[str, Any]) -> bool:
    """True after the day to which jax promises to read the programs."""
    return datetime.date.fromisoformat(manifest["good_until"]) < datetime.date.today()


def platform(device: Any) -> str:
    """The name of a device's platform as jax.export has it."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
