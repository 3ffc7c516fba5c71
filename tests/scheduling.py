"""The scheduler alone, beside a cache that remembers what was written into every page."""

import hashlib
from collections import Counter

from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits, PageCopy
from maxstack.inference.request import Chunk, Sampling, TokenSequence
from maxstack.inference.scheduler import Scheduler
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


def drafts(sequence):
    """Guesses of the next tokens, one in a few of them wrong."""
    text, guesses = list(sequence.tokens), []
    left = min(sequence.prompt_length + sequence.sampling.max_tokens, LONGEST) - len(text) - 1
    for _ in range(min(3, left)):
        text.append((chosen(text) + (len(text) % 4 == 0)) % VOCAB)
        guesses.append(text[-1])
    return guesses


class Simulation:
    """Runs the scheduler as the engine does, and checks every step."""

    def __init__(
        self, layout, limits, replicas=1, draft=None, sizes=(), share_prompts=False, many=1
    ):
        self.layout, self.limits, self.draft, self.sizes = layout, limits, draft, sizes
        self.scheduler, self.many = Scheduler(layout, limits, replicas, draft, share_prompts), many
        self.written, self.states = {}, {}
        self.sequences, self.prompts, self.ended, self.counts = {}, {}, {}, Counter()

    def add(self, number, prompt, priority=0, adapter=0, client="", **rules):
        sequence = TokenSequence(
            number, list(prompt), len(prompt), Sampling(**rules), priority, adapter, client
        )
        self.sequences[number], self.prompts[number] = sequence, list(prompt)
        self.scheduler.add(sequence)

    def abort(self, number):
        if sequence := self.sequences.pop(number, None):
            self.scheduler.remove(sequence)

    def finish(self, steps):
        for _ in range(steps):
            if not self.sequences:
                return
            self.step()
        raise AssertionError(f"{len(self.sequences)} requests have not ended after {steps} steps")

    def step(self):
        guesses = 3 if self.draft else 0
        chunks, copies = self.scheduler.schedule(self.sizes, guesses, prompts_first=self.many > 1)
        assert chunks or not self.sequences, "requests wait, and none is computed"
        self._copy(copies)
        self._check_chunks(chunks)
        self._check_pages()
        if (
            chunks
            and self.many > 1
            and all(len(sequence.tokens) == end + 1 for sequence, end, _, _ in chunks)
        ):
            return self._burst(chunks)
        texts = [
            [*chunk.sequence.tokens[: chunk.start + chunk.size], *chunk.drafts] for chunk in chunks
        ]
        for chunk, text in zip(chunks, texts, strict=True):
            self._write(chunk, text)
        for chunk, text in zip(chunks, texts, strict=True):
            self._read(chunk, text)
        for chunk in chunks:
            self._end_chunk(chunk)
        self._check_pages()

    def _burst(self, chunks):
        """Several steps at once, after which every other sequence has as many tokens as it may."""
        left = [self._most(chunk.sequence) - len(chunk.sequence.tokens) for chunk in chunks]
        steps = self.scheduler.reserve_steps(chunks, left, self.many)
        self._check_pages()
        for (sequence, start, _, _), own in zip(chunks, left, strict=True):
            text = list(sequence.tokens)
            for _ in range(min(steps, own)):
                text.append(chosen(text))
            chunk, new = Chunk(sequence, start, len(text) - start - 1), text[start + 1 :]
            self._write(chunk, text)
            self._read(chunk, text)
            self._copy(self.scheduler.finish_chunk(chunk, new))
            self.counts["at once"] += len(new) > 1
            self._end(sequence, len(new) == own)
        self._check_pages()

    def _most(self, sequence):
        return min(sequence.prompt_length + sequence.sampling.max_tokens, LONGEST)

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

    def _check_chunks(self, chunks):
        rows = Counter()
        assert len({chunk.sequence.number for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.size
            rows[sequence.replica] += chunk.size
            assert sequence in self.scheduler.running and chunk.start == sequence.computed
            assert chunk.size > len(chunk.drafts) and end - len(chunk.drafts) <= len(
                sequence.tokens
            )
            assert not chunk.drafts or end - len(chunk.drafts) == len(sequence.tokens)
        assert max(rows.values(), default=0) <= self.limits.rows

    def _check_pages(self):
        running = self.scheduler.running
        slots = [(sequence.replica, sequence.slot) for sequence in running]
        assert len({*slots}) == len(slots)
        assert all(1 <= slot <= self.limits.requests for _, slot in slots)
        for replica, pools in enumerate(self.scheduler.pools):
            for group, pool in enumerate(pools):
                tables = [
                    sequence.tables[group] for sequence in running if sequence.replica == replica
                ]
                users = Counter(page for table in tables for page in table if page)
                assert all(1 <= page <= pool.size for page in users)
                assert all(pool.users(page) == users[page] for page in range(pool.size + 1))
                assert pool.available == pool.size - len(users)

    def _where(self, sequence, group, position):
        page, offset = divmod(position, self.limits.page)
        number = sequence.tables[group][page]
        assert number, "a page that is needed was given back"
        return sequence.replica, group, number, offset

    def _write(self, chunk, text):
        sequence, slot = chunk.sequence, (chunk.sequence.replica, chunk.sequence.slot)
        for position in range(chunk.start, chunk.start + chunk.size):
            before, value = (after(text[:i], sequence.adapter) for i in (position, position + 1))
            for group in range(len(self.layout.reaches)):
                where = self._where(sequence, group, position)
                pool = self.scheduler.pools[sequence.replica][group]
                assert pool.users(where[2]) == 1, "a page is shared while it is written"
                self.written[where] = value
            if self.layout.recurrent:
                assert position == 0 or self.states[slot] == before
                self.states[slot] = value

    def _read(self, chunk, text):
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.start + chunk.size):
            for group, reach in enumerate(self.layout.reaches):
                for i in range(reach.first(position), position + 1):
                    kept = self.written[self._where(sequence, group, i)]
                    assert kept == after(text[: i + 1], sequence.adapter)

    def _end_chunk(self, chunk):
        sequence, end = chunk.sequence, chunk.start + chunk.size
        text, new, finish = list(sequence.tokens), [], False
        while len(text) <= end and not finish:
            new.append(chosen(text))
            text.append(new[-1])
            length = len(text)
            finish = length >= self._most(sequence)
            if chunk.drafts[len(new) - 1 : len(new)] != (new[-1],):
                break
            self.counts["accepted"] += 1
        self._copy(self.scheduler.finish_chunk(chunk, new))
        self._end(sequence, finish)

    def _end(self, sequence, finish):
        if finish:
            self.scheduler.remove(sequence)
            self.ended[sequence.number] = self.sequences.pop(sequence.number)

    def check_end(self):
        assert not self.scheduler.running and not self.scheduler.waiting
        for pools in self.scheduler.pools:
            assert all(pool.available == pool.size for pool in pools)
        for number, sequence in self.ended.items():
            text = self.prompts[number]
            while len(text) < self._most(sequence):
                text.append(chosen(text))
            assert sequence.tokens == text


def simulation(pages, requests=4, draft=None, recurrent=False, replicas=1, rows=4, **rules):
    """Of full attention, with pages of 2 tokens."""
    limits = Limits(rows, 2, (pages,), requests, **rules)
    return Simulation(layout_of((Reach(),), recurrent), limits, replicas, draft)
