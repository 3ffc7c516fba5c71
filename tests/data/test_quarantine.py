"""Records that are really damaged: named, and passed over without a change to anything else where
data.quarantine allows it."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from source_files import opened, source_of, write_array_records, write_source

from maxstack.data.documents import Tokens
from maxstack.data.feed import Feed
from maxstack.data.shards import pack
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig, SyntheticSource

BATCH, ROW = 4, 128
TEXTS = [f"document {i} " + " ".join(map(str, range(i, 30 + i))) for i in range(24)]


OPTIONS = {
    "parquet": {"row_group_size": 3, "compression": "none", "write_page_checksum": True},
    "array_record": {"options": "group_size:1,uncompressed"},
}


def written(kind):
    """A source of TEXTS, and its file that is damaged."""
    fields = write_source(kind, [text.encode() for text in TEXTS], **OPTIONS.get(kind, {}))
    return fields, "07.txt" if kind == "text" else fields["files"][0]


def compressed(ending, compress):
    """The same of compressed files."""
    fields, _ = written("text")
    for path in Path().glob("*.txt"):
        moved = path.rename(f"{path}{ending}")
        moved.write_bytes(compress(moved.read_bytes()))
    return fields | {"files": [f"*.txt{ending}"]}, f"07.txt{ending}"


def tokens_record(text):
    return pack(Tokens(np.frombuffer(text.encode(), np.uint8).astype(np.int32), None))


def stored_tokens():
    """The same of tokens."""
    fields, name = written("array_record")
    write_array_records(name, map(tokens_record, TEXTS), **OPTIONS["array_record"])
    return fields | {"content": "tokens", "partial": True}, name


def place_of(data, document):
    """Where a document of a file is sure to stand."""
    for sought in (TEXTS[document].encode(), tokens_record(TEXTS[document])):
        if sought in data:
            return data.index(sought) + len(sought) // 2
    return len(data) * document // len(TEXTS)


def flip(name):
    data = bytearray(Path(name).read_bytes())
    data[place_of(data, 7)] ^= 0x80
    Path(name).write_bytes(data)


def cut(name):
    data = Path(name).read_bytes()
    with open(name, "r+b") as file:
        file.truncate(place_of(data, 15))


def empty(name):
    Path(name).write_bytes(b"")


GZIP, ZSTD = (".gz", gzip.compress), (".zst", zstandard.compress)
LATER, ALL = {*range(15, 24)}, {*range(24)}
CASES = {
    "flipped gzip": (GZIP, flip, {7}, "07.txt.gz: corrupt gzip"),
    "cut zstd": (ZSTD, cut, {7}, "07.txt.zst: the zstd data is cut short"),
    "emptied gzip": (GZIP, empty, {7}, "07.txt.gz: empty"),
    "deleted": ("text", os.remove, {7}, "07.txt: No such file"),
    "flipped jsonl": ("jsonl", flip, {7}, "a.jsonl: line 8: not UTF-8 at byte"),
    "cut jsonl": ("jsonl", cut, LATER, "a.jsonl: record {}: the file became shorter"),
    "cut separated": ("separated", cut, LATER, "a.separated: record {}: the file became shorter"),
    "flipped parquet": (
        "parquet",
        flip,
        {6, 7, 8},
        "a.parquet: record {}: its row group 2 is corrupt",
    ),
    "flipped array record": ("array_record", flip, {7}, "a.array_record: record 7: corrupt"),
    "flipped tokens": (None, flip, {7}, "a.array_record: record 7: corrupt"),
    "cut array record": (
        "array_record",
        cut,
        ALL,
        "a.array_record: record {}: not an intact ArrayRecord file",
    ),
    "flipped bagz": ("bagz", flip, None, "a.bagz: record {}: corrupt"),
    "cut bagz": ("bagz", cut, ALL, "a.bagz: record {}: not an intact Bagz file"),
}
"""By name: the kind of source, or the ending and function of compressed files, or None for tokens;
what is done to its file; the documents that are lost; what is said of each."""


@pytest.fixture(autouse=True)
def feeds(tmp_path, monkeypatch):
    """Makes feeds, in a folder of their own, and closes them."""
    monkeypatch.chdir(tmp_path)
    made = []

    def make(source, lanes=range(BATCH), evaluation=False, whole=False, **fields):
        cfg = DataConfig(
            sources=[source_of(**source), SyntheticSource(kind="synthetic", length=20)],
            **{"seq_len": ROW, "packing": "none"} | fields,
        )
        made.append(Feed(cfg, lanes, BATCH, evaluation=evaluation, whole=whole))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def documents(feed, batches):
    """Lane -> the first tokens of its documents, in order."""
    drawn = [next(feed)["tokens"] for _ in range(batches)]
    return [[tuple(row[:20]) for row in rows] for rows in zip(*drawn, strict=True)]


def number(document):
    """Position of a document in TEXTS; None for a synthetic one."""
    text = bytes(token for token in document if token < 128)
    return int(text.split()[1]) if text.startswith(b"document") else None


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_record_is_named_and_where_it_may_be_passed_over_all_others_keep_their_places(
    case, feeds
):
    what, damage, lost, words = CASES[case]
    if what is None:
        source, name = stored_tokens()
    else:
        source, name = written(what) if isinstance(what, str) else compressed(*what)
    intact = documents(feeds(source), 30)
    if of_copies := source["kind"] == "parquet":  # whose copies are made when they are opened
        damage(name)
    whole, strict = feeds(source, quarantine=24), feeds(source)
    halves = [feeds(source, quarantine=24, lanes=lanes) for lanes in (range(2), range(2, BATCH))]
    if not of_copies:
        damage(name)
    with pytest.raises(DataError, match="set data.quarantine to the number") as caught:
        documents(strict, 30)
    said = str(caught.value)
    assert all(part in said for part in words.split("{}")) and "\n" not in said

    got, told = documents(whole, 20), whole.skipped()
    lost = lost or {n for n in ALL if any(f"record {n}:" in line for line in told)}
    assert lost and len(told) == len(lost)
    for record in lost:
        assert any(words.format(record) in line for line in told)
    for lane in range(BATCH):
        left = [document for document in intact[lane] if number(document) not in lost]
        assert got[lane][: len(left)] == left[:20] and len(left) >= 10
    assert [*documents(halves[0], 20), *documents(halves[1], 20)] == got


@pytest.mark.parametrize("kind", ["array_record", "bagz"])
def test_a_file_that_is_cut_while_it_is_open_gives_an_error_and_no_empty_document(kind):
    source, name = written(kind)
    found = opened(**source)
    assert found[20] == TEXTS[20].encode()
    empty(name)
    says = f"{name}: record 20: the file became shorter while it was in use"
    with pytest.raises(DataError, match=says):
        found[20]


@pytest.mark.slow
def test_workers_tell_what_they_pass_over_once_and_change_nothing(feeds):
    source, name = written("jsonl")
    flip(name)
    alone, several = (
        feeds(source, quarantine=1, packing="concat", workers=workers) for workers in (0, 2)
    )
    for _ in range(40):
        expected, got = next(alone), next(several)
        assert all((expected[key] == got[key]).all() for key in {*expected, *got})
    (told,) = alone.skipped()
    assert told.startswith("data.quarantine: passed over a.jsonl: line 8: not UTF-8")
    assert several.skipped() == [told] and several.skipped() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_the_first_empty_document_of_a_source_is_told_and_the_others_are_not(workers, feeds):
    source, _ = written("text")
    for name in ("03.txt", "09.txt"):
        Path(name).write_text("")
    feed = feeds(source, shuffle=False, workers=workers)
    documents(feed, 30)
    assert feed.skipped() == [
        "data.sources: 03.txt is empty, with nothing to predict; it and all such documents of "
        "text-0 are passed over"
    ]
    documents(feed, 30)
    assert feed.skipped() == []


def test_a_document_damaged_while_it_is_half_read_is_passed_over(feeds):
    source = write_source("jsonl", [b"long" * 100, b"short"])
    feed = feeds(source, quarantine=1, packing="concat")
    while not feed.state()[0, -1] > 128:
        next(feed)
    again = feeds(source, quarantine=1, packing="concat")
    again.restore(feed.state())
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace("longlong", "long\\ong", 1))
    assert next(again)["positions"][0, 0] == 0 and "line 1" in again.skipped()[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_one_damaged_record_too_many_ends_the_run_however_they_spread_over_workers(workers, feeds):
    source, name = written("parquet")
    flip(name)
    feed = feeds(source, quarantine=2, workers=workers)
    says = "^3 records cannot be read, but data.quarantine=2 passes .*raise data.quarantine$"
    with pytest.raises(DataError, match=says):
        documents(feed, 60)


def test_every_evaluation_passes_over_the_same_and_tells_it_once(feeds):
    source, name = written("jsonl")
    flip(name)
    feed = feeds(source | {"holdout": 0.9}, evaluation=True, quarantine=1)
    start = feed.state()
    passes = []
    for _ in range(2):
        feed.restore(start)
        passes.append(documents(feed, 8))
    assert passes[0] == passes[1] and len(feed.skipped()) == 1
    with pytest.raises(DataError, match="set eval.data.quarantine"):
        documents(feeds(source, evaluation=True, whole=True), 8)
