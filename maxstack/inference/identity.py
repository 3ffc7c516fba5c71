"""The check, before the first request, that a request's logits are the same bits whatever is
computed beside it. XLA promises nothing of the kind; a program of a fixed number of rows has it
where each row is computed by the same instructions in the same order."""

import numpy as np

from maxstack.inference.layout import Layout
from maxstack.inference.programs import Programs, Rowed


def differing(programs: Programs, layout: Layout, vocab: int, max_length: int) -> list[str]:
    """Ways of computing the same request that change bits of its logits: in steps of each size, and
    beside another request; empty where none does. Uses the first pages of an empty cache."""
    limits = programs.limits
    room = limits.page * min(limits.pages) // 2
    length = max(1, min(limits.rows * 3 // 2 + 3, max_length, room))
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab, length).tolist() for _ in range(min(2, limits.requests))]
    pages = -(-length // limits.page)

    def rowed(request: int, start: int, count: int) -> Rowed:
        held = [1 + request * pages + page for page in range(pages)]
        piece = tokens[request][start : start + count]
        adapter = 0 if request else programs.adapters
        return Rowed(0, request + 1, start, piece, [held] * len(layout.reaches), adapter)

    def logits(size: int, beside: int = 0) -> list[bytes]:
        """Of the first request, computed in pieces of `size`, after `beside` rows of the other."""
        rows = []
        for start in range(0, length, size):
            pieces = [rowed(0, start, size)]
            if beside:
                pieces.insert(0, rowed(1, start // size * beside % length, beside))
            count = len(pieces[-1].tokens)
            batch, firsts = programs.batch(pieces, count)
            batch.wanted_O[:count] = np.arange(firsts[-1], firsts[-1] + count)
            made = np.asarray(programs.forward(batch)[0])
            rows += [row.tobytes() for row in made[:count]]
        return rows

    alone = logits(limits.rows)
    ways = {f"in steps of {size} rows": logits(size) for size in programs.sizes[:-1]}
    third = limits.rows // 3
    if third and len(tokens) > 1:
        ways["beside another request"] = logits(third, third)
    return [way for way, rows in ways.items() if rows != alone]
