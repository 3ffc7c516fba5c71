"""A model folder understood: its family, its model's configuration and its tensors; without jax, so
that it is refused early."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from maxstack.config import ConfigError
from maxstack.config.errors import DataError
from maxstack.hf import limits
from maxstack.hf.binding import Bound
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import Family, of_config
from maxstack.hf.folder import Folder
from maxstack.hf.tensors import Tensor
from maxstack.schema.decoder import DecoderConfig

FLOATS = ("float64", "float32", "bfloat16", "float16")


class Contents:
    """What a folder, or a model of the hub by its name, means. ConfigError for a family or key that
    is not supported, DataError for damage.

    Without `weights` no tensor is read, or downloaded: `tensors` is empty, and config.json and the
    index are believed.
    """

    def __init__(self, path: str | Path, *, ignore_unsafe: bool = False, weights: bool = True):
        self.folder = Folder(path, ignore_unsafe=ignore_unsafe, weights=weights)
        self.family: Family = of_config(self.folder.config, FAMILIES, self.folder.where)
        limits.check(self.folder.config, self.folder.where)
        self.folder.check_generation()
        self.tensors = self.folder.tensors(self.family.body) if weights else {}
        names = self.tensors if weights else self.folder.listed(self.family.body)
        further = None if names is None else _further(self.family, self.folder.config, names)
        self.mapping = self.family.read(self.folder.config, self.folder.where, further)
        """The mapping of a DecoderConfig."""
        try:
            self.model = DecoderConfig.model_validate(self.mapping)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{self.folder.where}: describes no model: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
        if weights:
            _check_head(self)

    @property
    def dtype(self) -> str:
        """The dtype that most numbers of the folder have, as a config calls it; without weights,
        what config.json says."""
        said = self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "float32"
        sizes: dict[str, int] = {} if self.tensors else {str(said): 1}
        for tensor in self.tensors.values():
            sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + int(np.prod(tensor.shape))
        found = max(sizes, key=lambda name: sizes[name])
        return found if found in ("float32", "bfloat16", "float16") else "float32"


def check_tensors(contents: Contents, bound: Iterable[Bound]) -> None:
    """DataError with every tensor that is missing, unknown or not shaped as config.json says."""
    wanted = {tensor.name: tensor for tensor in bound}
    found, unused = contents.tensors, [re.compile(pattern) for pattern in contents.family.unused]
    missing = [name for name, tensor in wanted.items() if name not in found and not tensor.row.copy]
    unknown = [
        name
        for name in found
        if name not in wanted and not any(pattern.fullmatch(name) for pattern in unused)
    ]
    shapes = [
        f"{found[name].where} has shape {list(found[name].shape)}, and this model makes "
        f"it {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    kinds = [
        f"{found[name].where} has dtype {found[name].dtype.name}"
        for name in wanted
        if name in found and found[name].dtype.name not in FLOATS
    ]
    said = [*shapes[:5], *kinds[:5]]
    if missing:
        said.append(f"missing {_listed(missing)}")
    if unknown:
        said.append(f"unknown {_listed([found[name].where for name in unknown])}")
    if said:
        name = contents.family.architecture
        raise DataError(
            f"{contents.folder.path}: the tensors are not those of {name} that is "
            f"wanted: {'; '.join(said)}"
        )


def _check_head(contents: Contents) -> None:
    """A head that config.json says is the embedding table, or is not, must be what the tensors
    say."""
    head = next(
        (contents.tensors[name] for name in ("lm_head.weight",) if name in contents.tensors), None
    )
    tied, where = contents.model.head.tied, contents.folder.where
    if head is None and not tied:
        raise DataError(
            f"{where}: tie_word_embeddings is false, but no file holds lm_head.weight; "
            "if the head is the embedding table, set it "
            "to true"
        )
    if head is None or not tied:
        return
    name = next(
        row.name
        for row in contents.family.rows
        if any(part.path == "embed" for part in row.parts) and not row.copy
    )
    table = contents.tensors.get(name)
    if table is None or table.shape != head.shape or not _equal(table, head):
        raise DataError(
            f"{head.where}: differs from the embedding table, but {where} says "
            "tie_word_embeddings: true; set it to false, or remove "
            "the tensor"
        )
    del contents.tensors["lm_head.weight"]


def _equal(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Bit by bit, some rows at a time."""
    first, second = one.array(), other.array()
    for begin in range(0, len(first), rows):
        if not np.array_equal(
            first[begin : begin + rows].view(np.uint8), second[begin : begin + rows].view(np.uint8)
        ):
            return False
        one.forget()
        other.forget()
    return True


def _further(family: Family, config: dict[str, Any], tensors: Iterable[str]) -> int:
    """How many modules of multi-token prediction the tensors hold."""
    layers = config.get(family.layers.key)
    first = layers if family.further_after and isinstance(layers, int) else 0
    depth = 0
    while family.further and any(
        name.startswith(family.further.format(first + depth) + ".") for name in tensors
    ):
        depth += 1
    return depth


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
