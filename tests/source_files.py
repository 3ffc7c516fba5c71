"""Files of documents for tests, and the sources that read them."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pydantic import TypeAdapter

from maxstack.data.sources import open_source
from maxstack.schema.data import AnySource


def source_of(kind, *files, **fields):
    """The section of a source."""
    section = {"kind": kind, "files": files} | fields
    return TypeAdapter(AnySource).validate_python(section)


def opened(kind, *files, split="train", **fields):
    """The documents of a source."""
    return open_source(source_of(kind, *files, **fields), split=split)


def contents(documents):
    """All documents of a source."""
    return [documents[i] for i in range(len(documents))]


def texts_of(documents):
    """All documents of a source, as text."""
    return [bytes(document).decode() for document in contents(documents)]


def write_array_records(name, records, options="group_size:1"):
    """Write a file of ArrayRecord."""
    writer = ArrayRecordWriter(name, options)
    for record in records:
        writer.write(record)
    writer.close()


def write_source(kind, texts, **options):
    """Write documents to a.KIND in the working folder, or for `text` to a file each; the keys of
    the source that reads them."""
    if kind == "text":
        for i, text in enumerate(texts):
            Path(f"{i:02}.txt").write_bytes(text)
        return {"kind": kind, "files": ["*.txt"]}
    name = f"a.{kind}"
    match kind:
        case "separated":
            Path(name).write_bytes(b"<|doc|>".join(texts))
            return {"kind": "text", "files": [name], "separator": "<|doc|>"}
        case "jsonl":
            Path(name).write_bytes(b"".join(b'{"text": "%s"}\n' % text for text in texts))
        case "parquet":
            ends = pyarrow.py_buffer(np.cumsum([0, *map(len, texts)], dtype=np.int32).tobytes())
            joined = pyarrow.py_buffer(b"".join(texts))
            column = pyarrow.StringArray.from_buffers(len(texts), ends, joined)
            pyarrow.parquet.write_table(pyarrow.table({"text": column}), name, **options)
        case "array_record":
            write_array_records(name, texts, **options)
        case "bagz":
            with pytest.importorskip("bagz").Writer(name) as writer:
                for text in texts:
                    writer.write(text)
    return {"kind": kind, "files": [name]}
