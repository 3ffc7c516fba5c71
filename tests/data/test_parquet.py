"""Sources of Parquet."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import source_files
from source_files import texts_of

from maxstack.errors import DataError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))


def opened(files="a.parquet", **fields):
    return source_files.opened("parquet", files, **fields)


def write(columns, name="a.parquet", **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), name, **options)


def test_parquet_reads_across_row_groups_and_files():
    many = [f"document {i}" for i in range(50)]
    write({"text": many[:30], "n": range(30)}, row_group_size=7)
    write({"text": pyarrow.array(many[30:]).dictionary_encode()}, "b.parquet")
    documents = opened("*.parquet")
    assert texts_of(documents) == many
    assert [documents[i].decode() for i in (49, 0, 29, 30)] == [many[i] for i in (49, 0, 29, 30)]


def test_a_row_group_of_parquet_is_decoded_once_whoever_reads_it_in_whatever_order(monkeypatch):
    many = [f"document {i}" for i in range(40)]
    write({"text": many}, row_group_size=10)
    decoded = []

    class Counted(pyarrow.parquet.ParquetFile):
        def iter_batches(self, batch_size, row_groups, columns):
            decoded.extend(row_groups)
            return super().iter_batches(batch_size, row_groups, columns)

        def read_row_group(self, group, **arguments):
            decoded.append(group)
            return super().read_row_group(group, **arguments)

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", Counted)
    for seed in range(3):
        documents = pickle.loads(pickle.dumps(opened()))
        for i in np.random.default_rng(seed).permutation(40):
            assert documents[i].decode() == many[i]
    assert decoded == [0, 1, 2, 3]


def test_parquet_takes_no_more_memory_than_a_few_rows_however_large_its_groups_are():
    rows = [os.urandom(750).hex() for _ in range(20_000)]
    write({"text": rows})
    assert pyarrow.parquet.ParquetFile("a.parquet").metadata.num_row_groups == 1
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(before))
    try:
        documents = opened()
        assert documents[19_999].decode() == rows[-1]
    finally:
        pyarrow.set_memory_pool(before)
    assert 0 < pool.max_memory() < 12e6 < 30e6 == sum(map(len, rows))


def test_parquet_that_changes_is_read_anew_and_readers_that_begin_at_once_share_a_copy():
    def read(_):
        return texts_of(opened())

    for many in (["one", "two"], ["other"]):
        write({"text": many})
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(read, range(8))] == [many] * 8
    assert len([*Path("cache/data").iterdir()]) == 2


def test_rows_of_parquet_are_json_and_one_that_is_no_text_is_told_of_alone():
    source_files.write_source("parquet", [b"a", b"\xff", b"c"])
    columns = {
        "prompt": pyarrow.parquet.read_table("a.parquet")["text"],
        "turns": [[{"n": 1}], None, []],
        "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
    }
    write(columns)
    documents = opened(record={"kind": "prompts"})
    assert json.loads(documents[0]) == {"prompt": "a", "turns": [{"n": 1}], "kind": "x"}
    assert json.loads(documents[2]) == {"prompt": "c", "turns": [], "kind": "x"}
    with pytest.raises(DataError, match="^a.parquet: record 1: .*can't decode byte 0xff"):
        documents[1]


def test_a_column_that_is_not_there_is_named_at_the_start():
    write({"image": [b""], "other": [1]})
    says = "^a.parquet: no column 'label'; it has image, other. Set `record.label` to"
    with pytest.raises(DataError, match=says):
        opened(record={"kind": "image"})
