"""Datasets of Grain as sources, and batches as a dataset of Grain."""

import json
import subprocess
import sys
import types
from pathlib import Path

import documents
import grain
import numpy as np
import pytest
import tiny

from maxstack.data.dataset import Batches
from maxstack.data.feed import Feed
from maxstack.data.sources import open_source
from maxstack.errors import ConfigError, DataError

TEXTS = [f"text {i}" for i in range(40)]


def texts():
    return grain.MapDataset.source(TEXTS).map(lambda text: f"{text}!").filter(_kept)


def _kept(text):
    return not text.startswith("text 7")


def rows():
    return grain.MapDataset.source([{"question": text, "answer": np.int64(3)} for text in TEXTS])


def ids():
    return grain.MapDataset.range(40).map(lambda i: np.arange(2, i % 5 + 4))


def endless():
    return texts().repeat()


def iterated():
    return texts().to_iter_dataset()


def cfg(call, **changes):
    source = {"kind": "grain", "call": f"{__name__}:{call}"} | changes.pop("source", {})
    data = {"sources": [source], "seq_len": 16, "tokenizer": {"kind": "bytes"}} | changes
    return tiny.config(data=data, train={"batch_size": 4})


@pytest.fixture(autouse=True)
def by_its_name(monkeypatch):
    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


def test_elements_are_documents_with_their_transforms_and_without_what_is_filtered():
    data = cfg("texts", source={"holdout": 0.2}).data
    train, held = (open_source(data.sources[0], split=split) for split in ("train", "eval"))
    found = {bytes(each[i]) for each in (train, held) for i in range(len(each))}
    wanted = {f"{text}!".encode() for text in TEXTS if _kept(text)}
    assert found == wanted | {b""} and 0 < len(held) < 20
    batches = [next(feed) for feed in [Feed(data, range(4), 4)] for _ in range(3)]
    assert all(batch["segments"].all() for batch in batches)


def test_records_and_ids_are_read():
    record = cfg("rows", source={"record": {"preset": "qa", "kind": "prompts"}}).data
    assert json.loads(open_source(record.sources[0])[3]) == {"question": "text 3", "answer": 3}
    named = cfg("rows", source={"field": "question"}).data
    assert open_source(named.sources[0])[3] == b"text 3"
    assert open_source(cfg("ids").data.sources[0])[1].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("call", "source", "error", "said"),
    [
        ("endless", {}, ConfigError, "repeats without end; leave repeat"),
        ("iterated", {}, ConfigError, "is an IterDataset, which gives no element by its number"),
        ("cfg", {}, TypeError, "missing"),
        ("rows", {}, DataError, r"rows\(\)\[0\]: no text in it; it has question, answer"),
        ("nothing", {}, DataError, "nothing"),
    ],
)
def test_what_is_no_source_is_told(call, source, error, said):
    with pytest.raises(error, match=said):
        open_source(cfg(call, source=source).data.sources[0])[0]


def test_batches_go_on_from_a_state_and_are_shared_among_processes():
    config = cfg("texts")
    whole = iter(Batches(config))
    first, state, second = next(whole), whole.get_state(), next(whole)
    parts = [iter(Batches(config, process=i, processes=2)) for i in range(2)]
    both = [next(part) for part in parts]
    for name in first:
        np.testing.assert_array_equal(first[name], np.concatenate([part[name] for part in both]))
    whole.set_state(json.loads(json.dumps(state)))
    np.testing.assert_array_equal(next(whole)["tokens"], second["tokens"])
    with pytest.raises(ValueError, match="must divide 4 rows"):
        Batches(config, processes=3)


def test_an_evaluation_is_one_pass():
    found = [*Batches(cfg("texts", source={"holdout": 0.3}), evaluation=True)]
    assert found and all(batch["segments"].any() for batch in found)


def test_the_page_shows_what_works(tmp_path):
    documents.write_files(Path(documents.__file__).parents[1] / "docs" / "DATA.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("batches go on from a state\n"), done.stderr
    words = ["data", "show", "grain.yml", "--rows", "1"]
    program = Path(sys.executable).with_name("maxstack")
    shown = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True)
    assert "OF THE SOURCE" in shown.stdout, shown.stderr
