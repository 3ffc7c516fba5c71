"""Turns of clients at the places, pages and rows of an engine."""

from collections import Counter

import pytest
from scheduling import VOCAB, simulation


def crowded(streams=12, requests=4, pages=100, tokens=20, **rules):
    """With so many long requests of one client, that began."""
    made = simulation(pages=pages, requests=requests, rows=16, prefix_cache=False, **rules)
    for number in range(1, streams + 1):
        made.add(number, [0, 1, number % VOCAB], client="many", max_tokens=tokens)
    made.step()
    return made


def running(made):
    return Counter(sequence.client for sequence in made.scheduler.running)


@pytest.mark.parametrize("priority", [0, 5])
def test_a_request_of_another_client_gets_a_place_of_the_one_that_has_all(priority):
    made = crowded()
    made.add(99, [2], priority, client="one", max_tokens=3)
    for _ in range(5):
        made.step()
    assert 99 in made.ended and made.scheduler.preemptions == 1
    made.finish(200)
    made.check_end()


def test_places_are_shared_equally_and_then_none_is_taken():
    made = crowded(requests=5)
    for number in range(20, 30):
        made.add(number, [1, 2], client="other", max_tokens=20)
    for _ in range(6):
        made.step()
    assert running(made) == {"many": 3, "other": 2} and made.scheduler.preemptions == 2
    made.finish(300)
    assert made.scheduler.preemptions == 2
    made.check_end()


def test_clients_take_turns_at_a_single_place():
    made = simulation(pages=100, requests=1, rows=2)
    for number in range(1, 9):
        made.add(number, [0], client="first" if number < 7 else "second", max_tokens=4)
    made.finish(100)
    assert [*made.ended][:4] == [1, 7, 2, 8]


def test_the_client_that_has_most_running_gives_its_pages_back_first():
    made = crowded(streams=3, requests=4, pages=14, tokens=14)
    made.add(99, [2], client="one", max_tokens=12)
    sequence = made.sequences[99]
    made.finish(200)
    assert made.scheduler.preemptions > 0 and not sequence.preempted
    made.check_end()


def test_a_request_begins_beside_the_long_prompts_of_another_client():
    made = simulation(pages=100, requests=4)
    for number in range(1, 4):
        made.add(number, [number % VOCAB] * 36, client="many", max_tokens=1)
    made.step()
    made.add(99, [2, 1], client="one", max_tokens=1)
    for _ in range(3):
        made.step()
    assert 99 in made.ended and len(made.sequences) == 3
    made.finish(100)
    made.check_end()
