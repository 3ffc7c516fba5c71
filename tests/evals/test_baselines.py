import gzip
import math
from collections import Counter

import numpy as np
import pytest

from maxstack.errors import DataError
from maxstack.evals.baselines import Order2, baselines
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


@pytest.mark.parametrize("text", [b"the cat", b"quite unseen \xff\x00", b"", b"t"])
def test_order2_is_witten_bell_interpolation(text):
    assert Order2(TRAIN).bits(text) == pytest.approx(by_hand(text), rel=1e-12)


def test_order2_gives_probabilities_that_sum_to_one():
    model = Order2(TRAIN)
    prefix = model.bits(b"th")
    assert sum(
        2 ** (prefix - model.bits(b"th" + bytes([last]))) for last in range(256)
    ) == pytest.approx(1, rel=1e-9)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for i in range(60):
        (tmp_path / f"{i}.txt").write_bytes(
            b" ".join(random.choice([b"alpha", b"beta", b"gamma"], 200))
        )
    return DataConfig(sources=[TextSource(kind="text", files=["*.txt"], holdout=0.2)])


def test_the_baselines_are_bits_per_byte_of_the_held_out_files(corpus, tmp_path):
    from maxstack.data.sources import open_source

    held = open_source(corpus.sources[0], split="eval")
    texts = [held[i] for i in range(len(held))]
    train = open_source(corpus.sources[0])
    model = Order2([train[i] for i in range(len(train))])
    found = baselines(corpus)
    assert found["gzip"] == pytest.approx(
        8 * sum(len(gzip.compress(text, 9)) for text in texts) / sum(map(len, texts))
    )
    assert found["order2"] == pytest.approx(sum(map(model.bits, texts)) / sum(map(len, texts)))
    assert found["order2"] < found["gzip"] < 8


def test_a_configuration_of_its_own_for_evaluation_is_read_whole(corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_bytes(b"alpha beta " * 50)
    evaluation = DataConfig(sources=[TextSource(kind="text", files=["other/*.md"])])
    assert (
        baselines(corpus, evaluation)["gzip"]
        == 8 * len(gzip.compress(b"alpha beta " * 50, 9)) / 550
    )


def test_the_training_text_is_bounded(corpus):
    assert baselines(corpus, train_bytes=30)["order2"] > baselines(corpus)["order2"] + 0.5


def test_held_out_files_without_text_are_an_error(corpus, tmp_path):
    (tmp_path / "empty.md").write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        baselines(corpus, DataConfig(sources=[TextSource(kind="text", files=["empty.md"])]))
