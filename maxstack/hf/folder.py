"""A model folder on disk: config.json and the tensors of its safetensors files. Nothing in it is
trusted, and nothing in it is run.

A folder of a model of pictures or sound holds its language model under another key of config.json
and another beginning of tensor names; both are found here, and other parts are passed over. Tensors
come from one file, or from shards that an index names; the index and the files must agree exactly,
since a stale one beside new weights would give a mixture of two models.
"""

import collections
import functools
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from maxstack.data import hub
from maxstack.data.gguf.folder import LINK, is_gguf
from maxstack.data.hub import GENERATION, INDEX, SINGLE
from maxstack.errors import ConfigError, DataError, quoted, shortened
from maxstack.hf import config_checks
from maxstack.hf.gguf_tensors import read_tensors
from maxstack.hf.quantization_config import unpacking
from maxstack.hf.safetensors_file import SafetensorsFile, check_name
from maxstack.hf.tensors import Plain, Tensor
from maxstack.strict_json import read_object

T = TypeVar("T")
log = logging.getLogger(__name__)
CLASS_NAME = "_class_name"
"""Key of diffusers' config.json with a class name."""
UNSAFE = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "pickled weights"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "a pickle"),
    ".npy": "an array file that may hold a pickle",
    **dict.fromkeys((".h5", ".keras"), "a Keras model, which may hold code"),
    ".py": "code",
}
INSTEAD = (
    "maxstack reads safetensors and never runs what a folder brings. Use the safetensors version "
    "of the model (transformers writes it with save_pretrained)"
)
TEXT = "text_config", "language_config", "llm_config", "thinker_config"
"""Keys of config.json with the language model of a larger model."""
WITHIN = (
    *("model.language_model.", "language_model.model.", "model.text_model.", "text_model.model."),
    *("language.model.", "llm.model.", "thinker.model.", "language_model.", "text_model."),
)
"""Beginnings of its tensor names in place of `model.`."""
TOWERS = {"siglip": "vision_config"}
"""model_type of models of pictures and texts -> key of the part to read."""
OF_ALL = "lm_head.", "score.", "mtp.", "classifier."
"""Beginnings of tensor names outside of the body."""
OTHER_TOWERS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio|mm_projector)\."
)
OF_WRAPPER = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
)
"""Keys that may be outside of text_config."""


