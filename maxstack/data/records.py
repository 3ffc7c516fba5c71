"""Sources whose files hold many documents each: JSON lines, separated text, Parquet, ArrayRecord,
Bagz.

Documents are read in shuffled order, so each is found by its number alone. The records of each file
are counted when a source is opened: lines and separated texts by one scan, which keeps their byte
offsets, the other formats by their own index. What cannot be read from any position (compressed
files, URLs, Parquet) is read from a copy in the cache (copies.py). A record that cannot be read is
a DataError with its file and number.
"""

import array
import codecs
import contextlib
import functools
import itertools
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.config import storage
from maxstack.config.annotations import listed
from maxstack.data.copies import RATIO, Form, Told, plain_copies, plain_copy, read_pieces
from maxstack.data.documents import (
    Document,
    Documents,
    Picture,
    file_hashes,
    find_part,
    mark_files,
    read_picture,
    record_hashes,
)
from maxstack.data.files import (
    DECODE_ERRORS,
    Bounds,
    check_length,
    clean_text,
    decode_text,
    digest,
    find_other_encoding,
    line_bounds,
    line_number,
    match_files,
    one_line,
    separated_bounds,
)
from maxstack.data.presets import suggest_setting
from maxstack.data.shards import check_size, check_whole, refuse_as_text, unpack
from maxstack.data.tf_example import read_features
from maxstack.errors import DataError, StoreError, installing
from maxstack.regular_file import open_regular
from maxstack.schema.data import (
    ArrayRecordSource,
    Files,
    ImageRecord,
    JsonlSource,
    ParquetSource,
    TextSource,
)

_OPEN_FILES = 64
_ROWS, _BUFFER = 64, 1 << 22
"""For Parquet: rows that are decoded at once, and bytes of a column that are read at once."""
_READABLE, _UNREADABLE = b"+", b"-"
_SHORTER = "the file became shorter while it was in use"


class Records(Documents):
    """Files of records. A subclass counts a file's records, opens it, and reads a record from what
    it opened."""

    def __init__(self, cfg: Files):
        self._cfg: Any = cfg
        self.files = match_files(cfg)
        self._paths = plain_copies(self.files, self._form(), cfg.max_bytes)
        self._sizes: list[int] = []
        counts = [self._counted(file) for file in range(len(self.files))]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def _form(self) -> Form:
        """Form of the local copies that are read."""
        return read_pieces, ""

    @abstractmethod
    def _count(self, file: int) -> int:
        """Return the number of records in `file`."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """Return the object from which _read reads records of `file`."""

    @abstractmethod
    def _read(self, opened: Any, file: int, record: int) -> Document:
        """Return a record of an open file. Any exception if it cannot be read; the caller adds file
        and record."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Document:
        file, record = find_part(self._ends, index)
        try:
            document = self._read(self._reader(file), file, record)
            if isinstance(document, bytes):
                return clean_text(document, self._cfg, self.files[file].path)
            return document
        except Exception as error:  # readers raise all kinds of exceptions over damaged bytes
            kind = type(error) if isinstance(error, StoreError) else DataError
            raise kind(f"{self._where(file, record)}: {self._reason(error, file)}") from error

    def where(self, index: int) -> str:
        file, record = find_part(self._ends, index)
        return self._where(file, record)

    def by_file(self) -> tuple[list[str], np.ndarray]:
        return mark_files(self.files, np.diff(self._ends, prepend=0))

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

        # Open files belong to a process; workers get this source by pickle and open their own.
        def opened(file: int) -> Any:
            # A copy lies in the cache of one machine, and the pickle may have gone to another.
            if not os.path.exists(self._paths[file]):  # on another machine
                self._paths[file] = plain_copy(
                    self.files[file], self._form(), most=self._cfg.max_bytes
                )
            return self._open(file)

        return functools.lru_cache(_OPEN_FILES)(opened)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_reader"}

    def _counted(self, file: int) -> int:
        try:
            self._sizes.append(os.path.getsize(self._paths[file]))
            return self._count(file)
        except OSError as error:
            raise DataError(f"{self.files[file].path}: {self._reason(error, file)}") from error

    def _reason(self, error: Exception, file: int) -> str:
        """Return an error's message without the file's name."""
        if isinstance(error, DataError):
            return one_line(str(error).removeprefix(f"{self.files[file].path}: "))
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            message = error.strerror
        return f"cannot be read: {one_line(message)}"

    def _refuse_shorter(self, file: int) -> None:
        """DataError if a file has fewer bytes than when its records were counted."""
        if os.path.getsize(self._paths[file]) < self._sizes[file]:
            raise DataError(_SHORTER)

    def _where(self, file: int, record: int) -> str:
        return f"{self.files[file].path}: record {record}"

    def _utf8(self, value: object) -> bytes:
        """Return the bytes of a record's text field."""
        if isinstance(value, bytes):
            return value
        try:
            # By UTF-16, since str.encode(errors="replace") would write "?" for half a surrogate
            # pair, and other replaced bytes become U+FFFD.
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
    """Files, or copies of them, cut at byte offsets that are found at the start."""

    def __init__(self, cfg: TextSource | JsonlSource | ParquetSource):
        self._spans: list[Bounds] = []
        super().__init__(cfg)

    @abstractmethod
    def _bounds(self, path: str) -> Bounds:
        """Return the records of a plain file."""

    def place(self, index: int) -> str:
        file, record = find_part(self._ends, index)
        return f"{self.files[file].path}: byte {int(self._spans[file][0][record])}"

    def _count(self, file: int) -> int:
        self._spans.append(self._bounds(self._paths[file]))
        return len(self._spans[file][0])

    def _open(self, file: int) -> Any:
        return open_regular(self._paths[file])

    def _read(self, opened: Any, file: int, record: int) -> Document:
        start, end = (int(bound[record]) for bound in self._spans[file])
        # Before the read: a file of another kind may be a single "record" of any size.
        check_length(end - start, self.files[file].path)
        opened.seek(start)
        data = opened.read(end - start)
        if len(data) < end - start:
            raise DataError(_SHORTER)
        return data

    def _reason(self, error: Exception, file: int) -> str:
        """Return the encoding of a file in another one, since its lines are damaged in all kinds of
        ways."""
        if isinstance(error, DataError):
            with contextlib.suppress(OSError), self._open(file) as opened:
                if other := find_other_encoding(opened.read(4)):
                    return other
        return super()._reason(error, file)


