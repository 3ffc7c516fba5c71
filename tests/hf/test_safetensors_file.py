"""A safetensors file is believed only as far as it is checked."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from maxstack.errors import DataError
from maxstack.hf.safetensors_file import SafetensorsFile

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def written(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3, np.int64),
        "c": np.ones((4,), ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert file.entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert file.array(name).dtype == array.dtype
        np.testing.assert_array_equal(file.array(name), array)


HOSTILE = {
    "too short": (b"", None, "header|too short"),
    "a header longer than the file": (b"{}", 10**6, "claims"),
    "a header of 2^63 bytes": (b"{}", 2**63, "claims"),
    "not JSON": (b"hello", None, "not JSON"),
    "a list": (b"[]", None, "no JSON object"),
    "nested too deep": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, None, "nested deeper"),
    "a name twice": (
        b'{"a": %s, "a": %s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2),
        None,
        "given twice",
    ),
    "a key twice in a tensor": (
        b'{"a": {"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        None,
        "given twice",
    ),
    "a path as a name": ({"../a": F32}, None, "tensor name"),
    "an absolute path as a name": ({"/etc/a": F32}, None, "tensor name"),
    "an unknown dtype": ({"a": F32 | {"dtype": "F1"}}, None, "tensor a: dtype"),
    "a negative size": ({"a": F32 | {"shape": [-2]}}, None, "tensor a: shape"),
    "a size that is true": ({"a": F32 | {"shape": [True]}}, None, "tensor a: shape"),
    "a size that overflows": ({"a": F32 | {"shape": [2**62, 4]}}, None, "tensor a: shape"),
    "a shape that does not fill its span": (
        {"a": F32 | {"shape": [3]}},
        None,
        "tensor a: F32 .3. takes 12 bytes",
    ),
    "offsets out of range": ({"a": F32 | {"data_offsets": [8, 16]}}, None, "lie outside"),
    "offsets backwards": ({"a": F32 | {"data_offsets": [8, 0]}}, None, "lie outside"),
    "overlapping tensors": ({"a": F32, "b": F32}, None, "tensor b overlaps tensor a"),
    "extra keys": ({"a": F32 | {"url": "x"}}, None, "exactly dtype"),
    "bytes of no tensor": (
        {"a": F32 | {"shape": [1], "data_offsets": [0, 4]}},
        None,
        "4 bytes after tensor a belong to no tensor",
    ),
    "a gap": ({"a": F32 | {"shape": [1], "data_offsets": [4, 8]}}, None, "leaves 4 unused bytes"),
    "metadata that is no text": ({"__metadata__": {"a": 1}, "a": F32}, None, "__metadata__"),
    "NaN": (b'{"a": NaN}', None, "NaN is not JSON"),
}


@pytest.mark.parametrize(("header", "length", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_refuses_with_file_and_reason(tmp_path, header, length, reason):
    path = written(tmp_path / "model.safetensors", header, b"12345678", length)
    with pytest.raises(DataError, match=reason) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    path.write_bytes(data)
    try:
        SafetensorsFile(path)
    except DataError as error:
        assert str(path) in str(error)