class Folder:
    """A folder at a path or URL, a GGUF file, or a model of the hub by name, checked. ConfigError
    for a mistake of its user, DataError for damage.

    From the hub or a URL only files that are read are downloaded, safetensors only with `weights`;
    pickles and code beside them are neither read nor run.
    """

    def __init__(self, path: str | Path, *, weights: bool = True):
        self.path = hub.model_folder(str(path), weights)
        if not os.path.isdir(self.path):  # False, too, for what can be no path
            what = (
                "is a file; give a model's folder or .gguf" if os.path.exists(path) else hub.NOWHERE
            )
            raise ConfigError(f"{shortened(str(path), 200)}: {what}")
        outer = read_object(self.file("config.json"))
        self.config: dict[str, Any] = outer
        """config.json; of a larger model, that of its language model."""
        self.has_parts = False
        """True where the folder holds more than a language model."""
        # A loop, since wrappers are nested: thinker_config holds text_config.
        parts = [TOWERS[kind]] if (kind := outer.get("model_type")) in TOWERS else TEXT
        while inner := next((key for key in parts if isinstance(self.config.get(key), dict)), None):
            shared = {key: self.config[key] for key in OF_WRAPPER if key in self.config}
            own = self.config[inner]
            self.config = shared | own | {"architectures": own.get("architectures") or []}
            self.has_parts = True
        self._is_gguf = is_gguf(path)
        self.named = str(path) if self._is_gguf else str(self.path)
        """What messages call it: a GGUF file by its own name."""
        self.where = self.named if self._is_gguf else str(self.path / "config.json")
        self.stem = hub.DIFFUSERS if CLASS_NAME in outer else hub.MODEL
        """Beginning of the names of weight files."""
        # Popped, since it is no key of a family's table.
        method = self.config.pop("quantization_config", None) or outer.get("quantization_config")
        self._unpack = unpacking(method, self.where)
        self.quantized: str | None = method["quant_method"] if method else None
        """Method by which the tensors are quantized."""

    def raw(self) -> dict[str, Plain]:
        """Return the tensors of the files by name."""
        index, shards = self.path / self._index, self.shards()
        single = SINGLE.format(self.stem)
        names = sorted(
            entry.name for entry in self.path.iterdir() if entry.name.endswith(".safetensors")
        )
        if self._is_gguf:
            raise ConfigError(
                f"{self.named}: this needs a folder of safetensors; make one of it by `maxstack "
                "import` and `maxstack export`"
            )
        if not shards and single not in names:
            # Named only where there is nothing else: training leaves optimizer states beside
            # safetensors.
            unsafe = [
                f"{entry.relative_to(self.path)}, which is {UNSAFE[entry.suffix.lower()]}"
                for entry in sorted([*self.path.glob("*"), *self.path.glob("*/*")])
                if entry.suffix.lower() in UNSAFE
            ]
            found = [*names, *unsafe]
            only = f" (only {'; '.join(found[:3])}{and_more(found, 3)})" if found else ""
            raise ConfigError(
                f"{self.path}: has neither {single} nor {self._index}{only}. {INSTEAD}"
            )
        if shards and single in names and single not in shards:
            raise DataError(
                f"{index}: does not name {single}, which lies beside it; delete the one "
                "that is stale"
            )
        tensors: dict[str, Plain] = {}
        for shard in sorted(shards) or [single]:
            file = SafetensorsFile(self.file(shard))
            held = file.entries.keys()
            listed = shards.get(shard, held)
            # A shard of another version, or an index that lies.
            if absent := sorted(listed - held):
                raise DataError(
                    f"{index}: tensor {absent[0]}{and_more(absent)} is said to be in "
                    f"{shard}, which does not hold it"
                )
            if unlisted := sorted(held - listed):
                raise DataError(
                    f"{file.path}: tensor {unlisted[0]}{and_more(unlisted)} is not listed "
                    f"in {self._index} as being in this file"
                )
            tensors |= {name: Plain(file, name) for name in held}
        return tensors

    def tensors(self, body: str = "model.") -> dict[str, Tensor]:
        """Return the language model's tensors by the names that it has alone; names of a file that
        holds the bare body get `body` in front."""
        if self._is_gguf:
            return read_tensors(self.path / LINK, self.config)
        tensors: dict[str, Tensor] = {**self.raw()}
        if not tensors:
            raise DataError(f"{self.path}: its safetensors hold no tensor")
        return self._unpack(self._of_language_model(tensors, body))

    def listed(self, body: str = "model.") -> Iterable[str] | None:
        """Return the tensor names of the index, as in `tensors`; None without an index."""
        names = {name: None for listed in self.shards().values() for name in listed}
        return self._of_language_model(names, body) if names else None

    def _of_language_model(self, tensors: dict[str, T], body: str) -> dict[str, T]:
        """Select the language model's tensors, under its own names, with a warning of other parts;
        all tensors for a family that is such a part."""
        # Told by the embedding, the one tensor that every language model has.
        within = next((begin for begin in WITHIN if f"{begin}embed_tokens.weight" in tensors), "")
        # Where the body is X.model., the head is X.lm_head.
        outside = within.removesuffix("model.") if within.endswith(".model.") else ""
        tower = OTHER_TOWERS.match(body)
        found, left = dict[str, T](), list[str]()
        for name, tensor in tensors.items():
            own = name.removeprefix(outside)
            if within and name.startswith(within):
                own = f"model.{name.removeprefix(within)}"
            # A wrapper's tensors outside of its language model, except for the head.
            elif within and not own.startswith(OF_ALL):
                left.append(name)
                continue
            # The family is itself a tower, so the language model is the other part.
            elif self.has_parts and tower and not name.startswith(body):
                left.append(name)
                continue
            # Wrappers that keep the names of the language model as they are (qwen2_5_vl).
            elif OTHER_TOWERS.match(name) and not tower:
                left.append(name)
                continue
            found[own] = tensor
        if left:
            parts = collections.Counter(name.removeprefix("model.").split(".")[0] for name in left)
            said = ", ".join(f"{part} ({count})" for part, count in sorted(parts.items()))
            _warn(self.where, "tower of pictures" if tower else "language model", said)
        # Files of the bare body (AutoModel) lack its prefix.
        if any(name.startswith(body) for name in found):
            return found
        return {
            name if name.startswith(OF_ALL) else body + name: tensor
            for name, tensor in found.items()
        }

    def shards(self) -> dict[str, set[str]]:
        """Return the index, file -> names of its tensors; empty without an index."""
        shards: dict[str, set[str]] = {}
        if not os.path.lexists(self.path / self._index):
            return shards
        index = self.file(self._index)
        for name, shard in hub.read_weight_map(index).items():
            check_name(name, str(index))
            # A path here could lead out of the folder.
            if not hub.SHARD.fullmatch(shard):
                raise DataError(
                    f"{index}: tensor {name} is said to be in {quoted(shard)}, which is "
                    "no name of a safetensors file of this folder"
                )
            shards.setdefault(shard, set()).add(name)
        return shards

    @property
    def _index(self) -> str:
        return INDEX.format(self.stem)

    def check_generation(self) -> None:
        """ConfigError where special tokens of generation_config.json, which is copied into exports,
        are no ids; DataError where it is no JSON object."""
        if os.path.lexists(self.path / GENERATION):
            path, vocab = self.file(GENERATION), self.config.get("vocab_size")
            settings = read_object(path)
            if isinstance(vocab, int):
                config_checks.check_ids(
                    settings, ("bos_token_id", "eos_token_id"), vocab, str(path)
                )

    def file(self, name: str) -> Path:
        """Return the path of a file of the folder. A link must lead to another file of it, or to
        the blobs of the hub's cache that the folder is part of."""
        path = self.path / name
        if not os.path.lexists(path) and name == "config.json":
            inner = self.path / "transformer"
            which = f"{inner}, of the pipeline" if inner.is_dir() else "the folder of a model"
            which = next((str(file) for file in sorted(self.path.glob("*.gguf"))), which)
            raise ConfigError(f"{path}: no such file; give {which}")
        # Pipes, sockets and links to nowhere must not pass for absence.
        if not path.is_file():
            leads = "is a link that leads nowhere" if path.is_symlink() else "is no file"
            raise DataError(f"{path}: {leads if os.path.lexists(path) else 'no such file'}")
        # The hub's cache keeps files in blobs/ and links to them from snapshots/COMMIT/.
        target, folder = path.resolve(), self.path.resolve()
        cache = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
        if target.parent not in (folder, cache):
            raise DataError(f"{path}: is a link that leads out of the folder, to {target}")
        return path


def and_more(names: list[str], shown: int = 1) -> str:
    """Say how many names are left out where the first few are shown."""
    return f" (and {len(names) - shown} more)" if len(names) > shown else ""


@functools.cache
def _warn(where: str, read: str, parts: str) -> None:
    log.warning("%s: tensors of other parts than the %s are passed over: %s", where, read, parts)
