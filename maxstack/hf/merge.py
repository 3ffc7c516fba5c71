"""An adapter of PEFT merged into the tensors of a model folder, or taken out of them again, tensor
by tensor."""

import shutil
from collections.abc import Callable
from pathlib import Path

from maxstack.errors import ConfigError
from maxstack.hf.contents import FLOATS
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import of_config
from maxstack.hf.folder import Folder, and_more
from maxstack.hf.peft import Adapter
from maxstack.hf.tensors import Plain, check_finite
from maxstack.hf.writer import Shard, new_folder


def merge(
    source: str | Path,
    adapter: Adapter,
    out: Path,
    sign: int,
    done: Callable[[int], object],
    finite: bool = True,
) -> int:
    """Write `out`, whole or not at all: the model folder with the adapter's change added, or with
    `sign` -1 subtracted; the number of tensors that changed.

    `done` is called with the bytes of each tensor. ConfigError where the adapter is of another
    model; DataError where a tensor is, or becomes, NaN or infinite, if `finite`.
    """
    if sign < 0 and adapter.dora:
        raise ConfigError(
            f"{adapter.folder}: is DoRA, whose merging forgets the length of W's "
            "columns; keep the folder that it was merged into"
        )
    folder = Folder(source)
    tensors = folder.raw()
    _check_modules(folder, tensors, adapter, source)
    rows = of_config(folder.config, FAMILIES, folder.where).rows
    turned = tuple(row.name.removeprefix("{layer}") for row in rows if row.inputs_first)
    files: dict[Path, dict[str, Plain]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file, {})[name] = tensor
    with new_folder(out) as made:
        for entry in sorted(folder.path.iterdir()):
            if entry.is_file() and not entry.name.endswith(".safetensors"):
                shutil.copyfile(entry, made / entry.name)
        for path, held in files.items():
            shard = Shard(
                made / path.name,
                {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()},
            )
            for name, tensor in held.items():
                values, module = tensor.array(), name.removesuffix(".weight")
                if module in adapter.modules:
                    first = name.endswith(turned)
                    adapter.check_sizes(module, first, values.shape, str(folder.path))
                    whole = adapter.merged(module, values, first, sign)
                    values = whole.astype(values.dtype)
                if finite:
                    check_finite(values, tensor.where)
                shard.arrays[name][...] = values
                done(values.nbytes)
                tensor.forget()
                shard.forget()
    return len(adapter.modules)


def _check_modules(
    folder: Folder, tensors: dict[str, Plain], adapter: Adapter, source: str | Path
) -> None:
    """ConfigError where the folder has no float weight for a module of the adapter."""
    floats = {name for name, tensor in tensors.items() if tensor.dtype.name in FLOATS}
    absent = sorted({f"{module}.weight" for module in adapter.modules} - floats)
    if not absent:
        adapter.check_whole(
            name.removesuffix(".weight")
            for name in sorted(floats)
            if name.endswith(".weight") and len(tensors[name].shape) == 2
        )
        return
    names = f"{absent[0]}{and_more(absent)}"
    if folder.quantized:
        raise ConfigError(
            f"{source}: keeps {names} quantized by {folder.quantized}, and an "
            "adapter is merged into floats; make them of "
            f"it first: maxstack import {source} --out RUN, maxstack export RUN --out FOLDER"
        )
    raise ConfigError(f"{adapter.folder}: is of another model: {source} has no {names}")
