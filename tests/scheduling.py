"""The scheduler alone, beside a cache that remembers what was written into every page."""

import hashlib
from collections import Counter

from maxstack.inference.layout import Layout
from maxstack.inference.request import Sampling
from maxstack.inference.scheduler import Chunk, Limits, PageCopy, Scheduler, TokenSequence
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
        task = TokenSequence(
            number, list(prompt), len(prompt), Sampling(**rules), priority, adapter, client
        )
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
            piece, new = Chunk(task, start, len(text) - start - 1), text[start + 1 :]
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


def simulation(pages, requests=4, draft=None, recurrent=False, replicas=1, rows=4, **rules):
    """Of full attention, with pages of 2 tokens."""
    limits = Limits(rows, 2, (pages,), requests, **rules)
    return Simulation(layout_of((Reach(),), recurrent), limits, replicas, draft)
