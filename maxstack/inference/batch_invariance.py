"""Check of batch invariance: that a request's logits are the same bits whatever is computed beside
it.

XLA promises nothing of the kind: it may choose another order of sums for another number of rows. So
each size of step is tried before it is first used, and so is each number of outputs of the head. A
random text is computed alone by the smallest size, then behind rows of another text by the size in
question, and all bits of the states after the last block and of the logits are compared. Where a
size differs, all are tried and compared with the largest one, those that differ are dropped, and
what was computed by them is computed again.

Trying takes two slots and a few pages of the cache that no request uses (`Runner.scratch`).
"""

import logging
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from maxstack.errors import ConfigError
from maxstack.inference.runner import ChunkTokens, Runner
from maxstack.report.progress import progress

log = logging.getLogger(__name__)
SMALL = 32
"""Rows up to which a size is compared with the largest in two steps, of which the second reads keys
that the first one cached; larger ones would need long texts and time for it."""


class Bits(NamedTuple):
    """What a size made of a text."""

    states: list[bytes]
    """Of each token, after the last block."""
    logits: list[bytes]
    """After the first tokens of each step; where there are several, after all their tokens."""


class StepSizes:
    """The sizes of steps that an engine may use, each tried before its first step."""

    def __init__(self, programs: Runner, vocab: int, max_length: int, asked: str = "check"):
        """`asked`: serve.identical."""
        self._programs, self._asked = programs, asked
        # A fixed seed: a server must not choose other sizes at each start.
        rng = np.random.default_rng(0)
        room = programs.scratch_pages * programs.limits.page
        length = max(1, min(programs.sizes[-1], max_length, room))
        self._texts = [rng.integers(0, vocab, length).tolist() for _ in range(2)]
        # Cached arrays of another number of pages have programs of their own.
        self._tried: set[tuple[int, ...]] = set()
        # The head does not read the cache.
        self._heads: set[int] = set()
        self._known = Bits([], [])

    def admit(self, rows: int, outputs: Collection[int] | None = None) -> bool:
        """Try the size that a step of so many rows has, and the head for these numbers of outputs,
        by default as many as the step can have, unless they were tried -> False where other sizes
        are to be used from now on. ConfigError where none is left and serve.identical=strict."""
        size = next(size for size in self._programs.sizes if size >= rows)
        heads = {self._head(count) for count in ([size] if outputs is None else outputs)}
        untried = sorted(heads - self._heads)
        if self._asked == "any" or (self._key(size) in self._tried and not untried):
            return True
        smallest = self._programs.sizes[0]
        wanted = [(smallest, smallest), *((size, head) for head in untried or [smallest])]
        with progress(2, f"compiling for steps of {size} tokens", "programs") as shown:
            if not self._known.states:
                # The second step reads keys that the first one cached.
                self._known = self._bits(smallest, 0, 2, smallest)
            shown.update()
            for each, head in dict.fromkeys(wanted):
                tried = self._key(each) in self._tried and self._head(head) in self._heads
                if not tried and not self._agrees(each, 1, head):
                    return self.try_all()
            shown.update()
        return True

    def next_untried(self) -> int | None:
        """Return a size that was not tried yet."""
        if self._asked == "any":
            return None
        return next((s for s in self._programs.sizes if self._key(s) not in self._tried), None)

    def try_all(self) -> bool:
        """Try all sizes, and drop those in which a request's bits depend on other requests -> False
        where some were dropped. ConfigError or a warning where no size is left without."""
        programs, sizes = self._programs, self._programs.sizes
        if self._asked == "any":
            return True
        left = self.different()
        # Sizes are compared with the largest. Where most differ from it, it is the odd one out, so
        # compare the others among themselves.
        if 2 * len(left) > len(sizes):
            programs.sizes = tuple(left)
            left = self.different()
        programs.sizes = tuple(size for size in programs.sizes if size not in left) or sizes[-1:]
        if programs.sizes != sizes:
            log.warning(
                "serve.identical: of the step sizes %s only %s are used, so that an answer does "
                "not depend on other requests",
                ", ".join(map(str, sizes)),
                ", ".join(map(str, programs.sizes)),
            )
            # Again: the sizes that are left may differ from the new largest one.
            left = self.different()
        self._tried.update(map(self._key, programs.sizes))
        if left:
            message = (
                f"serve.identical={self._asked}: on this device the last bits of a request's "
                f"logits depend on other requests, in steps of {left[-1]} tokens"
            )
            if self._asked == "strict":
                raise ConfigError(f"{message}; set serve.identical=check to serve anyway")
            log.warning("%s", message)
        return programs.sizes == sizes

    def different(self) -> list[int]:
        """Return the sizes in which a text's states or logits beside another text differ in any bit
        from those of the largest size alone."""
        sizes, different = self._programs.sizes, []
        with progress(len(sizes), "compiling", "programs") as shown:
            self._known = self._bits(sizes[-1], 0, 1, sizes[-1])
            for size in sizes:
                if not self._agrees(size, 1 if size > SMALL else 2, size):
                    different.append(size)
                shown.update()
        return different

    def _agrees(self, size: int, steps: int, outputs: int) -> bool:
        """Compare a size, and the head for so many outputs, with what is known, to which they
        add."""
        beside = size // 3 if self._programs.scratch_texts > 1 else 0
        made = self._bits(size, beside, steps, outputs)
        for rows, known in zip(made, self._known, strict=True):
            if any(row != other for row, other in zip(rows, known, strict=False)):
                return False
        self._tried.add(self._key(size))
        self._heads.add(self._head(outputs))
        for rows, known in zip(made, self._known, strict=True):
            known += rows[len(known) :]
        return True

    def _head(self, outputs: int) -> int:
        """Return the number of outputs for which the head of so many is compiled."""
        return next((s for s in self._programs.outputs if s >= outputs), self._programs.outputs[-1])

    def _key(self, size: int) -> tuple[int, ...]:
        return size, *self._programs.held

    def _bits(self, size: int, beside: int, steps: int, outputs: int) -> Bits:
        """Return what the first steps of the first text give, each after `beside` rows of the
        other, and the head for at most so many of a step's tokens."""
        programs = self._programs
        own, length = size - beside, len(self._texts[0])
        states: list[bytes] = []
        logits: list[bytes] = []
        for start in range(0, min(length, own * steps), own):
            chunks = [self._chunk(0, start, own)]
            if beside:
                # Before the tried rows, so that these lie at other places of the batch than alone.
                chunks.insert(0, self._chunk(1, start // own * beside % length, beside))
            batch, firsts = programs.batch(chunks)
            x_RD = programs.forward(batch)
            first, tokens = firsts[-1], len(chunks[-1].tokens)
            states += _rows(np.asarray(x_RD)[first : first + tokens])
            # The head of so many rows is tried, also where fewer are of this text.
            count = self._head(outputs)
            rows = [min(first + i, first + tokens - 1) for i in range(count)]
            _, logits_OV = programs.head(x_RD, rows)
            logits += _rows(np.asarray(logits_OV)[: min(count, tokens)])
        return Bits(states, logits)

    def _chunk(self, text: int, start: int, count: int) -> ChunkTokens:
        slot, pages = self._programs.scratch(text)
        tokens = self._texts[text][start : start + count]
        # With adapters, try one beside rows that have none.
        adapter = 0 if text else self._programs.adapters
        return ChunkTokens(0, slot, start, tokens, pages, adapter)


def _rows(array: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in array]
