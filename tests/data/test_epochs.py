"""Whole epochs: documents dealt to lanes so that all come to the end together."""

import json
import math

import numpy as np
import pytest
from json_lines import write_texts
from tokenizer_files import byte_level

from maxstack.config import storage
from maxstack.data import epochs
from maxstack.data.deal import level_lanes
from maxstack.data.feed import Feed
from maxstack.data.mixture import Mixture
from maxstack.data.sources import open_sources
from maxstack.errors import ConfigError, DataError
from maxstack.load import load
from maxstack.objectives.objective import objective_of


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A run's configuration on so many documents of lognormal lengths, and those in tokens."""
    monkeypatch.setattr(storage, "cache_folder", lambda: tmp_path)

    def make(documents, batch, seq_len, passes, *overrides, sources=1):
        lengths, named = [], []
        for number in range(sources):
            drawn = np.random.default_rng(number).lognormal(5, 1.3, documents)
            lengths.append(np.clip(drawn, 12, 20 * seq_len).astype(int))
            texts = [f"{number} {i:08} ".ljust(size, "x") for i, size in enumerate(lengths[-1])]
            path = f"{tmp_path}/{number}.jsonl"
            write_texts(path, texts)
            named.append({"kind": "jsonl", "name": f"s{number}", "files": [path]})
        sections = {
            "data.sources": named,
            "data.seq_len": seq_len,
            "data.tokenizer": {"kind": "bytes"},
            "train.batch_size": batch,
            "train.epochs": passes,
        }
        given = [f"{key}={json.dumps(value)}" for key, value in sections.items()]
        return epochs.set_epochs(load("quickstart", [*given, *overrides])), lengths

    return make


def dealt(cfg, lanes=None):
    lanes = range(cfg.train.batch_size) if lanes is None else lanes
    return epochs.plan_epochs(cfg, lanes, objective_of(cfg).fields)


BOS = 256


def begun(batches):
    """Source and number of each document that begins in some batches."""
    for lane in range(len(batches[0]["tokens"])):
        rows = [batch["tokens"][lane][batch["segments"][lane] > 0] for batch in batches]
        tokens = np.concatenate(rows)
        for at in np.flatnonzero(tokens == BOS):
            yield bytes(tokens[at + 1 : at + 11].tolist())


def feed_of(cfg, dealt, lanes=None, **options):
    size = cfg.train.batch_size
    lanes = range(size) if lanes is None else lanes
    return Feed(cfg.data, lanes, size, plan=dealt, may_end=True, **options)


SHAPES = [(5000, 64, 128, 1), (5000, 64, 128, 3), (20000, 256, 128, 1), (3000, 32, 64, 1.5)]


@pytest.mark.parametrize(("documents", "batch", "seq_len", "passes"), [*SHAPES, (900, 8, 256, 2)])
def test_an_epoch_takes_at_most_3_percent_more_steps_than_its_tokens(
    documents, batch, seq_len, passes, made
):
    cfg, (lengths,) = made(documents, batch, seq_len, passes)
    steps, moves = dealt(cfg)
    assert lengths.sum() * math.floor(passes) / batch / seq_len <= steps
    assert steps <= math.ceil(1.03 * lengths.sum() * passes / batch / seq_len)
    found = dealt(cfg)
    assert found.steps == steps and np.array_equal(found.moves[0], moves[0])


@pytest.mark.parametrize("packing", ["concat", "fit", "best", "none"])
def test_every_document_comes_once_an_epoch_on_four_hosts_that_resume(packing, made):
    cfg, (one, _) = made(120, 8, 64, 2, f"data.packing={packing}", sources=2)
    shared = dealt(cfg)
    parts = [range(host, 8, 4) for host in range(4)]
    steps = max(dealt(cfg, part).steps for part in parts)
    seen = []
    for part in parts:
        feed, batches = feed_of(cfg, shared, part), []
        for step in range(steps):
            if step == steps // 2:
                state = feed.state()
                feed.close()
                feed = feed_of(cfg, shared, part)
                feed.restore(state)
            batches.append(next(feed))
        assert not next(feed)["segments"].any()
        feed.close()
        seen += begun(batches)
    assert len(seen) == 4 * len(one) and len({*seen}) == 2 * len(one)
    assert sorted(seen) == sorted([*{*seen}] * 2)


