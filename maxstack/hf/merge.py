"""An adapter of PEFT merged into a model folder, or subtracted from it again.

Tensors are read, changed and written one by one, each file to one of the same name, so that memory
does not depend on the size of the model; other files are copied. Embedding and head are made first,
because an adapter may replace either, and a head that differs from the embedding afterwards becomes
a tensor of its own.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxstack.data.hub import INDEX
from maxstack.errors import ConfigError
from maxstack.hf.adapter import Adapter
from maxstack.hf.contents import FLOATS
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import Family, of_config
from maxstack.hf.folder import Folder, and_more
from maxstack.hf.tensors import Plain, check_finite
from maxstack.hf.writer import Shard, new_folder, write_json
from maxstack.strict_json import read_object


def merge(
    source: str | Path,
    adapter: Adapter,
    out: Path,
    sign: int,
    done: Callable[[int], object],
    finite: bool = True,
) -> int:
    """Write `out`, whole or not at all: the model folder with the adapter's change added, or with
    `sign` -1 subtracted. Return the number of changed tensors.

    `done` is called with the bytes of each tensor. ConfigError where the adapter is of another
    model; DataError where a tensor is, or becomes, NaN or infinite, if `finite`.
    """
    if sign < 0 and (adapter.dora or adapter.has_tables):
        lost = "is DoRA, whose merging forgets the length of W's columns"
        if adapter.has_tables:
            lost = "replaces weights, and merging forgets what was there"
        raise ConfigError(f"{adapter.folder}: {lost}; keep the folder that it was merged into")
    folder = Folder(source)
    tensors = folder.raw()
    family = of_config(folder.config, FAMILIES, folder.where)
    tables, said = _tables(folder, tensors, adapter, family)
    # A head that becomes a tensor of its own goes into the file of the embedding.
    tensors = {name: tensors[next(iter(tables))] for name in tables} | tensors
    _check_modules(folder, tensors, adapter, source)
    # By the family's rows, not fan_in_fan_out, which peft writes as false for GPT-2 beside a head.
    turned = tuple(row.name.removeprefix("{layer}") for row in family.rows if row.inputs_first)
    size = 0
    # Shard by shard, so that the index stays valid.
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
                {name: (like.dtype, tables.get(name, like).shape) for name, like in held.items()},
            )
            for name, tensor in held.items():
                values = tables[name] if name in tables else tensor.array()
                module, where = name.removesuffix(".weight"), tensor.where
                if module in adapter.modules:
                    if finite:
                        check_finite(values, where)
                    # The folder's own numbers were checked above: what is not finite from here on
                    # is the adapter's.
                    where = f"{adapter.folder}: merged into {where}"
                    first = name.endswith(turned)
                    adapter.check_sizes(module, first, values.shape, str(folder.path))
                    # In float32, rounded once at the end.
                    whole = adapter.merged(module, values, first, sign)
                    values = whole.astype(values.dtype)
                if finite:
                    check_finite(values, where)
                shard.arrays[name][...] = values
                done(values.nbytes)
                size += values.nbytes
                tensor.forget()
                shard.forget()
        files_of = {name: tensor.file.name for name, tensor in tensors.items()}
        index = {"metadata": {"total_size": size}, "weight_map": files_of}
        # Only tables change sizes or names: otherwise config.json and the index stay as they came.
        for name, more in (("config.json", said), (INDEX.format(folder.stem), index)):
            if tables and (made / name).exists():
                write_json(made / name, read_object(made / name) | more)
    return len({f"{module}.weight" for module in adapter.modules} | tables.keys())


def _tables(
    folder: Folder, tensors: Mapping[str, Plain], adapter: Adapter, family: Family
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the merged embedding and head by tensor where the adapter changes either, and their
    keys of config.json: a head that no longer is the embedding becomes a tensor of its own."""
    names = {row.parts[0].path: row.name for row in family.rows if not row.copy}
    embed, head = (names.get(path, "").removesuffix(".weight") for path in ("embed", "head"))
    # A tied head with an adapter of its own is no longer the embedding.
    apart = head in adapter.modules
    whole = f"{embed}.weight" in tensors and not folder.has_parts
    if not adapter.has_tables and not (whole and apart):
        return {}, {}
    # Read by the family's table, since an absent key means tied in some families only.
    tied = bool((family.read(folder.config, folder.where).get("head") or {}).get("tied"))
    # A tied head may have no tensor, so its base is that of the embedding.
    bases = {embed: embed, head: embed if tied else head}
    tables = {
        module: adapter.table(module, base.array(), embed, tied and module == head)
        for module in (*bases, *adapter.tables)
        if whole
        and (base := tensors.get(f"{bases.get(module, module)}.weight"))
        and base.dtype.name in FLOATS
    }
    fit = {
        name
        for name, table in tables.items()
        if name in bases or table.shape == tensors[f"{name}.weight"].shape
    }
    if odd := sorted((adapter.tables | adapter.rows | {embed or "tables": 0}).keys() - fit):
        raise ConfigError(
            f"{adapter.folder}: is of another model: it holds {odd[0]}, and {folder.path}, as a "
            "language model, has no such weight of that size in floats"
        )
    sizes = {name: len(tables[name]) for name in bases if name in tables}
    if len({*sizes.values()}) > 1:
        rows = " and ".join(f"{size:,} of {name}" for name, size in sizes.items())
        raise ConfigError(
            f"{adapter.folder}: makes {rows} rows; save it again with save_embedding_layers=True"
        )
    # A head that is stored though it is tied follows the embedding unless the adapter changes it
    # alone.
    apart = tied and (apart or not np.array_equal(tables[embed], tables[head]))
    # A tied head that no file holds needs none afterwards.
    if not apart and f"{head}.weight" not in tensors:
        tables.pop(head, None)
    said = {"vocab_size": len(tables[embed])} | ({"tie_word_embeddings": False} if apart else {})
    return {f"{name}.weight": table for name, table in tables.items()}, said


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
