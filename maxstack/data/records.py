"""Sources whose files hold many documents each: JSON lines, separated text, Parquet, ArrayRecord,
Bagz."""

import contextlib
import hashlib
import json
import os
import re
from abc import abstractmethod
from collections import OrderedDict
from typing import Any

import numpy as np

from maxstack.config.annotations import listed
from maxstack.config.errors import DataError
from maxstack.data.documents import Document, Documents, file_hashes, record_hashes
from maxstack.data.files import (
    DECODE_ERRORS,
    File,
    brief,
    decoded,
    line_bounds,
    line_number,
    matched,
    other_encoding,
    plain,
    separated_bounds,
    text_of,
)
from maxstack.schema.data import (
    ArrayRecordSource,
    BagzSource,
    Files,
    JsonlSource,
    ParquetSource,
    TextSource,
)

_OPEN_FILES = 64
_CACHED_BYTES = 1 << 28


class Records(Documents):
    """Files of records. A subclass counts a file's records, opens it, and reads a record from what
    it opened."""

    def __init__(self, cfg: Files):
        self._cfg: Any = cfg
        self._files: list[File] = matched(cfg)
        self._sizes: list[int] = []
        self._ends = np.cumsum(
            [self._counted(file) for file in range(len(self._files))], dtype=np.int64
        )
        self._opened: OrderedDict[int, Any] = OrderedDict()

    @abstractmethod
    def _count(self, file: int) -> int:
        """How many records `file` holds."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """Whatever _read needs to read records of `file`."""

    @abstractmethod
    def _read(self, opened: Any, file: int, record: int) -> Document:
        """A record of an open file. DataError, in whose place the caller names file and record, or
        any other exception if it cannot be read."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Document:
        file, record = self._locate(index)
        try:
            if file not in self._opened:
                if len(self._opened) == _OPEN_FILES:
                    self._opened.popitem(last=False)
                self._opened[file] = self._open(file)
            self._opened.move_to_end(file)
            document = self._read(self._opened[file], file, record)
            return (
                text_of(document, self._cfg, self._files[file].path)
                if isinstance(document, bytes)
                else document
            )
        except Exception as error:  # readers raise all kinds of exceptions over damaged bytes
            raise DataError(f"{self._where(file, record)}: {self._reason(error, file)}") from error

    def where(self, index: int) -> str:
        file, record = self._locate(index)
        return self._where(file, record)

    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def hashes(self) -> np.ndarray:
        counts = np.diff(self._ends, prepend=0)
        return np.concatenate(
            [
                record_hashes(key, int(count))
                for key, count in zip(file_hashes(self._files), counts, strict=True)
            ]
        )

    def identity(self) -> str:
        described = "\0".join(
            f"{file.key} {end}" for file, end in zip(self._files, self._ends, strict=True)
        )
        return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": OrderedDict()}

    def _counted(self, file: int) -> int:
        try:
            self._sizes.append(os.path.getsize(self._files[file].path))
            return self._count(file)
        except OSError as error:
            raise DataError(f"{self._files[file].path}: {self._reason(error, file)}") from error

    def _reason(self, error: Exception, file: int) -> str:
        """What an error says, but for the file's name."""
        if isinstance(error, DataError):
            return brief(str(error).removeprefix(f"{self._files[file].path}: "))
        said = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else f"{type(error).__name__}: {error}"
        )
        return f"cannot be read: {brief(said)}"

    def _became_shorter(self, file: int) -> None:
        """DataError if a file has fewer bytes than when its records were counted."""
        if os.path.getsize(self._files[file].path) < self._sizes[file]:
            raise DataError("the file became shorter while it was in use")

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    def _where(self, file: int, record: int) -> str:
        return f"{self._files[file].path}: record {record}"

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
        self._spans: list[tuple[np.ndarray, np.ndarray]] = []
        super().__init__(cfg)

    @abstractmethod
    def _bounds(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        """Where records start and end."""

    def _count(self, file: int) -> int:
        self._spans.append(self._bounds(plain(self._files[file].path)))
        return len(self._spans[file][0])

    def _open(self, file: int) -> Any:
        return open(plain(self._files[file].path), "rb")

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        start, end = (int(bound[record]) for bound in self._spans[file])
        opened.seek(start)
        data = opened.read(end - start)
        if len(data) < end - start:
            raise DataError("the file became shorter while it was in use")
        return data

    def _reason(self, error: Exception, file: int) -> str:
        """Of a file in another encoding, its encoding: lines of it are damaged in all kinds of
        ways."""
        if isinstance(error, DataError):
            with contextlib.suppress(OSError, DataError), self._open(file) as opened:
                if other := other_encoding(opened.read(4)):
                    return other
        return super()._reason(error, file)


class Separated(Spans):
    """Text files whose documents stand between separators."""

    def _bounds(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        separator = re.escape(self._cfg.separator.encode())
        any_newline = "newlines" in self._cfg.normalize
        return separated_bounds(
            path, separator.replace(b"\\\n", b"(?:\r\n?|\n)") if any_newline else separator
        )


class Jsonl(Spans):
    """A JSON object a line, with the text under one key."""

    def _bounds(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        return line_bounds(path)

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        line = decoded(super()._read(opened, file, record), self._cfg, self._files[file].path)
        try:
            value = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from error
        if not isinstance(value, dict) or self._cfg.field not in value:
            got = (
                f"it has {brief(', '.join(map(repr, value)))}"
                if isinstance(value, dict)
                else f"the line is a {type(value).__name__}"
            )
            raise DataError(
                f"no key '{self._cfg.field}'; {got}. Set `field` to the key of the text"
            )
        return self._utf8(value[self._cfg.field])

    def _where(self, file: int, record: int) -> str:
        """JSON lines are known by their line number, blank lines included, as long as the file can
        be read up to there."""
        path, start = self._files[file].path, int(self._spans[file][0][record])
        try:
            self._became_shorter(file)
            return f"{path}: line {line_number(plain(path), start)}"
        except (OSError, DataError):
            return super()._where(file, record)


class Parquet(Records):
    """A string column of Parquet files. Row groups are decoded whole; the latest 256 MiB of them
    are kept."""

    def __init__(self, cfg: ParquetSource):
        self._groups: list[np.ndarray] = []
        self._decoded: OrderedDict[tuple[int, int], Any] = OrderedDict()
        super().__init__(cfg)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_decoded": OrderedDict()}

    def _count(self, file: int) -> int:
        opened = self._open(file)
        meta = opened.metadata
        self._groups.append(
            np.cumsum(
                [meta.row_group(group).num_rows for group in range(meta.num_row_groups)],
                dtype=np.int64,
            )
        )
        opened.close()
        return meta.num_rows

    def _open(self, file: int) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(
                "Parquet files need the pyarrow package: pip install 'maxstack[parquet]'"
            ) from error
        path = self._files[file].path
        try:
            opened = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
            names = opened.schema_arrow.names
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: not a readable Parquet file: {brief(error)}") from error
        if self._cfg.field not in names:
            raise DataError(
                f"{path}: no column '{self._cfg.field}'; it has {listed(names)}. Set "
                "`field` to the column of the text"
            )
        return opened

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        group = int(np.searchsorted(self._groups[file], record, side="right"))
        if (file, group) not in self._decoded:
            self._decoded[file, group] = self._column(opened, file, group)
            while (
                len(self._decoded) > 1
                and sum(column.nbytes for column in self._decoded.values()) > _CACHED_BYTES
            ):
                self._decoded.popitem(last=False)
        self._decoded.move_to_end((file, group))
        row = record - (int(self._groups[file][group - 1]) if group else 0)
        return self._utf8(self._decoded[file, group][row].as_py())

    def _column(self, opened: Any, file: int, group: int) -> Any:
        import pyarrow

        try:
            column = opened.read_row_group(group, columns=[self._cfg.field]).column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            return column.cast(pyarrow.large_binary()) if _is_text(column.type) else column
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"its row group {group} is corrupt: {error}") from error


def _is_text(kind: Any) -> bool:
    """Whether a column is of strings; these are checked where those of the other sources are."""
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind)


class ArrayRecords(Records):
    """ArrayRecord files of UTF-8 text or of tokens; a manifest.json beside token files is checked
    against the file sizes."""

    def __init__(self, cfg: ArrayRecordSource):
        super().__init__(cfg)

    def _count(self, file: int) -> int:
        from maxstack.data.shards import check_size, refuse_as_text

        (check_size if self._cfg.content == "tokens" else refuse_as_text)(self._files[file].path)
        reader = self._open(file)
        count = reader.num_records()
        reader.close()
        return count

    def _open(self, file: int) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        path = self._files[file].path
        reader = ArrayRecordReader(path, "readahead_buffer_size:0")
        if not reader.ok():
            raise DataError(
                f"{path}: not an intact ArrayRecord file ({os.path.getsize(path)} bytes; "
                "cut short, or of another format)"
            )
        return reader

    def _read(self, opened: Any, file: int, record: int) -> Document:
        try:
            (data,) = opened.read([record])
        except (RuntimeError, ValueError) as error:
            raise DataError(f"corrupt: {error}") from error
        if not data:  # so the library reads whatever lies past the end of the file
            self._became_shorter(file)
        if self._cfg.content == "text":
            return data
        from maxstack.data.shards import unpack

        return unpack(data, self._files[file].path)


class Bagz(Records):
    """Bagz files of UTF-8 text."""

    def __init__(self, cfg: BagzSource):
        super().__init__(cfg)

    def _count(self, file: int) -> int:
        return len(self._open(file))

    def _open(self, file: int) -> Any:
        try:
            import bagz
        except ImportError as error:
            raise DataError(
                "Bagz files need the bagz package: pip install 'maxstack[bagz]'"
            ) from error
        path = self._files[file].path
        try:
            return bagz.Reader(path)
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"{path}: not an intact Bagz file: {brief(error)}") from error

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        self._became_shorter(
            file
        )  # the file is mapped into memory: reading past its end would end the process
        try:
            return opened[record]
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"corrupt: {error}") from error
