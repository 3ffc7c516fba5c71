import pytest

from maxstack.data.order import Order


@pytest.mark.parametrize("documents", [1, 7, 1000, 65536, 65537])
def test_each_epoch_is_a_permutation_and_no_two_are_the_same(documents):
    order = Order("0", documents)
    epochs = [
        [order[epoch * documents + place] for place in range(documents)] for epoch in range(2)
    ]
    assert all(sorted(epoch) == list(range(documents)) for epoch in epochs)
    assert documents == 1 or epochs[0] != epochs[1]


@pytest.mark.parametrize("documents", [1000, 65537, 70000])
def test_a_position_far_ahead_needs_no_walk(documents):
    assert 0 <= Order("0", documents)[10**12] < documents


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
