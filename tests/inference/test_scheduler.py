"""The scheduler: every request is computed from its own tokens, whatever runs beside it."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
from scheduling import (
    LONGEST,
    REACHES,
    VOCAB,
    Simulation,
    drafts,
    layout_of,
    least_pages,
    simulation,
)

from maxstack.errors import ConfigError
from maxstack.inference.page_cache import Limits


@dataclasses.dataclass
class Arrival:
    step: int
    prompt: list[int]
    priority: int
    adapter: int
    client: str
    max_tokens: int
    prompt_logprobs: int | None
    abort: int | None


@st.composite
def arrivals(draw):
    """Requests whose prompts begin alike, with the step in which each comes, and may leave."""
    text = draw(st.lists(st.integers(0, VOCAB - 1), min_size=LONGEST, max_size=LONGEST))
    made = []
    for _ in range(draw(st.integers(1, 7))):
        same = draw(st.integers(0, 25))
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=not same, max_size=8))
        made.append(
            Arrival(
                step=draw(st.integers(0, 12)),
                prompt=draw(st.sampled_from([[*text[:same], *own], *(old.prompt for old in made)])),
                priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
                adapter=draw(st.sampled_from([0, 0, 0, 1])),
                client=draw(st.sampled_from("aaabc")),
                max_tokens=draw(st.integers(1, 20)),
                prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
                abort=draw(st.none() | st.integers(0, 20)),
            )
        )
    return made


@st.composite
def engines(draw):
    """A layout, and limits with hardly more pages than a single request needs."""
    recurrent, page = draw(st.booleans()), draw(st.sampled_from([2, 4]))
    layout, rows = layout_of(draw(st.sampled_from(REACHES)), recurrent), draw(st.integers(1, 9))
    pages = tuple(
        least_pages(reach, rows, page) + draw(st.integers(0, 8)) for reach in layout.reaches
    )
    limits = Limits(
        rows, page, pages, requests=draw(st.integers(1, 4)),
        snapshots=draw(st.integers(0, 3)) if recurrent else 0,
        snapshot=page * draw(st.integers(1, 3)),
        prefix_cache=draw(st.sampled_from([True, True, False])),
    )  # fmt: skip
    sizes = draw(st.sampled_from([(), (1, rows), (1, 1 + rows // 2, rows)]))
    return layout, limits, draw(st.integers(1, 2)), drafts if draw(st.booleans()) else None, sizes


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(engines(), arrivals(), st.booleans(), st.sampled_from([1, 2, 7]))
@pytest.mark.slow
def test_every_request_reads_its_own_tokens_and_ends(engine, requests, share_prompts, many):
    layout, limits, replicas, draft, sizes = engine
    draft = None if layout.recurrent or many > 1 else draft
    made = Simulation(layout, limits, replicas, draft, sizes, share_prompts, many)
    for now in range(33):
        for number, request in enumerate(requests, 1):
            if request.step == now:
                rules = {"max_tokens": request.max_tokens}
                rules["prompt_logprobs"] = request.prompt_logprobs
                who = request.priority, request.adapter, request.client
                made.add(number, request.prompt, *who, **rules)
            elif request.abort is not None and request.step + request.abort == now:
                made.abort(number)
        made.step()
    made.finish(4 * LONGEST * len(requests))
    made.check_end()


def test_a_prompt_that_begins_as_another_computes_only_the_rest():
    made = simulation(pages=20)
    made.add(1, [0, 1, 2, 0, 1], max_tokens=2)
    made.finish(10)
    made.add(2, [0, 1, 2, 0, 2], max_tokens=1)
    made.step()
    assert made.ended[2].cached == made.scheduler.hits == 4


def test_a_snapshot_lets_a_recurrent_model_take_up_a_prefix():
    made = simulation(pages=20, recurrent=True, snapshots=1, snapshot=6)
    made.add(1, [0, 1, 2, 0, 1, 1, 2, 2], max_tokens=1)
    made.finish(10)
    made.add(2, [0, 1, 2, 0, 1, 1, 2, 2], max_tokens=1)
    made.finish(10)
    assert made.ended[2].cached == 6


def test_without_snapshots_a_recurrent_model_computes_every_prefix():
    made = simulation(pages=20, recurrent=True)
    for number in (1, 2):
        made.add(number, [0, 1, 2, 0, 1], max_tokens=1)
        made.finish(10)
    assert made.ended[2].cached == 0


@pytest.mark.parametrize(
    ("waiting", "guesses", "rows"),
    [
        (0, 0, [1, 1]),
        (0, 3, [4, 4]),  # each has room for its guesses
        (5, 0, [1, 1, 5]),  # 7 tokens: a step of 8
        (14, 0, [1, 1, 6]),  # 16 tokens would fill half of 32: a step of 8
        (15, 0, [1, 1, 15]),
    ],
)
def test_a_step_has_the_rows_of_the_size_that_costs_least(waiting, guesses, rows):
    made = simulation(pages=60, rows=32, draft=drafts if guesses else None)
    made.sizes = 1, 2, 8, 32
    for number in (1, 2):
        made.add(number, [number], max_tokens=9)
    made.step()
    if waiting:
        made.add(3, [0] * waiting, max_tokens=9)
    chunks, _ = made.scheduler.schedule(made.sizes, guesses)
    assert [chunk.size for chunk in chunks] == rows


def test_right_drafts_save_steps():
    made = simulation(pages=20, draft=drafts)
    made.add(1, [0, 1], max_tokens=12)
    made.finish(8)
    assert made.counts["accepted"] >= 4


def test_drafts_for_recurrent_layers_are_refused():
    with pytest.raises(ConfigError, match="serve.speculate: the model has recurrent layers"):
        simulation(pages=20, draft=drafts, recurrent=True)


@pytest.mark.parametrize("priorities, first", [((0, 0), 2), ((1, 0), 1)])
def test_the_youngest_of_the_lowest_priority_gives_its_pages_back(priorities, first):
    made = simulation(pages=5, prefix_cache=False)
    for number, priority in enumerate(priorities, 1):
        made.add(number, [0, 1], priority, max_tokens=6)
    sequences = dict(made.sequences)
    made.finish(40)
    assert {number for number, sequence in sequences.items() if sequence.preempted} == {first}
    made.check_end()


def test_drafts_take_no_pages_from_other_requests():
    made = simulation(pages=4, draft=lambda sequence: [VOCAB] * 3 * (sequence.number - 1))
    made.add(1, [0, 1, 2, 0], max_tokens=3)
    made.step()
    made.add(2, [2], max_tokens=4)
    made.finish(10)
    assert made.scheduler.preemptions == 0


def test_a_request_preempted_after_its_turn_is_computed_once_in_a_step():
    made = simulation(pages=5, prefix_cache=False)
    made.add(2, [0, 1, 2, 0], max_tokens=4)
    made.step()
    made.add(1, [1] * 5, max_tokens=1)
    made.step()
    made.step()
    assert made.scheduler.preemptions == 1 and made.sequences[2] in made.scheduler.running
    made.finish(20)
    made.check_end()


def test_a_request_goes_to_a_replica_with_room_before_one_with_its_prefix():
    made = simulation(pages=4, replicas=2)
    made.add(1, [0, 1, 2, 0, 1], max_tokens=3)
    made.step()
    made.step()
    made.add(2, [0, 1, 2, 0, 1, 1, 2, 2], max_tokens=1)
    made.step()
    assert len({sequence.replica for sequence in made.scheduler.running}) == 2
