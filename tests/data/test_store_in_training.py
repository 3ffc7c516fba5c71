"""A run whose documents lie in a store that vanishes for a while."""

import os
import threading
import time

import pytest
import tiny_config
import yaml
from object_store import served
from processes import rows

from maxstack import cli, train
from maxstack.config import storage
from maxstack.report.goodput import summary

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("MAXSTACK_TESTS_VANISH_SECONDS", "5"))
"""How long the store is away; 30 by hand."""


@pytest.fixture
def store(tmp_path, monkeypatch):
    import s3fs

    with served() as store:
        monkeypatch.setenv("MAXSTACK_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("data")
        yield store
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_run_waits_for_a_store_that_vanishes_and_the_time_is_of_data(store, tmp_path, capsys):
    for number in range(40):
        with storage.replacing(f"s3://data/{number:02}.txt") as file:
            file.write_text(f"document {number} " * (5 + number))
    cfg = yaml.safe_load(tiny_config.TINY)
    cfg["data"] |= {"sources": [{"kind": "text", "files": ["s3://data/*.txt"]}], "seq_len": 32}
    cfg["train"] |= {"steps": 40}
    cfg["run"] = {"output_dir": str(tmp_path), "trackers": []}
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(cfg))

    def vanishing():
        while len(rows(tmp_path / "away")) < 5:
            time.sleep(0.02)
        store.vanish_for(SECONDS)

    assert cli.run(train.main, [str(path), "run.name=there"]) == 0
    threading.Thread(target=vanishing, daemon=True).start()
    assert cli.run(train.main, [str(path), "run.name=away"]) == 0
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("there", "away")]
    assert losses[0] == losses[1] and len(losses[0]) == 40
    waited = [summary(tmp_path / name).seconds["data wait"] for name in ("there", "away")]
    print(f"seconds of data: {waited}")
    assert SECONDS - 1 < waited[1] - waited[0] < SECONDS + 16
    told = (tmp_path / "away" / "log.txt").read_text() + capsys.readouterr().err
    assert "s3://data does not answer: trying again for up to" in told