def test_an_epoch_of_code_is_measured_as_it_is_infilled(made, tmp_path):
    marks = [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix")]
    byte_level(marks).save(path := str(tmp_path / "tokenizer.json"))
    settings = json.dumps({"kind": "huggingface", "path": path, "bos": None, "eos": None})
    middle = 'data.sources.0.fill_in_the_middle={"rate": 0.5}'
    cfg, (lengths,) = made(400, 8, 64, 2, middle, f"data.tokenizer={settings}")
    found = dealt(cfg)
    feed = feed_of(cfg, found)
    batches = [next(feed) for _ in range(found.steps)]
    assert not next(feed)["segments"].any() and batches[-1]["segments"].any()
    feed.close()
    tokens = sum((batch["segments"] > 0).sum() for batch in batches)
    infilled = tokens - 2 * (lengths.sum() - 400)
    assert 300 < infilled / 3 < 500 and found.steps <= math.ceil(1.03 * tokens / 8 / 64)


def test_lengths_that_processes_measured_in_turn_are_joined():
    units = [[5], [], [2, 3], [7], [1, 1, 1], [4], [9]]
    counts, tokens = np.zeros((3, 3), np.int32), np.zeros((3, 6), np.int32)
    for process in range(3):
        own = units[process::3]
        counts[process, : len(own)] = [len(each) for each in own]
        flat = [length for each in own for length in each]
        tokens[process, : len(flat)] = flat
    found = epochs.join_lengths(counts, tokens, len(units))
    spans = zip(found.ends[:-1], found.ends[1:], strict=True)
    assert [found.tokens[begin:end].tolist() for begin, end in spans] == units


def test_a_run_by_epochs_goes_on_with_the_same_epochs_of_the_same_data_alone(made):
    def mixture(passes, *overrides, documents=200, shared=True):
        cfg, _ = made(documents, 4, 64, passes, *overrides)
        found = dealt(cfg) if shared else None
        return Mixture(cfg.data, open_sources(cfg.data), 4, False, "data", {}, plan=found)

    one, by_steps = mixture(1), mixture(1, shared=False)
    saved = one.described()
    mixture(1).check_deal(saved)
    by_steps.check_deal(by_steps.described())
    for now, before, told in (
        (by_steps, saved, "shared out to its rows for [0-9]+ steps"),
        (one, by_steps.described(), "without it, .* go on by train.steps"),
        (mixture(2), saved, "put train.epochs and the data back"),
        (mixture(1, "data.sources.0.epochs=2"), saved, "put train.epochs and the data back"),
        (mixture(1, "data.seq_len=65"), saved, "put train.epochs and the data back"),
        (mixture(1, documents=150), saved, "s0: has other documents"),
    ):
        with pytest.raises(ConfigError, match=told):
            now.check_deal(before)


def test_pictures_and_equal_documents_are_bound_to_their_epochs_too(made, monkeypatch):
    monkeypatch.setattr(
        epochs, "level_lanes", lambda passes, sources, lanes: level_lanes((), sources, lanes)
    )
    one, two = (
        Mixture(cfg.data, open_sources(cfg.data), 4, False, "data", {}, plan=dealt(cfg))
        for cfg in (made(10, 4, 64, 1)[0], made(10, 4, 64, 2)[0])
    )
    with pytest.raises(ConfigError, match="put train.epochs"):
        two.check_deal(one.described())


def test_epochs_of_nothing_to_learn_from_are_an_error_of_the_data(made, tmp_path):
    cfg, _ = made(3, 4, 64, 1, 'data.tokenizer={"kind": "bytes", "eos": false}')
    (tmp_path / "0.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match=r"^train.epochs: nothing to predict: .*0.jsonl: line 1"):
        dealt(cfg)
