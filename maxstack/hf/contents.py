"""The contents of a model folder: its family, its model's configuration and its tensors.

config.json names the family, whose tables make the model's configuration of it; the tensors of the
files must then be exactly those of that model. Opening reads names, dtypes and shapes, and numbers
only where a stored head must be compared with the embedding. Imports no jax, so that errors come
quickly.
"""

import collections
import functools
import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from maxstack.data import hub
from maxstack.errors import ConfigError, DataError
from maxstack.hf import config_checks
from maxstack.hf.binding import BoundTensor
from maxstack.hf.families import FAMILIES
from maxstack.hf.family import Family, of_config
from maxstack.hf.folder import Folder, and_more
from maxstack.hf.tensors import Tensor
from maxstack.schema.decoder import DecoderConfig
from maxstack.schema.stack import StackConfig

FLOATS = ("float64", "float32", "bfloat16", "float16")
VALUE = "value"
"""Path of the value head, which no folder holds."""
HEAD = "lm_head.weight"
ROWS_AT_ONCE = 4096


class Contents:
    """The contents of a folder at a path or URL, or of a model of the hub by name.

    ConfigError for a family or key that is not supported, DataError for damage.

    Without `weights` no tensor is read or downloaded: `tensors` is empty, and config.json and the
    index are believed.
    """

    def __init__(self, path: str | Path, *, weights: bool = True):
        self.folder = Folder(path, weights=weights)
        self.family: Family = of_config(self.folder.config, FAMILIES, self.folder.where)
        # First, since a size such as 1e300 would fail somewhere inside a table or a layer, without
        # its key.
        config_checks.check_numbers(self.folder.config, self.folder.where)
        self.folder.check_generation()
        self.tensors = self.folder.tensors(self.family.body) if weights else {}
        names = self.tensors if weights else self.folder.listed(self.family.body)
        # Counted, since num_nextn_predict_layers may promise modules that no file holds.
        depth = None if names is None else _mtp_depth(self.family, self.folder.config, names)
        self.mapping = self.family.read(self.folder.config, self.folder.where, depth)
        """The mapping of a DecoderConfig."""
        try:
            self.model: StackConfig = self.family.schema.model_validate(self.mapping)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{self.folder.where}: describes no model: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from None
        if weights:
            self._check_head()

    @property
    def dtype(self) -> str:
        """The dtype of most numbers of the folder, as a config names it; without weights, that of
        config.json."""
        said = self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "float32"
        # By the tensors: config.json may lack the key, and a folder may mix dtypes.
        sizes: collections.Counter[str] = collections.Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype.name] += math.prod(tensor.shape)
        most = max(sizes, key=sizes.__getitem__, default=said)
        return most if most in ("float32", "bfloat16", "float16") else "float32"

    def _check_head(self) -> None:
        """DataError where config.json and the tensors disagree on whether the head is the embedding
        table; a head that repeats the table is dropped."""
        if not isinstance(self.model, DecoderConfig) or self.model.scores:
            return
        # Some files store a tied head too, and reading it as a head of its own would untie it.
        head, tied = self.tensors.get(HEAD), self.model.head.tied
        if head is None and not tied:
            raise DataError(
                f"{self.folder.where}: tie_word_embeddings is false, but no file holds {HEAD}; if "
                "the head is the embedding table, set it to true"
            )
        if head is None or not tied:
            return
        own = [row for row in self.family.rows if not row.copy]
        name = next(row.name for row in own if row.parts[0].path == "embed")
        table = self.tensors.get(name)
        if table is None or table.shape != head.shape or not _equal(table, head):
            raise DataError(
                f"{head.where}: differs from the embedding table, but {self.folder.where} says "
                "tie_word_embeddings: true; set it to false, or remove the tensor"
            )
        del self.tensors[HEAD]


def open_contents(path: str | Path) -> Contents:
    """Return contents with weights; those of the last call if no file of the folder has changed
    since, so that a start of training opens each file once."""
    folder = hub.model_folder(str(path), weights=True)
    # A start opened config.json six times and each safetensors file three times. The object cannot
    # ride along in Config, which is copied, compared and pickled.
    return _unchanged(str(path), folder.absolute(), frozenset(file_states(folder).items()))


@functools.lru_cache(maxsize=1)
def _unchanged(path: str, *state: object) -> Contents:
    """Read a folder in this state."""
    return Contents(path)


def file_states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change (ns) of each file of a folder."""
    files = [entry for entry in folder.glob("*") if entry.is_file()]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def check_tensors(
    contents: Contents, bound: Iterable[BoundTensor], left: Collection[str] = ()
) -> None:
    """DataError with every tensor that is missing, unknown or not of the shape that config.json
    gives; those of the patterns `left` may be there."""
    wanted = {tensor.name: tensor for tensor in bound}
    patterns = (*contents.family.unused, *left)
    held = contents.tensors
    # "$." matches nothing.
    unused = re.compile("|".join([f"(?:{pattern})" for pattern in patterns]) or "$.")
    missing = [name for name, tensor in wanted.items() if name not in held and not tensor.row.copy]
    unknown = [
        tensor.where
        for name, tensor in held.items()
        if name not in wanted and not unused.fullmatch(name)
    ]
    pairs = [(held[name], tensor.shape) for name, tensor in wanted.items() if name in held]
    shapes = [
        f"{tensor.where} has shape {list(tensor.shape)}, and this model makes it {list(shape)}"
        for tensor, shape in pairs
        if tensor.shape != shape
    ]
    dtypes = [
        f"{tensor.where} has dtype {tensor.dtype.name}"
        for tensor, _ in pairs
        if tensor.dtype.name not in FLOATS
    ]
    # All faults in one error, found before any tensor is read.
    reasons = [*shapes[:5], *dtypes[:5]]
    if missing:
        reasons.append(f"missing {', '.join(missing[:5])}{and_more(missing, 5)}")
    if unknown:
        reasons.append(f"unknown {', '.join(unknown[:5])}{and_more(unknown, 5)}")
    if reasons:
        raise DataError(
            f"{contents.folder.named}: the tensors are not those of {contents.family.architecture} "
            f"that is wanted: {'; '.join(reasons)}"
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare bit by bit, some rows at a time, so that no table is in memory whole."""
    for begin in range(0, first.shape[0], ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        # As bytes: NaN equals itself, and -0 is not 0.
        one, other = (x.array()[rows].view(np.uint8) for x in (first, second))
        same = np.array_equal(one, other)
        first.forget()
        second.forget()
        if not same:
            return False
    return True


def _mtp_depth(family: Family, config: dict[str, Any], tensors: Iterable[str]) -> int:
    """Count the modules of multi-token prediction among the tensors."""
    if not family.further:
        return 0
    layers = config.get(family.layers.key)
    first = layers if family.further_after and isinstance(layers, int) else 0
    depth, names = 0, tuple(tensors)
    while [name for name in names if name.startswith(f"{family.further.format(first + depth)}.")]:
        depth += 1
    return depth
