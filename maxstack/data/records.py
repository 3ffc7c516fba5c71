"""Sources whose files hold many documents each: JSON lines, separated text, Parquet, ArrayRecord,
Bagz."""

import codecs
import contextlib
import functools
import json
import os
import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from maxstack.config import storage
from maxstack.config.annotations import listed
from maxstack.data.copies import plain, plain_copies
from maxstack.data.documents import (
    Document,
    Documents,
    Picture,
    file_hashes,
    marked,
    part_at,
    picture_of,
    record_hashes,
)
from maxstack.data.files import (
    DECODE_ERRORS,
    Bounds,
    brief,
    decoded,
    digest,
    line_bounds,
    line_number,
    matched,
    other_encoding,
    separated_bounds,
    text_of,
)
from maxstack.data.presets import shape_of
from maxstack.data.shards import check_size, check_whole, refuse_as_text, unpack
from maxstack.data.tf_example import features
from maxstack.errors import DataError, StoreError, installing
from maxstack.schema.data import ArrayRecordSource, Files, JsonlSource, ParquetSource, TextSource

_OPEN_FILES = 64
_CACHED_BYTES = 1 << 28
_SHORTER = "the file became shorter while it was in use"


class Records(Documents):
    """Files of records. A subclass counts a file's records, opens it, and reads a record from what
    it opened."""

    LOCAL = True
    """Files are read from a local, plain copy."""

    def __init__(self, cfg: Files):
        self._cfg: Any = cfg
        self.files = matched(cfg)
        self._paths = [file.path for file in self.files]
        if self.LOCAL:
            self._paths = plain_copies(self.files)
        self._sizes: list[int] = []
        counts = [self._counted(file) for file in range(len(self.files))]
        self._ends = np.cumsum(counts, dtype=np.int64)

    @abstractmethod
    def _count(self, file: int) -> int:
        """Number of records in `file`."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """The object from which _read reads records of `file`."""

    @abstractmethod
    def _read(self, opened: Any, file: int, record: int) -> Document:
        """A record of an open file. Any exception if it cannot be read; the caller adds file and
        record."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Document:
        file, record = part_at(self._ends, index)
        try:
            document = self._read(self._reader(file), file, record)
            if isinstance(document, bytes):
                return text_of(document, self._cfg, self.files[file].path)
            return document
        except Exception as error:  # readers raise all kinds of exceptions over damaged bytes
            of_store = isinstance(error, OSError | StoreError) and storage.is_url(self._paths[file])
            kind = StoreError if of_store else DataError
            raise kind(f"{self._where(file, record)}: {self._reason(error, file)}") from error

    def where(self, index: int) -> str:
        file, record = part_at(self._ends, index)
        return self._where(file, record)

    def by_file(self) -> tuple[list[str], np.ndarray]:
        return marked(self.files, np.diff(self._ends, prepend=0))

    def hashes(self) -> np.ndarray:
        counts = np.diff(self._ends, prepend=0)
        files = zip(file_hashes(self.files), counts, strict=True)
        return np.concatenate([record_hashes(key, int(count)) for key, count in files])

    def identity(self) -> str:
        files = zip(self.files, self._ends, strict=True)
        described = "\0".join(f"{file.key} {end}" for file, end in files)
        return digest(described.encode())

    @functools.cached_property
    def _reader(self) -> Callable[[int], Any]:
        """`_open` that keeps the latest files open; no pickle holds it."""

        def opened(file: int) -> Any:
            if self.LOCAL and not os.path.exists(self._paths[file]):  # on another machine
                self._paths[file] = plain(self.files[file])
            return self._open(file)

        return functools.lru_cache(_OPEN_FILES)(opened)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_reader"}

    def _counted(self, file: int) -> int:
        try:
            if self.LOCAL:
                self._sizes.append(os.path.getsize(self._paths[file]))
            return self._count(file)
        except OSError as error:
            raise DataError(f"{self.files[file].path}: {self._reason(error, file)}") from error

    def _reason(self, error: Exception, file: int) -> str:
        """An error's message without the file's name."""
        if isinstance(error, DataError):
            return brief(str(error).removeprefix(f"{self.files[file].path}: "))
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror
        return f"cannot be read: {brief(message)}"

    def _refuse_shorter(self, file: int) -> None:
        """DataError if a file has fewer bytes than when its records were counted."""
        if os.path.getsize(self._paths[file]) < self._sizes[file]:
            raise DataError(_SHORTER)

    def _where(self, file: int, record: int) -> str:
        return f"{self.files[file].path}: record {record}"

    def _utf8(self, value: object) -> bytes:
        """The bytes of a record's text field."""
        if isinstance(value, bytes):
            return value
        try:
            if isinstance(value, str) and self._cfg.encoding_errors == "replace":
                value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if isinstance(value, str):
                return value.encode(errors=DECODE_ERRORS[self._cfg.encoding_errors])
        except UnicodeEncodeError as error:
            raise DataError(
                f"'{self._cfg.field}' holds half a surrogate pair, which is not text: {error}"
            ) from error
        got = "null" if value is None else f"a {type(value).__name__}"
        raise DataError(f"'{self._cfg.field}' is {got}, not text")