class Separated(Spans):
    """Text files whose documents stand between separators."""

    def _bounds(self, path: str) -> Bounds:
        separator = re.escape(self._cfg.separator.encode())
        # A file is cut before its documents are normalized, so CRLF must match here already.
        if "newlines" in self._cfg.normalize:
            separator = separator.replace(b"\\\n", b"(?:\r\n?|\n)")
        return separated_bounds(path, separator)


class Jsonl(Spans):
    """A JSON object a line, with the text under one key."""

    def _bounds(self, path: str) -> Bounds:
        return line_bounds(path)

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        data: Any = super()._read(opened, file, record)
        # A record is bytes of JSON, which examples.py parses; only the text of a key is read here.
        if self._cfg.record:
            return data.removeprefix(codecs.BOM_UTF8)
        line = decode_text(data, self._cfg, self.files[file].path)
        del data  # a line may be hundreds of megabytes
        try:
            value = strict_json.parse(line, strict=False)
        except DataError as error:
            whole = line.lstrip("\ufeff \t")[:1] == "[" and record == 0
            advice = (
                "a JSON array is one value; write a line for each of its elements: "
                "jq -c '.[]' FILE > FILE.jsonl"
                if whole
                else "mend or remove the line"
            )
            raise DataError(f"{error}; {advice}") from error
        if isinstance(value, dict) and self._cfg.field in value:
            return self._utf8(value[self._cfg.field])
        content, advice = f"the line is a {type(value).__name__}", "the key of the text"
        if isinstance(value, dict):
            content = f"it has {one_line(', '.join(map(repr, value)))}"
            if shape := suggest_setting(value):
                advice = f"the key of the text, or set {shape}"
        raise DataError(f"no key '{self._cfg.field}'; {content}. Set `field` to {advice}")

    def _where(self, file: int, record: int) -> str:
        """Return the line number, blank lines included, as long as the file can be read up to
        there."""
        try:
            self._refuse_shorter(file)
            number = line_number(self._paths[file], int(self._spans[file][0][record]))
        except (OSError, DataError):
            return super()._where(file, record)
        return f"{self.files[file].path}: line {number}"


