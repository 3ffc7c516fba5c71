"""Which files a source has, how they are compressed, and where their records are."""

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pytest
import zstandard
from json_lines import lines_of_texts
from source_files import opened, source_of, texts_of

from maxstack.data.files import match_files
from maxstack.errors import DataError

TEXTS = ["first\nlines", "zweites d\u00f6kument", "3rd"]
LINES = lines_of_texts(TEXTS)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))


def write(name, text):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def two_frames(data):
    """Zstandard of two parts, one after the other."""
    return zstandard.compress(data[:9]) + zstandard.compress(data[9:])


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, two_frames])
@pytest.mark.parametrize("name", ["a.jsonl", "a.bz2"])
def test_what_a_file_begins_with_says_how_it_is_compressed_and_not_its_name(compress, name):
    Path(name).write_bytes(compress(LINES.encode()))
    assert texts_of(opened("jsonl", name)) == TEXTS
    assert texts_of(opened("text", name)) == [LINES]


def test_text_that_begins_as_bzip2_does_is_text():
    write("a.txt", "BZh9 is no archive")
    assert opened("text", "a.txt")[0] == b"BZh9 is no archive"


def test_a_file_that_is_named_in_two_ways_counts_once(tmp_path):
    write("a.jsonl", LINES)
    assert len(opened("jsonl", "a.jsonl", f"{tmp_path}/a.jsonl", "*.jsonl")) == len(TEXTS)


def test_a_folder_that_cannot_be_listed_is_an_error(monkeypatch):
    write("deep/a.txt", "x")
    write("a.txt", "x")
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="deep: cannot be listed: Permission denied"):
        match_files(source_of("text", "./**/*.txt"))


@pytest.mark.parametrize(
    "names, asked, absent",
    [
        (["a-00000-of-00003.txt", "a-00002-of-00003.txt"], {}, "a-00001-of-00003.txt"),
        (["a_1_of_3.txt", "a_3_of_3.txt"], {}, "a_2_of_3.txt"),
        (["a-0-of-2.txt", "b-0-of-1.txt"], {}, "a-1-of-2.txt"),
        (["a-0-of-2.txt"], {"files": ["a-0-of-2.txt"]}, None),
        (["a-0-of-9.txt", "a-1-of-9.txt"], {"files": ["a-[01]-of-9.txt"]}, None),
        (["a-0-of-2.txt"], {"exclude": ["**/a-1-of-2*"]}, None),
        (["a-0-of-2.txt"], {"exclude": ["a-1-of-2.txt"]}, None),
        (["a-0-of-2.txt"], {"partial": True}, None),
        (["a-1-of-100.txt"], {}, None),
    ],
)
def test_a_file_that_the_numbers_of_others_name_must_be_there(names, asked, absent):
    for name in names:
        write(name, "x")
    cfg = source_of("text", **{"files": ["*.txt"]} | asked)
    if absent is None:
        assert [file.path for file in match_files(cfg)] == names
        return
    with pytest.raises(
        DataError, match=rf"^{absent}: no such file, although the number of .* names it"
    ):
        match_files(cfg)