class Spans(Records):
    """Plain text files cut at byte offsets that one scan at the start finds."""

    def __init__(self, cfg: TextSource | JsonlSource):
        self._spans: list[Bounds] = []
        super().__init__(cfg)

    @abstractmethod
    def _bounds(self, path: str) -> Bounds:
        """The records of a plain file."""

    def place(self, index: int) -> str:
        file, record = part_at(self._ends, index)
        return f"{self.files[file].path}: byte {int(self._spans[file][0][record])}"

    def _count(self, file: int) -> int:
        self._spans.append(self._bounds(self._paths[file]))
        return len(self._spans[file][0])

    def _open(self, file: int) -> Any:
        return open(self._paths[file], "rb")

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        start, end = (int(bound[record]) for bound in self._spans[file])
        opened.seek(start)
        data = opened.read(end - start)
        if len(data) < end - start:
            raise DataError(_SHORTER)
        return data

    def _reason(self, error: Exception, file: int) -> str:
        """The encoding of a file in another one, since its lines are damaged in all kinds of
        ways."""
        if isinstance(error, DataError):
            with contextlib.suppress(OSError), self._open(file) as opened:
                if other := other_encoding(opened.read(4)):
                    return other
        return super()._reason(error, file)


class Separated(Spans):
    """Text files whose documents stand between separators."""

    def _bounds(self, path: str) -> Bounds:
        separator = re.escape(self._cfg.separator.encode())
        if "newlines" in self._cfg.normalize:
            separator = separator.replace(b"\\\n", b"(?:\r\n?|\n)")
        return separated_bounds(path, separator)


class Jsonl(Spans):
    """A JSON object a line, with the text under one key."""

    def _bounds(self, path: str) -> Bounds:
        return line_bounds(path)

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        data = super()._read(opened, file, record)
        if self._cfg.record:
            return data.removeprefix(codecs.BOM_UTF8)
        line = decoded(data, self._cfg, self.files[file].path)
        del data  # a line may be hundreds of megabytes
        try:
            value = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            whole = line.lstrip("\ufeff \t")[:1] == "[" and record == 0
            advice = (
                "a JSON array is one value; write a line for each of its elements: "
                "jq -c '.[]' FILE > FILE.jsonl"
                if whole
                else "mend or remove the line"
            )
            raise DataError(f"not JSON: {getattr(error, 'msg', error)}; {advice}") from error
        if isinstance(value, dict) and self._cfg.field in value:
            return self._utf8(value[self._cfg.field])
        content, advice = f"the line is a {type(value).__name__}", "the key of the text"
        if isinstance(value, dict):
            content = f"it has {brief(', '.join(map(repr, value)))}"
            if shape := shape_of(value):
                advice = f"the key of the text, or set {shape}"
        raise DataError(f"no key '{self._cfg.field}'; {content}. Set `field` to {advice}")

    def _where(self, file: int, record: int) -> str:
        """The line number, blank lines included, as long as the file can be read up to there."""
        try:
            self._refuse_shorter(file)
            number = line_number(self._paths[file], int(self._spans[file][0][record]))
        except (OSError, DataError):
            return super()._where(file, record)
        return f"{self.files[file].path}: line {number}"