class Parquet(Spans):
    """A string column of Parquet files, or whole rows as JSON.

    A row is decoded with all of its group before it, so rows in any order are read from a copy in
    the cache: what each row holds after _READABLE, or after _UNREADABLE why it cannot be read; then
    int64 [N, 2], where each begins and ends; then N.
    """

    def place(self, index: int) -> str:
        return self.where(index)

    def _bounds(self, path: str) -> Bounds:
        # The table stands at the end, since places are known once all rows are written; skipping
        # the odd bytes in front aligns it. Copied out of the map, so that the file need not stay
        # open.
        words = np.memmap(path, np.int64, "r", offset=os.path.getsize(path) % 8)
        spans = np.array(words[-1 - 2 * words[-1] : -1])
        return spans[::2], spans[1::2]

    def _read(self, opened: Any, file: int, record: int) -> Document:
        data: Any = super()._read(opened, file, record)
        mark, content = data[:1], data[1:]
        if mark == _UNREADABLE:
            raise DataError(content.decode())
        if self._cfg.holds == "image":
            label, _, content = content.partition(b" ")
            return Picture(content, int(label))
        return content

    def _form(self) -> Form:
        return self._pieces, f"\0parquet {[*self._columns.values()]}"

    @property
    def _columns(self) -> dict[str, str]:
        """Keys of the source -> columns that are read; empty: all."""
        record = self._cfg.record
        if isinstance(record, ImageRecord):
            return {"record.image": record.image, "record.label": record.label}
        return {} if record else {"field": self._cfg.field}

    def _pieces(self, path: str, version: storage.Stamp, told: Told) -> Iterator[bytes]:
        """Yield the copy of a file."""
        # Read in random order without a copy, groups of 1,000 rows gave 1,269 documents a second
        # and one of 60,000 rows 80, with 256 MiB of groups held in each process; the copy gives
        # 160,000.
        opened = self._open_parquet(path, version)
        spans = array.array("q")
        at = 0
        share = version[0] / max(opened.metadata.num_rows, 1)
        for group in range(opened.num_row_groups):
            for content in self._contents(opened, path, group):
                # Row by row: a group may be larger than memory.
                yield content
                spans.extend((at, at + len(content)))
                at += len(content)
                told(share)
        yield spans.tobytes()
        yield np.int64(len(spans) // 2).tobytes()

    def _contents(self, opened: Any, path: str, group: int) -> Iterator[bytes]:
        """Yield what the copy holds of each row of a group."""
        import pyarrow

        held = opened.metadata.row_group(group)
        left, reason = held.num_rows, "it holds fewer rows"
        compressed = sum(held.column(i).total_compressed_size for i in range(held.num_columns))
        # rows that all name one large value of a dictionary would each become as large
        rows = _ROWS if held.total_byte_size <= RATIO * compressed else 1
        columns = [*self._columns.values()] or None
        try:
            for batch in opened.iter_batches(rows, [group], columns):
                left -= batch.num_rows
                batch = batch if self._cfg.record else _texts_as_bytes(batch)
                yield from (self._content(batch.slice(i, 1)) for i in range(batch.num_rows))
        except (OSError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno:  # damaged bytes have no number
                kind = storage.error_of(path, error)
                raise kind(f"{path}: {error.strerror}") from error
            reason = one_line(error)
        # A row that cannot be read keeps its number, so the order of the others does not change,
        # and data.quarantine counts it when it is due.
        reason = f"its row group {group} is corrupt: {reason}"
        yield from itertools.repeat(_UNREADABLE + reason.encode(), left)

    def _content(self, row: Any) -> bytes:
        try:
            (value,), record = row.to_pylist(), self._cfg.record
            if isinstance(record, ImageRecord):
                content, label = read_picture(value, record)
                return b"%b%d %b" % (_READABLE, label, bytes(content))
            if record:
                return _READABLE + json.dumps(value, ensure_ascii=False, default=str).encode()
            return _READABLE + self._utf8(value[self._cfg.field])
        except (DataError, ValueError) as error:
            return _UNREADABLE + one_line(error).encode()

    def _open_parquet(self, path: str, version: storage.Stamp) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(
                f"Parquet files need the pyarrow package: {installing('parquet')}"
            ) from error
        try:
            opened = pyarrow.parquet.ParquetFile(
                storage.open_file(path, wanted=version),
                # pyarrow does not verify stored checksums unless it is told to.
                page_checksum_verification=True,
                # A group of 659 MB took 687 MB, and no less with buffer_size alone; with
                # pre_buffer=False, 103 MB.
                buffer_size=_BUFFER,
                pre_buffer=False,  # which would hold a group's columns as a whole
            )
            names = opened.schema_arrow.names
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            of_store = isinstance(error, OSError) and error.errno
            kind = storage.error_of(path, error) if of_store else DataError
            raise kind(f"{path}: not a readable Parquet file: {one_line(error)}") from error
        for key, column in self._columns.items():
            if column not in names:
                raise DataError(
                    f"{path}: no column '{column}'; it has {listed(names)}. Set `{key}` to the "
                    "one that is meant"
                )
        return opened


def _texts_as_bytes(batch: Any) -> Any:
    """Return a batch of one column with texts as bytes, whose UTF-8 clean_text checks."""
    import pyarrow

    (column,) = batch.columns
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    return pyarrow.record_batch([column], batch.schema.names)


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
        # Not left to the cache of open files: at the start each file is opened, however many.
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
            return read_picture(read_features(data), self._cfg.record)
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
            raise DataError(f"{path}: not an intact Bagz file: {one_line(error)}") from error

    def _read(self, opened: Any, file: int, record: int) -> bytes:
        # The file is mapped into memory: reading past its end would end the process.
        self._refuse_shorter(file)
        try:
            return opened[record]
        except (ValueError, OSError, RuntimeError) as error:
            raise DataError(f"corrupt: {error}") from error
