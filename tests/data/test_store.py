"""Data in an S3 store on loopback that fails in the ways of stores."""

import io
import logging

import pyarrow
import pyarrow.parquet
import pytest
import tiny_config
import yaml
from json_lines import lines_of_texts
from object_store import environment, served
from processes import rows
from source_files import opened, texts_of

from maxstack import cli, train
from maxstack.config import storage
from maxstack.data.feed import Feed
from maxstack.errors import DataError
from maxstack.report import goodput
from maxstack.schema.data import DataConfig

pytestmark = pytest.mark.slow  # moto and s3fs come with the extra test-all
TEXT = {"kind": "text", "files": ["s3://data/*.txt"]}
TEXTS = [f"document {i} of a store" for i in range(20)]


@pytest.fixture(scope="module")
def shared_store():
    with served() as store:
        yield store


@pytest.fixture
def store(shared_store, tmp_path, monkeypatch):
    """The proxy of a store with an empty bucket `data`."""
    import s3fs

    monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
    for variable, value in environment(shared_store).items():
        monkeypatch.setenv(variable, value)
    s3fs.S3FileSystem.clear_instance_cache()
    shared_store.fault = lambda method, path: None
    files = s3fs.S3FileSystem(use_listings_cache=False)
    if files.exists("data"):
        files.rm("data", recursive=True)
    files.mkdir("data")
    yield shared_store
    shared_store.fault = lambda method, path: None
    s3fs.S3FileSystem.clear_instance_cache()


def put(name, content):
    with storage.replacing(f"s3://data/{name}") as file:
        file.write_bytes(content)


def lines(texts=TEXTS):
    return lines_of_texts(texts).encode()


def read(kind="jsonl"):
    return texts_of(opened(kind, f"s3://data/*.{kind}"))


def times(count, happens, of="GET /data/a"):
    """A fault that happens to so many requests."""
    left = [count]

    def fault(method, path):
        if not f"{method} {path}".startswith(of) or not left[0]:
            return None
        left[0] -= 1
        return happens

    return fault


@pytest.mark.parametrize(("happens", "count"), [(503, 3), (429, 3), (0.5, 7)])
def test_what_passes_is_tried_again_and_told_once(store, caplog, happens, count):
    put("a.jsonl", lines())
    store.fault = times(count, happens)
    with caplog.at_level(logging.WARNING):
        assert read() == TEXTS
    told = [r.getMessage() for r in caplog.records if r.name == "maxstack.config.retries"]
    assert len(told) == 2, told
    assert told[0].startswith("s3://data does not answer: trying again for up to ")
    assert told[1].startswith("s3://data answers again after ")


def test_a_store_that_stays_away_is_an_error_after_the_time_for_it(store, monkeypatch):
    put("a.jsonl", lines())
    monkeypatch.setenv("MAXSTACK_RETRY_SECONDS", "0.5")
    store.fault = lambda method, path: 503
    with pytest.raises(
        DataError, match=r"^s3://data/\*.jsonl: cannot be listed: Service Unavailable"
    ):
        read()


def parquet(texts=TEXTS):
    file = io.BytesIO()
    table = pyarrow.table({"text": [*texts]})
    pyarrow.parquet.write_table(table, file, row_group_size=5, compression="none")
    return file.getvalue()


@pytest.mark.parametrize(("kind", "made"), [("jsonl", lines), ("parquet", parquet)])
def test_an_object_that_changes_while_it_is_copied_is_refused(store, kind, made):
    put(f"a.{kind}", made())

    def change():
        store.fault = lambda method, path: None
        put(f"a.{kind}", made(reversed(TEXTS)))

    store.fault = times(1, change)
    with pytest.raises(DataError, match=f"^s3://data/a.{kind}: changed while it was copied"):
        read(kind)
    assert read(kind) == TEXTS[::-1]


@pytest.mark.release
def test_a_run_waits_for_a_store_that_vanishes_and_books_the_time_to_data(store, tmp_path):
    for i in range(120):
        put(f"{i:03d}.txt", (f"text {i} " * 12).encode())
    base = tiny_config.of_one_kind()

    def run(name):
        cfg = {
            **base,
            "run": {"name": name, "output_dir": str(tmp_path), "trackers": []},
            "data": {"seq_len": 32, "prefetch": 1, "sources": [TEXT]},
            "train": {"steps": 10, "batch_size": 8},
            "optimizer": {"learning_rate": {"kind": "constant", "value": 0.01}},
        }
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(cfg))
        assert cli.run(train.main, [str(tmp_path / f"{name}.yml")]) == 0
        losses = [row["loss"] for row in rows(tmp_path / name)]
        return losses, goodput.so_far(tmp_path / name).seconds["data wait"]

    undisturbed, _ = run("undisturbed")
    store.requests.clear()
    begun, gone = len(undisturbed), []

    def fault(method, path):
        step = len(rows(tmp_path / "disturbed"))
        if step >= 3 and not gone:
            gone.append(step)
            store.vanish_for(6)
            return 503
        return None

    store.fault = fault
    disturbed, waited = run("disturbed")
    assert gone and begun == 10 and disturbed == undisturbed
    assert 3 < waited < 20
    told = (tmp_path / "disturbed" / "log.txt").read_text()
    assert "s3://data does not answer: trying again" in told


@pytest.mark.parametrize(
    ("status", "says"),
    [(403, "cannot be listed: .*(403|Forbidden|Denied)"), (404, "no such bucket")],
)
def test_what_does_not_pass_is_an_error_at_once(store, status, says):
    put("a.jsonl", lines())
    store.fault = lambda method, path: status
    store.requests.clear()
    with pytest.raises(DataError, match=says):
        read()
    assert len(store.requests) <= 4


def test_a_store_that_is_away_is_no_damaged_record(store, monkeypatch):
    for name in "ab":
        put(f"{name}.txt", name.encode() * 40)
    cfg = DataConfig.model_validate({"sources": [TEXT], "seq_len": 8, "quarantine": 9})
    feed = Feed(cfg, [0], 1)
    monkeypatch.setenv("MAXSTACK_RETRY_SECONDS", "0.2")
    store.fault = lambda method, path: 503
    with pytest.raises(DataError, match=r"s3://data/[ab].txt: .*(503|Unavailable|SlowDown)"):
        next(feed)
    feed.close()