class Parquet(Records):
    """A string column of Parquet files, or whole rows as JSON. Row groups are decoded whole; the
    latest 256 MiB of them are kept."""

    LOCAL = False

    def __init__(self, cfg: ParquetSource):
        self._groups: list[np.ndarray] = []
        self._decoded: OrderedDict[tuple[int, int], Any] = OrderedDict()
        super().__init__(cfg)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_decoded": OrderedDict()}

    def _count(self, file: int) -> int:
        with self._open(file) as opened:
            meta = opened.metadata
            rows = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
            self._groups.append(np.cumsum(rows, dtype=np.int64))
            return meta.num_rows

    def _open(self, file: int) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(
                f"Parquet files need the pyarrow package: {installing('parquet')}"
            ) from error
        path, version = self._paths[file], self.files[file].version
        try:
            opened = pyarrow.parquet.ParquetFile(
                storage.open_file(path, wanted=version) if version else path,
                page_checksum_verification=True,
            )
            names = opened.schema_arrow.names
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            of_store = version and isinstance(error, OSError) and error.errno
            kind = StoreError if of_store else DataError
            raise kind(f"{path}: not a readable Parquet file: {brief(error)}") from error
        if not self._cfg.record and self._cfg.field not in names:
            raise DataError(
                f"{path}: no column '{self._cfg.field}'; it has {listed(names)}. Set "
                "`field` to the column of the text"
            )
        return opened

    def _read(self, opened: Any, file: int, record: int) -> bytes | Picture:
        group, row = part_at(self._groups[file], record)
        if (file, group) not in self._decoded:
            column = self._column(opened, file, group)
            version = self.files[file].version
            if version and storage.stamp(self._paths[file]) != version:
                raise StoreError("changed since it was opened; put it back, or start again")
            self._decoded[file, group] = column
            while (
                len(self._decoded) > 1
                and sum(column.nbytes for column in self._decoded.values()) > _CACHED_BYTES
            ):
                self._decoded.popitem(last=False)
        self._decoded.move_to_end((file, group))
        if self._cfg.record:
            (value,) = self._decoded[file, group].slice(row, 1).to_pylist()
            if self._cfg.holds == "image":
                return picture_of(value, self._cfg.record)
            return json.dumps(value, ensure_ascii=False, default=str).encode()
        return self._utf8(self._decoded[file, group][row].as_py())

    def _column(self, opened: Any, file: int, group: int) -> Any:
        import pyarrow

        try:
            if self._cfg.record:
                return opened.read_row_group(group)
            column = opened.read_row_group(group, columns=[self._cfg.field]).column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                return column.cast(pyarrow.large_binary())  # whose UTF-8 text_of checks
            return column
        except (OSError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # of the store; damaged bytes have no number
            raise DataError(f"its row group {group} is corrupt: {error}") from error


class ArrayRecords(Records):
    """ArrayRecord files of UTF-8 text or of tokens; a manifest.json beside token files is checked
    against the shards that are there, and their sizes."""

    def __init__(self, cfg: ArrayRecordSource):
        super().__init__(cfg)
        if cfg.content == "tokens":
            check_whole(cfg, self.files)

    def _count(self, file: int) -> int:
        check = check_size if self._cfg.content == "tokens" else refuse_as_text
        check(self.files[file].path)
        reader = self._open(file)
        count = reader.num_records()
        reader.close()
        return count

    def _open(self, file: int) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        reader = ArrayRecordReader(self._paths[file], "readahead_buffer_size:0")
        if not reader.ok():
            raise DataError(
                f"{self.files[file].path}: not an intact ArrayRecord file "
                f"({os.path.getsize(self._paths[file])} bytes; cut short, or of another format)"
            )
        return reader

    def _read(self, opened: Any, file: int, record: int) -> Document:
        try:
            (data,) = opened.read([record])
        except (RuntimeError, ValueError) as error:
            raise DataError(f"corrupt: {error}") from error
        if not data:  # the library's answer for what lies past the end of the file
            self._refuse_shorter(file)
        if self._cfg.holds in ("image", "latents"):
            return picture_of(features(data), self._cfg.record)
        return data if self._cfg.content == "text" else unpack(data, self.files[file].path)


class Bagz(Records):
    """Bagz files of UTF-8 text."""

    def _count(self, file: int) -> int:
        return len(self._open(file))

    def _open(self, file: int) -> Any:
        try:
            import bagz
        except ImportError as error:
            raise DataError(f"Bagz files need the bagz package: {installing('bagz')}") from error
        try:
            return bagz.Reader(self._paths[file])
        except (ValueError, OSError, RuntimeError) as error:
            path = self.files[file].path
            raise DataError(f"{path}: not an intact Bagz file: {brief(error)}") from error

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        # The file is mapped into memory: reading past its end would end the process.
        self._refuse_shorter(file)
        try:
            return opened[record]
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"corrupt: {error}") from error
