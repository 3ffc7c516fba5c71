import numpy as np
import pytest

from maxstack.data.mixture import Mixture
from maxstack.data.order import EVEN, Order
from maxstack.data.position import Part, Sources
from maxstack.data.sources import open_sources
from maxstack.schema.data import DataConfig


@pytest.mark.parametrize("seed", ["0", f"0{EVEN}"])
@pytest.mark.parametrize("documents", [1, 7, 1000, 65536, 65537])
def test_each_epoch_is_a_permutation_and_no_two_are_the_same(documents, seed):
    order = Order(seed, documents)
    epochs = [
        [order[epoch * documents + place] for place in range(documents)] for epoch in range(2)
    ]
    assert all(sorted(epoch) == list(range(documents)) for epoch in epochs)
    assert documents == 1 or epochs[0] != epochs[1]


def test_the_order_stays_what_it_was_in_earlier_releases():
    assert [Order("0 shuffle 0", 10)[place] for place in range(20)] == [
        2,
        4,
        0,
        9,
        6,
        7,
        5,
        3,
        8,
        1,
        1,
        2,
        7,
        5,
        6,
        9,
        0,
        8,
        4,
        3,
    ]
    assert [Order("0 shuffle 0", 100_000)[place] for place in range(4)] == [
        58158,
        87531,
        7361,
        51878,
    ]


DRAWN, BATCH = 40_000, 512
SIZES = [65_537, 131_073, 200_000, 262_145, 1_000_000, 3_000_000, 4**11 + 1]


def drawn(documents, seed="0 shuffle text-0", epoch=0):
    order = Order(f"{seed}{EVEN}", documents)
    first = epoch * documents
    return np.array([order[first + place] for place in range(DRAWN)], np.float64)


def deviations(first, second):
    """Correlation of two rows, in deviations of that of independent ones."""
    return abs(np.corrcoef(first, second)[0, 1]) * len(first) ** 0.5


def lagged(places):
    """The largest correlation at lags 1 to 1,024, in deviations."""
    normed = (places - places.mean()) / places.std()
    spectrum = np.fft.rfft(normed, 2 * len(normed))
    return np.abs(np.fft.irfft(np.abs(spectrum) ** 2)[1:1025]).max() / len(normed) ** 0.5


@pytest.mark.parametrize("documents", SIZES)
def test_the_order_of_many_documents_is_as_random_as_numpys(documents):
    """Bounds that numpy's permutations keep in 999 of 1,000 draws: of 1,024 lags none is beyond
    5.2 deviations, of one comparison 3.9."""
    places = drawn(documents)
    assert len({*places}) == DRAWN and lagged(places) < 5.2
    batches = places[: DRAWN // BATCH * BATCH].reshape(-1, BATCH)
    assert deviations(batches[:-1].ravel(), batches[1:].ravel()) < 3.9  # along the lanes
    half = (batches < documents / 2).sum(1) - BATCH / 2
    spread = half.var() / (BATCH / 4)  # of batches between the halves of the corpus
    assert abs(spread - 1) < 3.9 * (2 / len(half)) ** 0.5
    for other in (drawn(documents, epoch=1), drawn(documents, "1 shuffle text-0")):
        assert deviations(places, other) < 3.9
    assert deviations(places, drawn(documents, "0 shuffle text-1")) < 3.9


def test_four_rounds_would_not_pass():
    order = Order("0 shuffle text-0", 1_000_000)
    places = np.array([order[place] for place in range(DRAWN)], np.float64)
    assert lagged(places) > 40


def test_runs_that_began_with_the_older_order_go_on_with_it():
    source = {"kind": "synthetic", "documents": 70_000, "length": 4}
    cfg = DataConfig.model_validate({"sources": [source], "seq_len": 8})
    mixture = Mixture(cfg, open_sources(cfg), 1, False, "data", {})
    fresh = mixture.locate(0, 5)
    (part,) = mixture._parts
    assert EVEN in part.key
    before = Sources([Part(part.source, part.name, "0", part.identity, part.files)])
    mixture.adopt(before, mixture.start(1), 3)
    assert mixture.locate(0, 5) == (0, Order("0 shuffle 0", 70_000)[5]) != fresh
