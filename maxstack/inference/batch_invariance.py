"""Check of batch invariance: that a request's logits are the same bits whatever is computed beside
it.

XLA promises nothing of the kind: it may choose another order of sums for another number of rows. So
the start of an engine tries it. A random text is computed alone by the largest step, then by each
size of step behind rows of another request, and all bits of the logits are compared. Sizes that
differ are not used (`engine_setup.check_identical`).
"""

import numpy as np

from maxstack.inference.layout import Layout
from maxstack.inference.runner import ChunkTokens, Runner
from maxstack.report.progress import progress

# The second step reads keys that the first one cached, so chunked prefill is tried too; large sizes
# would need long texts and time for it.
SMALL = 32
"""Rows up to which a size is tried with two steps; larger ones with one."""


def find_variant_sizes(programs: Runner, layout: Layout, vocab: int, max_length: int) -> list[int]:
    """Return the sizes of steps in which a request's logits beside another request differ
    in any bit from those of the largest size alone. Uses the first pages of an empty cache."""
    limits, most = programs.limits, programs.sizes[-1]
    # Half of the pages for each of two requests.
    room = limits.page * min(limits.pages) // 2
    length = max(1, min(most, max_length, room))
    # A fixed seed: a server must not choose other sizes at each start.
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab, length).tolist() for _ in range(min(2, limits.requests))]
    pages = -(-length // limits.page)

    def rowed(request: int, start: int, count: int) -> ChunkTokens:
        held = [1 + request * pages + page for page in range(pages)]
        chunk = tokens[request][start : start + count]
        # With adapters, try one beside rows that have none.
        adapter = 0 if request else programs.adapters
        return ChunkTokens(0, request + 1, start, chunk, [held] * len(layout.reaches), adapter)

    def logits(size: int, beside: int, count: int) -> list[bytes]:
        """Return the logits of `count` steps of the first request, each after `beside` rows of the
        other."""
        rows: list[bytes] = []
        for start in range(0, min(length, size * count), size):
            chunks = [rowed(0, start, size)]
            if beside:
                # Before the tried rows, so that these lie at other places of the batch than alone.
                chunks.insert(0, rowed(1, start // size * beside % length, beside))
            batch, firsts = programs.batch(chunks)
            x_RD = programs.forward(batch)
            wanted = len(chunks[-1].tokens[: programs.outputs[-1]])
            _, logits_OV = programs.head(x_RD, range(firsts[-1], firsts[-1] + wanted))
            rows += [row.tobytes() for row in np.asarray(logits_OV)[:wanted]]
        return rows

    different = []
    with progress(len(programs.sizes), "compiling", "programs") as shown:
        alone = logits(most, 0, 1)
        for size in programs.sizes:
            beside = size // 3 if len(tokens) > 1 else 0
            made = logits(size - beside, beside, 1 if size > SMALL else 2)
            if any(row != own for row, own in zip(made, alone, strict=False)):
                different.append(size)
            shown.update()
    return different
