"""An adapter of PEFT merged into the tensors of a model folder, or taken out of them again, tensor
by tensor."""

import shutil
from collections.abc import Callable
from pathlib import Path

from maxstack.data.hub import INDEX
from maxstack.data.json_files import read_object
from maxstack.errors import ConfigError
from maxstack.hf.contents import FLOATS, HEAD
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import of_config
from maxstack.hf.folder import Folder, and_more
from maxstack.hf.peft import Adapter
from maxstack.hf.tables import replaced
from maxstack.hf.tensors import Plain, check_finite
from maxstack.hf.writer import Shard, new_folder, write_json


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
    if sign < 0 and (adapter.dora or adapter.tables):
        what = "is DoRA, whose merging forgets the length of W's columns"
        if adapter.tables:
            what = f"replaces {min(adapter.tables)}, which merging forgets"
        raise ConfigError(f"{adapter.folder}: {what}; keep the folder that it was merged into")
    folder = Folder(source)
    tensors = folder.raw()
    family = of_config(folder.config, FAMILIES, folder.where)
    apart = HEAD.removesuffix(".weight") in adapter.modules
    if apart or adapter.tables:
        head = family.read(folder.config, folder.where).get("head") or {}
        apart &= bool(head.get("tied"))
        if head.get("tied") and not apart:
            tensors.pop(HEAD, None)  # a copy, which loaders do not read
    _check_modules(folder, tensors, adapter, source)
    rows = family.rows
    turned = tuple(row.name.removeprefix("{layer}") for row in rows if row.inputs_first)
    files: dict[Path, dict[str, Plain]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file, {})[name] = tensor
    embedding = next((row.name for row in rows if row.parts[0].path == "embed"), "")
    whole = replaced(adapter, tensors, embedding, str(folder.path))
    if HEAD in whole.keys() - tensors.keys():
        files[tensors[embedding].file][HEAD] = tensors[embedding]
    with new_folder(out) as made:
        for entry in sorted(folder.path.iterdir()):
            if entry.is_file() and not entry.name.endswith(".safetensors"):
                shutil.copyfile(entry, made / entry.name)
        for path, held in files.items():
            shard = Shard(
                made / path.name,
                {
                    name: (tensor.dtype, whole[name].shape if name in whole else tensor.shape)
                    for name, tensor in held.items()
                },
            )
            for name, tensor in held.items():
                values, module = tensor.array(), name.removesuffix(".weight")
                if name in whole:
                    values = whole[name].astype(values.dtype)
                if module in adapter.modules:
                    first = name.endswith(turned)
                    adapter.check_sizes(module, first, values.shape, str(folder.path))
                    merged = adapter.merged(module, values, first, sign)
                    values = merged.astype(values.dtype)
                if finite:
                    check_finite(values, tensor.where)
                shard.arrays[name][...] = values
                done(values.nbytes)
                tensor.forget()
                shard.forget()
        if apart or embedding in whole or HEAD in whole:
            table = whole.get(embedding, whole.get(HEAD, tensors[embedding]))
            _describe(made, table.shape[0], files, apart or HEAD in whole)
    return len(adapter.modules) + len(whole)


def _describe(folder: Path, vocab: int, files: dict[Path, dict[str, Plain]], head: bool) -> None:
    """Write a merged folder's size of the vocabulary, whether its head is its own, and the index,
    where they changed."""
    config = read_object(folder / "config.json")
    own = config.get("text_config", config)
    own["vocab_size"] = vocab
    if head:
        config["tie_word_embeddings"] = own["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)
    if (index := folder / INDEX.format("model")).exists():
        listed = {name: file.name for file, held in files.items() for name in held}
        write_json(index, read_object(index) | {"weight_map": listed})


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
