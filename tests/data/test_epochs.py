"""Whole epochs: documents dealt to lanes so that all come to the end together."""

import json
import math

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from maxstack.config import storage
from maxstack.data import epochs
from maxstack.data.deal import Deal, Pass, level
from maxstack.data.feed import Feed
from maxstack.data.mixture import Mixture
from maxstack.data.sources import open_sources
from maxstack.errors import ConfigError
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
            path = tmp_path / f"{number}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            named.append({"kind": "jsonl", "name": f"s{number}", "files": [str(path)]})
        sections = {
            "data.sources": named,
            "data.seq_len": seq_len,
            "data.tokenizer": {"kind": "bytes"},
            "train.batch_size": batch,
            "train.epochs": passes,
        }
        given = [f"{key}={json.dumps(value)}" for key, value in sections.items()]
        return epochs.with_epochs(load("quickstart", [*given, *overrides])), lengths

    return make


def dealt(cfg, lanes=None):
    lanes = range(cfg.train.batch_size) if lanes is None else lanes
    return epochs.dealt(cfg, lanes, objective_of(cfg).fields)


BOS = 256


def begun(batches):
    """Source and number of each document that begins in some batches."""
    for lane in range(len(batches[0]["tokens"])):
        rows = [batch["tokens"][lane][batch["segments"][lane] > 0] for batch in batches]
        tokens = np.concatenate(rows)
        for at in np.flatnonzero(tokens == BOS):
            yield bytes(tokens[at + 1 : at + 11].tolist())


def feed_of(cfg, moves, lanes=None, **options):
    size = cfg.train.batch_size
    lanes = range(size) if lanes is None else lanes
    return Feed(cfg.data, lanes, size, moves=moves, may_end=True, **options)


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
    moves = dealt(cfg).moves
    parts = [range(host, 8, 4) for host in range(4)]
    steps = max(dealt(cfg, part).steps for part in parts)
    seen = []
    for part in parts:
        feed, batches = feed_of(cfg, moves, part), []
        for step in range(steps):
            if step == steps // 2:
                state = feed.state()
                feed.close()
                feed = feed_of(cfg, moves, part)
                feed.restore(state)
            batches.append(next(feed))
        assert not next(feed)["segments"].any()
        feed.close()
        seen += begun(batches)
    assert len(seen) == 4 * len(one) and len({*seen}) == 2 * len(one)
    assert sorted(seen) == sorted([*{*seen}] * 2)


def test_an_epoch_of_code_is_measured_as_it_is_infilled(made, tmp_path):
    letters = {letter: i for i, letter in enumerate("0123456789xĠ")}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = [f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix")]
    tokenizer.add_special_tokens([AddedToken(mark) for mark in marks])
    tokenizer.save(path := str(tmp_path / "tokenizer.json"))
    settings = json.dumps({"kind": "huggingface", "path": path, "bos": None, "eos": None})
    middle = 'data.sources.0.fill_in_the_middle={"rate": 0.5}'
    cfg, (lengths,) = made(400, 8, 64, 2, middle, f"data.tokenizer={settings}")
    steps, moves = dealt(cfg)
    feed = feed_of(cfg, moves)
    batches = [next(feed) for _ in range(steps)]
    assert not next(feed)["segments"].any() and batches[-1]["segments"].any()
    feed.close()
    tokens = sum((batch["segments"] > 0).sum() for batch in batches)
    infilled = tokens - 2 * (lengths.sum() - 400)
    assert 300 < infilled / 3 < 500 and steps <= math.ceil(1.03 * tokens / 8 / 64)


@pytest.mark.parametrize(("documents", "lanes"), [(1000, 7), (64, 64), (5, 8), (3000, 100)])
def test_a_deal_gives_each_place_to_one_lane_in_order(documents, lanes):
    lengths = np.random.default_rng(0).lognormal(5, 1.5, (2, documents)).round()
    limits = 2 * documents, documents + documents // 2
    passes = [
        Pass(source, first, lengths[source][: limits[source] - first])
        for first in (0, documents)
        for source in (0, 1)
    ]
    longest = lengths.max()
    all_moves = level(passes, 2, lanes)
    for source, (limit, moves) in enumerate(zip(limits, all_moves, strict=True)):
        deal = Deal(lanes, limit, moves)
        own = [
            [deal.place(lane, number) for number in range(int(deal.count(lane)))]
            for lane in range(lanes)
        ]
        assert sorted(place for places in own for place in places) == [*range(limit)]
        assert all(places == sorted(places) for places in own)
        assert np.array_equal(level(passes[:2], 2, lanes)[source], moves[moves[:, 0] < documents])
    totals = np.zeros(lanes)
    for (source, first, sizes), moves in ((each, all_moves[each.source]) for each in passes):
        taker = np.arange(limits[source]) % lanes
        taker[moves[:, 0]] = moves[:, 1]
        totals += np.bincount(taker[first : first + len(sizes)], sizes, lanes)
    assert totals.max() <= max(1.01 * totals.mean(), totals.mean() + longest)


def test_lengths_that_processes_measured_in_turn_are_joined():
    units = [[5], [], [2, 3], [7], [1, 1, 1], [4], [9]]
    counts, tokens = np.zeros((3, 3), np.int32), np.zeros((3, 6), np.int32)
    for process in range(3):
        own = units[process::3]
        counts[process, : len(own)] = [len(each) for each in own]
        flat = [length for each in own for length in each]
        tokens[process, : len(flat)] = flat
    found = epochs.joined(counts, tokens, len(units))
    spans = zip(found.ends[:-1], found.ends[1:], strict=True)
    assert [found.tokens[begin:end].tolist() for begin, end in spans] == units


def test_a_run_goes_on_with_more_epochs_and_not_with_another_deal(made):
    def mixture(passes, documents=200, dealt_out=True):
        cfg, _ = made(documents, 4, 64, passes)
        moves = dealt(cfg).moves if dealt_out else None
        return Mixture(cfg.data, open_sources(cfg.data), 4, False, "data", {}, moves=moves)

    one = mixture(1)
    saved, state = one.described(), one.start(4)
    for again in (mixture(1), mixture(3)):
        assert np.array_equal(again.adopt(saved, state, 0), state)
    in_turn = mixture(1, dealt_out=False).described()
    for now, before in (
        (mixture(1, dealt_out=False), saved),
        (mixture(1), in_turn),
        (mixture(2), mixture(1.5).described()),
        (mixture(1, documents=150), saved),
    ):
        told = "go on by train.steps" if before is in_turn else "keep or raise the train.epochs"
        with pytest.raises(ConfigError, match=told):
            now.adopt(before, state, 0)
