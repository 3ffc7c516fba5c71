"""Files that become far more than they are, and the cache of what they become."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from source_files import opened

from maxstack.data import copies, files
from maxstack.data.npz_files import read_arrays
from maxstack.errors import ConfigError, DataError

COMPRESS = {
    ".zst": zstandard.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
MB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_file_that_becomes_more_than_it_may_is_refused(kind, ending, cache):
    Path(f"a{ending}").write_bytes(COMPRESS[ending](b'{"text": "a"}\n' * (MB // 12)))
    says = r"bytes become more than 1,048,576, .* set max_bytes of its source"
    with pytest.raises(DataError, match=f"a{ending}: .* {says}"):
        opened(kind, f"a{ending}", max_bytes=MB)[0]
    assert not cache.exists() or not any(cache.iterdir())


def test_by_default_a_file_may_become_100_times_its_size_and_a_gigabyte():
    for size, becomes in ((45_000, 1 << 30), (10**9, 10**11), (10**11, 10**13)):
        copies.check_growth("a.zst", size, becomes, None)
        with pytest.raises(DataError, match=f"become more than {becomes:,}"):
            copies.check_growth("a.zst", size, becomes + 1, None)


def test_zstandard_is_decompressed_in_bounded_memory():
    compressor = zstandard.ZstdCompressor().compressobj()
    pieces = [compressor.compress(bytes(16 * MB)) for _ in range(16)]
    Path("a.zst").write_bytes(b"".join(pieces) + compressor.flush())
    assert os.path.getsize("a.zst") < MB / 16
    sizes = [*map(len, copies.read_pieces("a.zst", None))]
    assert sum(sizes) == 256 * MB and max(sizes) <= 128 * MB


def test_copies_beyond_the_size_of_the_cache_are_refused_and_old_ones_go(cache, monkeypatch):
    monkeypatch.setenv("MAXSTACK_CACHE_BYTES", "2.5e6")
    for name in "abc":
        Path(f"{name}.jsonl.gz").write_bytes(
            gzip.compress(b'{"text": "%s"}' % (name.encode() * MB))
        )
        if name != "c":
            opened("jsonl", f"{name}.jsonl.gz")
    Path(f"{cache}/held").write_bytes(bytes(MB))
    with pytest.raises(ConfigError, match="its copies take 3,.*,... bytes, and 2,500,000 are"):
        opened("jsonl", "c.jsonl.gz")
    first, *_ = sorted(path for path in cache.iterdir() if path.name != "held")
    week = time.time() - 8 * 24 * 3600
    os.utime(first, (week, week))
    assert opened("jsonl", "c.jsonl.gz")[0] == b"c" * MB
    assert not first.exists() and Path(f"{cache}/held").exists()


@pytest.mark.parametrize("kind", ["text", "jsonl", "separated"])
def test_a_record_that_is_too_long_is_a_bad_one(kind, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    Path("a").write_text('{"text": "a"}\n' + "b" * 1001)
    further = {"kind": "text", "separator": "\n"} if kind == "separated" else {"kind": kind}
    documents = opened(files=["a"], **further)
    with pytest.raises(DataError, match=r"a record of 1,0.. bytes exceeds the limit of 1,000"):
        documents[len(documents) - 1]
    assert kind == "text" or len(documents[0]) <= 13


def test_arrays_that_become_more_than_they_may_are_refused_unread():
    np.savez_compressed("a.npz", latents=np.zeros((64, 64, 64, 4)), label=np.arange(64))
    with pytest.raises(DataError, match="bytes become more than 1,048,576"):
        read_arrays("a.npz", ["latents", "label"], MB)


def test_an_array_that_claims_more_than_the_file_holds_is_refused():
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": (10**14,)}
    )
    with zipfile.ZipFile("a.npz", "w") as made:
        made.writestr("latents.npy", file.getvalue())
    with pytest.raises(DataError, match="a.npz: not a readable .npz file"):
        read_arrays("a.npz", ["latents"])


def test_a_member_of_a_tar_with_a_negative_size_is_refused():
    member = tarfile.TarInfo("a.jpg").tobuf()
    sized = bytearray(member[:124] + (2**96 - 1024).to_bytes(12, "big") + member[136:])
    sized[124] = 0xFF
    sized[148:156] = b"%06o\0 " % (sum(sized[:148]) + 8 * 32 + sum(sized[156:512]))
    Path("a.tar").write_bytes(bytes(sized) + bytes(1024))
    with pytest.raises(DataError, match="a.tar: not an intact tar file"):
        opened("tar", "a.tar")


def test_rows_of_parquet_that_share_one_large_value_are_decoded_one_by_one():
    shared = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 64, pyarrow.int32()), pyarrow.array(["a" * 4 * MB])
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": shared}), "a.parquet", compression="zstd")
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(before))
    with pytest.raises(DataError, match="a.parquet: its .* bytes become more than 16,777,216"):
        opened("parquet", "a.parquet", max_bytes=16 * MB)
    pyarrow.set_memory_pool(before)
    assert pool.max_memory() < 64 * MB


def test_a_file_that_is_gone_and_a_size_that_is_none_are_errors_by_name(monkeypatch):
    with pytest.raises(DataError, match="gone.gz: No such file"):
        copies.read_file(files.File("gone.gz", "gone.gz"))
    Path("a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    monkeypatch.setenv("MAXSTACK_CACHE_BYTES", "a lot")
    with pytest.raises(ConfigError, match="^MAXSTACK_CACHE_BYTES: .* give a number, such as 2e12"):
        opened("jsonl", "a.jsonl.gz")
