"""A model folder as it lies on disk: config.json and the tensors of its safetensors files. Nothing
in it is trusted, and nothing in it is run."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from maxstack.config import ConfigError, quoted, shortened
from maxstack.config.errors import DataError
from maxstack.data import hub
from maxstack.data.hub import GENERATION, INDEX, SINGLE
from maxstack.hf import limits
from maxstack.hf.quantized import unpacking
from maxstack.hf.safetensors_file import SafetensorsFile, check_name, read_json
from maxstack.hf.tensors import SMALL, Plain, Tensor

T = TypeVar("T")
UNSAFE = {
    ".bin": "pickled weights",
    ".pt": "pickled weights",
    ".pth": "pickled weights",
    ".ckpt": "pickled weights",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
    ".joblib": "a pickle",
    ".npy": "an array file that may hold a pickle",
    ".h5": "a Keras model, which may hold code",
    ".keras": "a Keras model, which may hold code",
    ".py": "code",
}
INSTEAD = (
    "maxstack reads safetensors and never runs what a folder brings. Use the safetensors "
    "version of the model (transformers writes it with "
    "save_pretrained), or, where the safetensors are there, delete the rest, or leave it "
    "aside with `maxstack import --ignore-unsafe`"
)
# A wrapper with vision or audio: what the language model is called inside, and what is left aside.
WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
OTHER_TOWERS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio|mm_projector)\."
)


class Folder:
    """What a folder, or a model of the hub by its name, holds, checked. ConfigError for a mistake
    of its user, DataError for damage.

    Of the hub, only files that are read are downloaded, safetensors only for `weights`, so what
    else its repository holds is left aside.
    """

    def __init__(self, path: str | Path, *, ignore_unsafe: bool = False, weights: bool = True):
        self.path = Path(path)
        if hub.named(path):
            self.path, ignore_unsafe = hub.snapshot(str(path), weights), True
        if not os.path.isdir(self.path):  # False, too, for what can be no path
            what = "is a file; give the folder of a model" if os.path.exists(path) else hub.NOWHERE
            raise ConfigError(f"{shortened(str(path), 200)}: {what}")
        outer = self._json("config.json")
        if not isinstance(outer, dict):
            raise DataError(f"{self.path / 'config.json'}: is no JSON object")
        if not ignore_unsafe:
            self._refuse_unsafe(outer)
        inner = outer.get("text_config")
        self.config: dict[str, Any] = _inner(outer, inner) if isinstance(inner, dict) else outer
        """config.json, of the language model where the folder holds more."""
        self.where = str(self.path / "config.json")
        said = self.config.pop("quantization_config", None) or outer.get("quantization_config")
        self._unpack = unpacking(said, self.where)
        self.quantized: str | None = said["quant_method"] if said else None
        """What the tensors are quantized by."""

    def raw(self) -> dict[str, "Plain"]:
        """Name -> tensor, as the files have them."""
        return {name: Plain(file, name) for file, name in self._files()}

    def tensors(self, body: str = "model.") -> dict[str, Tensor]:
        """Name -> tensor, under the names of the language model alone; `body` is put before the
        names of a file that holds the bare body."""
        found: dict[str, Tensor] = {name: Plain(file, name) for file, name in self._files()}
        if not found:
            raise DataError(f"{self.path}: its safetensors hold no tensor")
        return self._unpack(_own(found, body))

    def listed(self, body: str = "model.") -> Iterable[str] | None:
        """The names of the tensors that the index has, as `tensors` has them without reading any;
        None where there is no index."""
        shards = self.shards()
        return (
            _own({name: None for names in shards.values() for name in names}, body)
            if shards
            else None
        )

    def _files(self) -> Iterator[tuple[SafetensorsFile, str]]:
        index, shards = self.path / INDEX, self.shards()
        names = sorted(
            entry.name for entry in self.path.iterdir() if entry.name.endswith(".safetensors")
        )
        if not shards:
            if SINGLE not in names:
                only = f" (only {', '.join(names[:3])})" if names else ""
                raise ConfigError(f"{self.path}: has neither {SINGLE} nor {INDEX}{only}. {INSTEAD}")
            file = SafetensorsFile(self.file(SINGLE))
            yield from ((file, name) for name in file.entries)
            return
        if SINGLE in names and SINGLE not in shards:
            raise DataError(
                f"{index}: does not name {SINGLE}, which lies beside it; delete the one "
                "that is stale"
            )
        for shard, listed in sorted(shards.items()):
            file = SafetensorsFile(self.file(shard))
            if absent := sorted(listed - file.entries.keys()):
                raise DataError(
                    f"{index}: tensor {absent[0]}{_more(absent)} is said to be in "
                    f"{shard}, which does not hold it"
                )
            if unlisted := sorted(file.entries.keys() - listed):
                raise DataError(
                    f"{file.path}: tensor {unlisted[0]}{_more(unlisted)} is not listed "
                    f"in {INDEX} as being in this file"
                )
            yield from ((file, name) for name in file.entries)

    def shards(self) -> dict[str, set[str]]:
        """The tensors that the index says are in each file; nothing where there is no index."""
        index = self.path / INDEX
        if not os.path.lexists(index):
            return {}
        listed = self._json(INDEX)
        weights = listed.get("weight_map") if isinstance(listed, dict) else None
        if (
            not isinstance(weights, dict)
            or not weights
            or not all(isinstance(shard, str) for shard in weights.values())
        ):
            raise DataError(f"{index}: weight_map is not a mapping of tensors to files")
        shards: dict[str, set[str]] = {}
        for name, shard in weights.items():
            check_name(name, str(index))
            if (
                not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors", shard)
                or ".." in shard
            ):
                raise DataError(
                    f"{index}: tensor {name} is said to be in {quoted(shard)}, which is "
                    "no name of a safetensors file of this folder"
                )
            shards.setdefault(shard, set()).add(name)
        return shards

    def check_generation(self) -> None:
        """ConfigError where generation_config.json, which exports bring along, ends or begins
        texts with what is no id of the vocabulary; DataError where it is no JSON object."""
        path, vocab = self.path / GENERATION, self.config.get("vocab_size")
        if not os.path.lexists(path):
            return
        if not isinstance(said := self._json(GENERATION), dict):
            raise DataError(f"{path}: is no JSON object")
        if isinstance(vocab, int):
            limits.check_ids(said, ("bos_token_id", "eos_token_id"), vocab, str(path))

    def _json(self, name: str) -> Any:
        path = self.file(name)
        if path.stat().st_size > SMALL:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes; at most {SMALL:,} are read")
        return read_json(path.read_bytes(), str(path))

    def file(self, name: str) -> Path:
        """A file of the folder. A link must lead to another file of it, or to the blobs of the
        hub's cache that the folder is part of."""
        path = self.path / name
        if not os.path.lexists(path) and name == "config.json":
            raise ConfigError(f"{path}: no such file; give the folder of a model")
        if not path.is_file():
            leads = "is a link that leads nowhere" if path.is_symlink() else "is no file"
            raise DataError(f"{path}: {leads if os.path.lexists(path) else 'no such file'}")
        target, folder = path.resolve(), self.path.resolve()
        cache = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
        if target.parent not in (folder, cache):
            raise DataError(f"{path}: is a link that leads out of the folder, to {target}")
        return path

    def _refuse_unsafe(self, config: Mapping[str, Any]) -> None:
        found = [
            f"{entry.name} is {UNSAFE[entry.suffix]}"
            for entry in sorted(self.path.iterdir())
            if entry.suffix in UNSAFE
        ]
        if config.get("auto_map"):
            found.append("config.json asks to run code (auto_map)")
        if found:
            raise ConfigError(
                f"{self.path}: refused: {'; '.join(found[:4])}{_more(found, 4)}. {INSTEAD}"
            )


def _inner(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's config.json, told by its model_type, with what only the wrapper says."""
    both = (
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
    )
    said = {key: outer[key] for key in both if key in outer}
    return {**said, **inner, "architectures": inner.get("architectures") or []}


def _own(found: dict[str, T], body: str) -> dict[str, T]:
    """What belongs to the language model, under its own names."""
    for outer, inner in WRAPPERS:
        found = {
            inner + name.removeprefix(outer) if name.startswith(outer) else name: tensor
            for name, tensor in found.items()
        }
    found = {name: tensor for name, tensor in found.items() if not OTHER_TOWERS.match(name)}
    if any(name.startswith(body) for name in found):
        return found
    return {
        name if name.startswith(("lm_head.", "mtp.")) else body + name: tensor
        for name, tensor in found.items()
    }


def _more(found: list[str], shown: int = 1) -> str:
    return f" (and {len(found) - shown} more)" if len(found) > shown else ""
