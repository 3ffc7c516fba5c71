"""An adapter of PEFT merged into the tensors of a model folder, or taken out of them again, tensor
by tensor."""

import fnmatch
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxstack.config import ConfigError
from maxstack.hf.contents import FLOATS
from maxstack.hf.folder import Folder
from maxstack.hf.peft import Adapter
from maxstack.hf.tensors import Plain, check_finite
from maxstack.hf.writer import Shard, new_folder

TINY = 1e-12


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

    `done` is told the bytes of each tensor. ConfigError where the adapter is of another model;
    DataError where a tensor is, or becomes, NaN or infinite, if `finite`.
    """
    if sign < 0 and adapter.dora:
        raise ConfigError(
            f"{adapter.folder}: is DoRA, whose merging forgets the length of W's "
            "columns; keep the folder that it was merged into"
        )
    folder = Folder(source)
    files: dict[Path, dict[str, Plain]] = {}
    for name, tensor in folder.raw().items():
        files.setdefault(tensor.file, {})[name] = tensor
    dtypes = {
        name: tensor.dtype.name for tensors in files.values() for name, tensor in tensors.items()
    }
    if odd := sorted(
        f"{module}.weight"
        for module in adapter.modules
        if dtypes.get(f"{module}.weight") not in FLOATS
    ):
        more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        if folder.quantized:
            raise ConfigError(
                f"{source}: keeps {odd[0]}{more} quantized by {folder.quantized}, and an "
                "adapter is merged into floats; make them of "
                f"it first: maxstack import {source} --out RUN, maxstack export RUN --out FOLDER"
            )
        raise ConfigError(f"{adapter.folder}: is of another model: {source} has no {odd[0]}{more}")
    with new_folder(out) as made:
        for entry in sorted(folder.path.iterdir()):
            if entry.is_file() and not fnmatch.fnmatch(entry.name, "*.safetensors"):
                shutil.copyfile(entry, made / entry.name)
        for path, tensors in files.items():
            shard = Shard(
                made / path.name,
                {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
            )
            for name, tensor in tensors.items():
                values, module = tensor.array(None), name.removesuffix(".weight")
                if module in adapter.modules:
                    values = _merged(values, adapter, module, sign, folder.path)
                if finite:
                    check_finite(values, tensor.where)
                shard.array(name)[...] = values
                done(values.nbytes)
                tensor.forget()
                shard.forget()
            shard.close()
    return len(adapter.modules)


def _merged(
    values: np.ndarray, adapter: Adapter, module: str, sign: int, source: Path
) -> np.ndarray:
    change, lengths = adapter.change(module)
    change = change.T if adapter.inputs_first else change
    if change.shape != values.shape:
        raise ConfigError(
            f"{adapter.folder}: is of another model: its change of {module} is "
            f"{list(change.shape)}, and in {source} that is "
            f"{list(values.shape)}"
        )
    whole = values.astype(np.float32) + sign * change
    if lengths is not None:
        axis = 0 if adapter.inputs_first else 1
        factor = lengths / np.maximum(np.sqrt(np.square(whole).sum(axis=axis)), TINY)
        whole = whole * np.expand_dims(factor, axis)
    return whole.astype(values.dtype)
