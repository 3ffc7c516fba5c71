"""The check, before the first request, that a request's logits are the same bits whatever is
computed beside it. XLA promises nothing of the kind; a program of a fixed number of rows has it
where each row is computed by the same instructions in the same order."""

from collections.abc import Iterator, Sequence

import numpy as np

from maxstack.inference.layout import Layout
from maxstack.inference.programs import Batch, Programs
from maxstack.inference.scheduler import Limits
from maxstack.layers.cache import Rows

Cut = tuple[int, int]
"""Request and number of tokens of a piece."""


def differing(programs: Programs, layout: Layout, vocab: int, max_length: int) -> list[str]:
    """Ways of computing the same request that change bits of its logits: among others, at another
    row, cut into other pieces, decoded token by token; empty where none does. Uses the first pages
    of an empty cache."""
    limits = programs.limits
    length = max(
        2, min(limits.rows + limits.rows // 2 + 3, max_length, limits.page * min(limits.pages) // 2)
    )
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, vocab, length).tolist() for _ in range(min(2, limits.requests))]
    alone = _logits(programs, layout, tokens, [(0, count) for count in _cut(length, limits.rows)])
    first = max(1, limits.rows // 3)
    ways = {
        "computed token by token": [(0, 1)] * length,
        "cut into other pieces": [(0, count) for count in _cut(length, first)],
    }
    if len(tokens) > 1 and limits.rows > 1:
        crowd: list[Cut] = []
        for count in _cut(length, max(1, limits.rows - first)):
            crowd += [(1, first), (0, count)]
        ways["computed beside another request"] = crowd
    return [way for way, cuts in ways.items() if _logits(programs, layout, tokens, cuts) != alone]


def _cut(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def _logits(
    programs: Programs, layout: Layout, tokens: Sequence[Sequence[int]], cuts: Sequence[Cut]
) -> bytes:
    """Logits of all tokens of request 0, computed in pieces; those that fit share a step."""
    done, parts = [0] * len(tokens), []
    for step in _steps(cuts, programs.limits):
        rows = np.zeros((4, programs.replicas * programs.limits.rows), np.int32)
        rows[1], filled, own = -1, 0, slice(0, 0)
        for request, count in step:
            start = done[request]
            count = min(count, len(tokens[request]) - start)
            piece = slice(filled, filled + count)
            rows[:, piece] = (
                tokens[request][start : start + count],
                np.arange(start, start + count),
                np.full(count, request + 1),
                np.full(count, 0 if request else programs.adapters),
            )
            done[request], filled = start + count, filled + count
            own = piece if request == 0 else own
        wanted = np.zeros(rows.shape[1], np.int32)
        wanted[: own.stop - own.start] = np.arange(own.start, own.stop)
        logits = programs.forward(Batch(Rows(*rows), wanted, _tables(programs, layout, tokens)))
        parts.append(np.asarray(logits)[: own.stop - own.start].tobytes())
    return b"".join(parts)


def _steps(cuts: Sequence[Cut], limits: Limits) -> Iterator[list[Cut]]:
    """Pieces that share a step: as many as fit its rows, one of each request."""
    step: list[Cut] = []
    for cut in cuts:
        full = sum(count for _, count in step) + cut[1] > limits.rows
        if full or any(request == cut[0] for request, _ in step):
            yield step
            step = []
        step.append(cut)
    yield step


def _tables(
    programs: Programs, layout: Layout, tokens: Sequence[Sequence[int]]
) -> tuple[np.ndarray, ...]:
    """Pages of the requests, one after the other."""
    pages = -(-len(tokens[0]) // programs.limits.page)
    tables = np.zeros((programs.replicas * programs.slots, programs.width), np.int32)
    for request in range(len(tokens)):
        tables[request + 1, :pages] = 1 + request * pages + np.arange(pages)
    return (tables,) * len(layout.reaches)
