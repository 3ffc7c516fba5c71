"""Compressors beside a model's bits per byte."""

import gzip
import math
from collections import Counter

import numpy as np
import pytest

from maxstack.data.sources import open_source
from maxstack.errors import DataError
from maxstack.evals import baselines
from maxstack.schema.data import DataConfig, TextSource

TRAIN = [b"the cat sat on the mat", b"the hat that the cat had", b""]


def by_hand(text):
    """Witten-Bell with dictionaries."""
    counts = {order: {} for order in (0, 1, 2)}
    for document in TRAIN:
        padded = b"\0\0" + document
        for i in range(2, len(padded)):
            for order in counts:
                counts[order].setdefault(padded[i - order : i], Counter())[padded[i]] += 1
    padded, bits = b"\0\0" + text, 0.0
    for i in range(2, len(padded)):
        chance = 1 / 256
        for order in (0, 1, 2):
            seen = counts[order].get(padded[i - order : i])
            if seen:
                chance = (seen[padded[i]] + len(seen) * chance) / (seen.total() + len(seen))
        bits -= math.log2(chance)
    return bits


@pytest.mark.parametrize("text", [b"the cat", b"quite unseen \xff\x00", b""])
def test_order2_is_witten_bell_interpolation(text):
    assert baselines.Order2(TRAIN).bits(text) == pytest.approx(by_hand(text), rel=1e-12)


def test_baselines_are_bits_per_byte_of_held_out_files(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for i in range(60):
        words = random.choice([b"alpha", b"beta", b"gamma"], 200)
        (tmp_path / f"{i}.txt").write_bytes(b" ".join(words))
    (tmp_path / "other.md").write_bytes(b"alpha beta " * 50)
    (tmp_path / "empty.md").write_bytes(b"")
    cfg = DataConfig(sources=[TextSource(kind="text", files=[f"{tmp_path}/*.txt"], holdout=0.2)])
    held = open_source(cfg.sources[0], split="eval")
    texts = [held[i] for i in range(len(held))]
    found, total = baselines.baselines(cfg), sum(map(len, texts))
    zipped = sum(len(gzip.compress(text, 9)) for text in texts)
    assert found["gzip"] == pytest.approx(8 * zipped / total)
    train = open_source(cfg.sources[0])
    model = baselines.Order2([train[i] for i in range(len(train))])
    assert found["order2"] == pytest.approx(sum(map(model.bits, texts)) / total)

    def evaluation(name):
        return DataConfig(sources=[TextSource(kind="text", files=[f"{tmp_path}/{name}"])])

    own = baselines.baselines(cfg, evaluation("other.md"))
    assert own["gzip"] == 8 * len(gzip.compress(b"alpha beta " * 50, 9)) / 550
    with pytest.raises(DataError, match="empty"):
        baselines.baselines(cfg, evaluation("empty.md"))
    monkeypatch.setattr(baselines, "TRAIN_BYTES", 30)
    assert baselines.baselines(cfg)["order2"] > found["order2"] + 0.5
