"""Writer of a package's folder, whole or not at all: programs, weights, tokenizer, the loader,
manifest.json.

The manifest comes last, with the size and hash of every other file, so a folder that has one is
whole. A server that looks for new versions tries a folder only once its manifest is there.
"""

import datetime
import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from maxstack import config
from maxstack.data import hub
from maxstack.hf.writer import new_folder
from maxstack.inference.package_engine import CONFIG
from maxstack.kernels.backends import record_choices
from maxstack.package import loader
from maxstack.package.contents import Contents, Text
from maxstack.package.signature import Arrays, Program, Signature, programs
from maxstack.report.progress import progress

GOOD_FOR = datetime.timedelta(days=180)
"""For which newer versions of jax promise to read a program (jax.export, "Compatibility
guarantees")."""
SHARD = 2 << 30
"""Bytes of a file of weights at most, unless one weight is larger."""
AS_BYTES = ("float8", "int4", "uint4", "int2", "uint2", "float4", "float6")
"""Prefixes of types that safetensors' numpy reader does not know: stored as bytes."""


def write(
    out: Path,
    name: str,
    contents: Contents,
    signatures: Sequence[Signature],
    platforms: Sequence[str],
) -> dict[str, Any]:
    """Write the package `out` -> its manifest. ConfigError where `out` exists."""
    made = datetime.datetime.now(datetime.UTC)
    weights, state = _shapes(contents), contents.state
    with new_folder(out) as folder:
        (folder / "programs").mkdir()
        said = {}
        with (
            record_choices() as kernels,
            progress(len(signatures), "exporting", "signatures") as bar,
        ):
            for signature in signatures:
                done = [*programs(contents.run, signature, weights, state, platforms)]
                said[signature.name] = _signature(folder, signature, done)
                bar.update()
        stateful = any(signature.stateful for signature in signatures)
        manifest = {
            "format": loader.FORMAT,
            "name": name,
            "made": made.isoformat(timespec="seconds"),
            "good_until": (made + GOOD_FOR).date().isoformat(),
            "versions": {
                "maxstack": importlib.metadata.version("maxstack"),
                "jax": jax.__version__,
            },
            "platforms": [*platforms],
            "devices": contents.run.mesh.size,
            "mesh": dict(contents.run.mesh.shape) if contents.run.mesh.size > 1 else {},
            "signatures": said,
            "states": {"cache": {k: _array(x) for k, x in state.items()}} if stateful else {},
            "weights": _write_weights(folder / "weights", contents.weights),
            "kernels": sorted({str(choice).partition(":")[0] for choice in kernels}),
        }
        if stateful:
            manifest["cache"] = contents.cache
        if contents.text:
            manifest["text"] = _write_text(folder, contents.text)
            (folder / CONFIG).write_text(config.dump(contents.run.cfg), encoding="utf-8")
        # The loader goes with the package, so that it runs where maxstack is not installed.
        shutil.copyfile(loader.__file__, folder / "loader.py")
        # Read back from the disk: the hash is of what was written.
        manifest["files"] = dict(_files(folder))
        text = json.dumps(manifest, indent=1)
        (folder / "manifest.json").write_text(f"{text}\n", encoding="utf-8")
    return manifest


def _shapes(contents: Contents) -> Arrays:
    """Return the weights as shapes, with shardings on several devices."""
    # On one device a named sharding would ask the loader for a mesh of the same axes.
    several = contents.run.mesh.size > 1
    return {
        # Shapes are enough to export, so programs are written before any weight is copied to the
        # host.
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if several else None)
        for name, x in contents.weights.items()
    }


def _signature(folder: Path, signature: Signature, made: Sequence[Program]) -> dict[str, Any]:
    """Write the programs of a signature -> its entry in the manifest."""
    written = []
    for program in made:
        # Sizes in the name keep the programs of a signature apart.
        fixed = [f"{dim}{size}" for dim, size in program.sizes.items() if size is not None]
        file = f"programs/{'.'.join([signature.name, *fixed])}.bin"
        (folder / file).write_bytes(program.exported.serialize())
        written.append({"file": file, "sizes": dict(program.sizes)})
    # Types of results come from the export: a signature names their dimensions alone.
    results = jax.tree.unflatten(made[0].exported.out_tree, made[0].exported.out_avals)[0]
    return {
        "about": signature.about,
        "inputs": {
            name: {"shape": [*array.shape], "dtype": array.dtype}
            | ({"range": [*array.range]} if array.range else {})
            for name, array in signature.inputs.items()
        },
        "outputs": {
            name: {"shape": [*dims], "dtype": str(results[name].dtype)}
            for name, dims in signature.outputs.items()
        },
        "state": "cache" if signature.stateful else None,
        "programs": written,
    }


def _array(array: Any) -> dict[str, Any]:
    return {"shape": [*array.shape], "dtype": str(array.dtype)}


def _write_weights(folder: Path, weights: Arrays) -> dict[str, Any]:
    """Write the weights, in files of a limited size -> where each is."""
    folder.mkdir()
    said: dict[str, Any] = {}
    with progress(sum(x.size for x in weights.values()), "writing", "weights") as bar:
        for number, names in enumerate(_shards(weights), 1):
            file, some = f"weights/{number:05}.safetensors", {}
            for name in names:
                some[name] = _plain(np.asarray(weights[name]))
                said[name] = {"file": file, **_array(weights[name])}
                bar.update(weights[name].size)
            save_file(some, folder.parent / file)
    return said


def _shards(weights: Arrays) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, array in weights.items():
        # Files of 2 GiB at most: all weights of a file are in memory while it is written.
        if names and size + array.nbytes > SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    yield names


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the array in a type that safetensors' numpy reader knows, with the same bytes."""
    # safetensors writes the bytes of an array as they lie, so they must lie row by row.
    array = np.asarray(array, order="C")
    return array.view(np.uint8) if str(array.dtype).startswith(AS_BYTES) else array


def _write_text(folder: Path, text: Text) -> dict[str, Any]:
    """Copy the files of the tokenizer -> the manifest's entry about text."""
    section = text.tokenizer
    if section and (path := section.get("path")):
        own = folder / "tokenizer"
        own.mkdir()
        shutil.copyfile(hub.resolve_file(path), own / Path(path).name)
        section = section | {"path": f"tokenizer/{Path(path).name}"}
    template = text.template
    return {
        "tokenizer": section,
        "stop_tokens": sorted(text.stop_tokens),
        "template": template
        and {"sources": dict(template.sources), "tokens": dict(template.tokens)},
    }


def _files(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the size and hash of every file."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                # In pieces: a file of weights need not fit in memory.
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            name = path.relative_to(folder).as_posix()
            yield name, {"bytes": path.stat().st_size, "sha256": digest}
