"""The scheduler alone, beside a cache that remembers what was written into every page."""

import dataclasses
import hashlib
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest

from maxstack.errors import ConfigError
from maxstack.inference.layout import Layout
from maxstack.inference.request import Sampling
from maxstack.inference.scheduler import Limits, PageCopy, Piece, Scheduler, Task
from maxstack.schema.mixers import Reach
from maxstack.schema.parts import Cached, Dim

LONGEST, VOCAB = 40, 3
PAGED = {"pages": Cached((Dim("", 4),))}
STATE = {"state": Cached((Dim("", 4),), per_request=True)}
REACHES = (
    (Reach(),),
    (Reach(window=5),),
    (Reach(chunk=8),),
    (Reach(), Reach(window=3)),
    (Reach(), Reach(chunk=8)),
    (Reach(window=6), Reach(chunk=4)),
)


def layout_of(reaches, recurrent=False):
    arrays = (*[PAGED] * len(reaches), *[STATE] * recurrent)
    groups = (*range(len(reaches)), *[0] * recurrent)
    return Layout(tuple(range(len(arrays))), arrays, groups, reaches, "float32")


def least_pages(reach, rows, page):
    """Pages with which a request of any length can run alone."""
    read = reach.window or reach.chunk or LONGEST
    return min(-(-LONGEST // page), -(-(read + rows) // page) + 1)


def after(tokens, adapter):
    """Contents of the cache, or the state, after these tokens of a text."""
    return hashlib.blake2b(bytes([adapter, *tokens]), digest_size=16).digest()


def chosen(tokens):
    """The token that follows a text."""
    return hashlib.blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def drafts(task):
    """Guesses of the next tokens, one in a few of them wrong."""
    text, guesses = list(task.tokens), []
    left = min(task.prompt + task.sampling.max_tokens, LONGEST) - len(text) - 1
    for _ in range(min(3, left)):
        text.append((chosen(text) + (len(text) % 4 == 0)) % VOCAB)
        guesses.append(text[-1])
    return guesses


class Simulation:
    """Runs the scheduler as the engine does, and checks every step."""

    def __init__(self, layout, limits, replicas=1, draft=None, sizes=(), twins=False, many=1):
        self.layout, self.limits, self.draft, self.sizes = layout, limits, draft, sizes
        self.scheduler, self.many = Scheduler(layout, limits, replicas, draft, twins), many
        self.written, self.states = {}, {}
        self.tasks, self.prompts, self.ended, self.counts = {}, {}, {}, Counter()

    def add(self, number, prompt, priority=0, adapter=0, client="", **rules):
        task = Task(number, list(prompt), len(prompt), Sampling(**rules), priority, adapter, client)
        self.tasks[number], self.prompts[number] = task, list(prompt)
        self.scheduler.add(task)

    def abort(self, number):
        if task := self.tasks.pop(number, None):
            self.scheduler.remove(task)

    def finish(self, steps):
        for _ in range(steps):
            if not self.tasks:
                return
            self.step()
        raise AssertionError(f"{len(self.tasks)} requests have not ended after {steps} steps")

    def step(self):
        guesses = 3 if self.draft else 0
        pieces, copies = self.scheduler.schedule(self.sizes, guesses, prompts=self.many > 1)
        assert pieces or not self.tasks, "requests wait, and none is computed"
        self._copy(copies)
        self._check_pieces(pieces)
        self._check_pages()
        if (
            pieces
            and self.many > 1
            and all(len(task.tokens) == end + 1 for task, end, _, _ in pieces)
        ):
            return self._burst(pieces)
        texts = [
            [*piece.task.tokens[: piece.start + piece.size], *piece.drafts] for piece in pieces
        ]
        for piece, text in zip(pieces, texts, strict=True):
            self._write(piece, text)
        for piece, text in zip(pieces, texts, strict=True):
            self._read(piece, text)
        for piece in pieces:
            self._end_piece(piece)
        self._check_pages()

    def _burst(self, pieces):
        """Several steps at once, after which every other task has as many tokens as it may."""
        left = [self._most(piece.task) - len(piece.task.tokens) for piece in pieces]
        steps = self.scheduler.ahead(pieces, left, self.many)
        self._check_pages()
        for (task, start, _, _), own in zip(pieces, left, strict=True):
            text = list(task.tokens)
            for _ in range(min(steps, own)):
                text.append(chosen(text))
            piece, new = Piece(task, start, len(text) - start - 1), text[start + 1 :]
            self._write(piece, text)
            self._read(piece, text)
            self._copy(self.scheduler.done(piece, new))
            self.counts["at once"] += len(new) > 1
            self._end(task, len(new) == own)
        self._check_pages()

    def _most(self, task):
        return min(task.prompt + task.sampling.max_tokens, LONGEST)

    def _copy(self, copies):
        for copy in copies:
            if isinstance(copy, PageCopy):
                replica, group, *pages = copy
                self.counts["pages"] += 1
                for i in range(self.limits.page):
                    source, target = ((replica, group, page, i) for page in pages)
                    self.written[target] = self.written.get(source)
                continue
            self.states[copy.replica, copy.target] = self.states.get((copy.replica, copy.source))

    def _check_pieces(self, pieces):
        rows = Counter()
        assert len({piece.task.number for piece in pieces}) == len(pieces)
        for piece in pieces:
            task, end = piece.task, piece.start + piece.size
            rows[task.replica] += piece.size
            assert task in self.scheduler.running and piece.start == task.computed
            assert piece.size > len(piece.drafts) and end - len(piece.drafts) <= len(task.tokens)
            assert not piece.drafts or end - len(piece.drafts) == len(task.tokens)
        assert max(rows.values(), default=0) <= self.limits.rows

    def _check_pages(self):
        running = self.scheduler.running
        slots = [(task.replica, task.slot) for task in running]
        assert len({*slots}) == len(slots)
        assert all(1 <= slot <= self.limits.requests for _, slot in slots)
        for replica, pools in enumerate(self.scheduler.pools):
            for group, pool in enumerate(pools):
                tables = [task.tables[group] for task in running if task.replica == replica]
                users = Counter(page for table in tables for page in table if page)
                assert all(1 <= page <= pool.size for page in users)
                assert all(pool.users(page) == users[page] for page in range(pool.size + 1))
                assert pool.available == pool.size - len(users)

    def _where(self, task, group, position):
        page, offset = divmod(position, self.limits.page)
        number = task.tables[group][page]
        assert number, "a page that is needed was given back"
        return task.replica, group, number, offset

    def _write(self, piece, text):
        task, slot = piece.task, (piece.task.replica, piece.task.slot)
        for position in range(piece.start, piece.start + piece.size):
            before, value = (after(text[:i], task.adapter) for i in (position, position + 1))
            for group in range(len(self.layout.reaches)):
                where = self._where(task, group, position)
                pool = self.scheduler.pools[task.replica][group]
                assert pool.users(where[2]) == 1, "a page is shared while it is written"
                self.written[where] = value
            if self.layout.recurrent:
                assert position == 0 or self.states[slot] == before
                self.states[slot] = value

    def _read(self, piece, text):
        task = piece.task
        for position in range(piece.start, piece.start + piece.size):
            for group, reach in enumerate(self.layout.reaches):
                for i in range(reach.first(position), position + 1):
                    kept = self.written[self._where(task, group, i)]
                    assert kept == after(text[: i + 1], task.adapter)

    def _end_piece(self, piece):
        task, end = piece.task, piece.start + piece.size
        text, new, finish = list(task.tokens), [], False
        while len(text) <= end and not finish:
            new.append(chosen(text))
            text.append(new[-1])
            length = len(text)
            finish = length >= self._most(task)
            if piece.drafts[len(new) - 1 : len(new)] != (new[-1],):
                break
            self.counts["accepted"] += 1
        self._copy(self.scheduler.done(piece, new))
        self._end(task, finish)

    def _end(self, task, finish):
        if finish:
            self.scheduler.remove(task)
            self.ended[task.number] = self.tasks.pop(task.number)

    def check_end(self):
        assert not self.scheduler.running and not self.scheduler.waiting
        for pools in self.scheduler.pools:
            assert all(pool.available == pool.size for pool in pools)
        for number, task in self.ended.items():
            text = self.prompts[number]
            while len(text) < self._most(task):
                text.append(chosen(text))
            assert task.tokens == text


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
def test_every_request_reads_its_own_tokens_and_ends(engine, requests, twins, many):
    layout, limits, replicas, draft, sizes = engine
    draft = None if layout.recurrent or many > 1 else draft
    made = Simulation(layout, limits, replicas, draft, sizes, twins, many)
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


def simulation(pages, requests=4, draft=None, recurrent=False, replicas=1, rows=4, **rules):
    """Of full attention, with pages of 2 tokens."""
    limits = Limits(rows, 2, (pages,), requests, **rules)
    return Simulation(layout_of((Reach(),), recurrent), limits, replicas, draft)


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
    pieces, _ = made.scheduler.schedule(made.sizes, guesses)
    assert [piece.size for piece in pieces] == rows


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
    tasks = dict(made.tasks)
    made.finish(40)
    assert {number for number, task in tasks.items() if task.preempted} == {first}
    made.check_end()


def test_drafts_take_no_pages_from_other_requests():
    made = simulation(pages=4, draft=lambda task: [VOCAB] * 3 * (task.number - 1))
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
    assert made.scheduler.preemptions == 1 and made.tasks[2] in made.scheduler.running
    made.finish(20)
    made.check_end()


def test_a_request_goes_to_a_replica_with_room_before_one_with_its_prefix():
    made = simulation(pages=4, replicas=2)
    made.add(1, [0, 1, 2, 0, 1], max_tokens=3)
    made.step()
    made.step()
    made.add(2, [0, 1, 2, 0, 1, 1, 2, 2], max_tokens=1)
    made.step()
    assert len({task.replica for task in made.scheduler.running}) == 2


def crowded(streams=12, requests=4, pages=100, tokens=20, **rules):
    """With so many long requests of one client, that began."""
    made = simulation(pages=pages, requests=requests, rows=16, prefix_cache=False, **rules)
    for number in range(1, streams + 1):
        made.add(number, [0, 1, number % VOCAB], client="many", max_tokens=tokens)
    made.step()
    return made


def running(made):
    return Counter(task.client for task in made.scheduler.running)


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
    task = made.tasks[99]
    made.finish(200)
    assert made.scheduler.preemptions > 0 and not task.preempted
    made.check_end()


def test_a_request_begins_beside_the_long_prompts_of_another_client():
    made = simulation(pages=100, requests=4)
    for number in range(1, 4):
        made.add(number, [number % VOCAB] * 36, client="many", max_tokens=1)
    made.step()
    made.add(99, [2, 1], client="one", max_tokens=1)
    for _ in range(3):
        made.step()
    assert 99 in made.ended and len(made.tasks) == 3
    made.finish(100)
    made.check_end()
