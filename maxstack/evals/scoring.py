"""Log-probabilities of continuations, on a run's mesh.

Requests are packed into rows one after the other, as documents are in training, by rules that
depend on the requests alone. So the rows are the same on any mesh, every process makes all of them
and computes its share, and no metric changes with the batch size. Three rules save time: rows have
one of a few widths, because attention and padding cost by the width; requests that differ in their
last token alone, as choices of a letter do, are read once; and logits are made only where tokens
are scored. Shapes: B rows  T time  S scored tokens  D embed  V vocab.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from maxstack.data.chat import find_bos
from maxstack.data.tokenizers import open_prompt_tokenizer, open_tokenizer
from maxstack.errors import DataError, quoted
from maxstack.evals.task import Likelihood
from maxstack.faults import preemption
from maxstack.kernels.cross_entropy import cross_entropy
from maxstack.objectives.objective import Batch, Models
from maxstack.schema.mesh import parts

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.data import Tokenizer as TokenizerConfig

LOGITS = 1 << 30
"""Approximate bytes of logits on a device at a time."""
NARROWEST = 128
"""Tokens of the narrowest row at least."""


class Scored(NamedTuple):
    """Tokens of which those from `begin` on are scored, each given all before it."""

    tokens: Sequence[int]
    begin: int


class Scorer:
    """Scores requests, packed into rows."""

    def __init__(self, run: "Run", batch_size: int, length: int):
        """`length`: tokens of a row. Both sizes are rounded up to what the mesh divides."""
        rules, shape = run.cfg.mesh.rules, run.mesh.shape
        self._pieces, self._over = parts(rules["seq"], shape), parts(rules["batch"], shape)
        self.height = -(-batch_size // self._over) * self._over
        # A ring gives each device two pieces of a row.
        unit = 2 * self._pieces if self._pieces > 1 else 1
        self.length = -(-length // unit) * unit
        # Widths by factors of four: few programs to compile, and little padding. With this, spans
        # read once and few logits, nine published tasks took 44 s; rows of 4,096 alone were not
        # done after 428 s.
        self._widths = [self.length]
        while (narrower := -(-self._widths[0] // 4 // unit) * unit) >= NARROWEST:
            self._widths.insert(0, narrower)
        self._vocab = run.cfg.decoder.vocab / parts(rules["vocab"], shape)
        self._run = run
        # A program for each number of pieces; jit makes one for each shape of rows.
        self._step = functools.cache(lambda chunks: run.of_models(_score(chunks)))
        self.cut = 0
        """Number of requests so far that lost their beginning."""

    def too_long(self, request: Scored) -> bool:
        """Return True for a request that loses its beginning."""
        # One more than a row holds: the last token is a target and no input.
        return len(request.tokens) > self.length + 1

    def check(self, request: Scored) -> None:
        """DataError where more tokens are to be scored than a row holds."""
        if (count := len(request.tokens) - request.begin) > self.length:
            raise DataError(
                f"{count:,} tokens are to be scored, and a row holds {self.length:,}: give more by "
                "data.seq_len, or --length of maxstack eval, or leave the task out"
            )

    def __call__(
        self, params: Any, requests: Sequence[Scored], progress: str = ""
    ) -> list[Likelihood]:
        """Return the likelihood of each request's continuation; a request that is too long loses
        its beginning. `progress`: title of a progress bar, "" for none. DataError as `check`."""
        for request in requests:
            self.check(request)
            self.cut += self.too_long(request)
        cut = []
        for tokens, begin in requests:
            lost = max(0, len(tokens) - self.length - 1)
            # At least one token stays before the first that is scored.
            cut.append(Scored(tokens[lost:], max(begin - lost, 1)))
        found: list[Likelihood | None] = [None] * len(cut)
        batches = [*self._batches(cut)]
        for batch in tqdm.tqdm(
            batches, desc=progress, unit=" batches", disable=not progress or None
        ):
            preemption.raise_if_leaving()
            scored = batch.arrays["at"].shape[1]
            chunks = 1
            # Logits of a row that is split over `context` already lie in pieces on the devices.
            if self._pieces == 1:
                rows = len(batch.arrays["at"]) / self._over
                chunks = _divisor(scored, rows * scored * self._vocab * 4 / LOGITS)
            result = jax.device_get(self._step(chunks)(params, self._place(batch.arrays)))
            for number, row, first in batch.places:
                tokens, begin = cut[number]
                span = slice(first, first + len(tokens) - begin)
                found[number] = Likelihood(
                    # In float64: the score of a long text is a sum of thousands of float32 numbers.
                    -float(result["nll"][row, span].sum(dtype=np.float64)),
                    bool(result["best"][row, span].all()),
                    len(tokens) - begin,
                )
        return [each for each in found if each is not None]

    def _batches(self, cut: Sequence[Scored]) -> "Iterator[_Rows]":
        """Yield rows of each width: batches of the size asked for, then the smallest that the mesh
        allows, so that no row is empty."""
        counts = [len(tokens) - begin for tokens, begin in cut]
        same_inputs: dict[tuple[int, ...], list[int]] = {}
        by_width: dict[int, list[list[int]]] = {width: [] for width in self._widths}
        for number, (tokens, _) in enumerate(cut):
            # Requests with the same inputs, as choices of a letter have, are one span: it is read
            # once, and each scores its own target after it.
            inputs = tuple(tokens[:-1])
            width = next(width for width in self._widths if len(inputs) <= width)
            span = same_inputs.get(inputs)
            # A span that scores more than a row has places is begun anew.
            if span is None or sum(counts[i] for i in [*span, number]) > width:
                span = same_inputs[inputs] = []
                by_width[width].append(span)
            span.append(number)
        for width, spans in by_width.items():
            scores = [sum(map(counts.__getitem__, span)) for span in spans]
            rows = pack([len(cut[span[0]].tokens) - 1 for span in spans], width, scores)
            most = 0
            for row in rows:
                most = max(most, sum(scores[i] for i, _ in row))
            # One of two sizes: an exact one would be another program for each batch. Logits are the
            # largest arrays here, and most requests score few tokens.
            scored = width // 4 if most <= width // 4 and self._pieces == 1 else width
            while rows:
                # Two heights alone: full batches, then the smallest that the mesh divides.
                height = self.height if len(rows) >= self.height else self._over
                yield _Rows(rows[:height], spans, cut, (height, width, scored))
                rows = rows[height:]

    def _place(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        batches, height = self._run.batches, len(arrays["tokens"])
        own = batches.rows(height)
        return {
            name: batches.put(array[own], height, batches.sharding(name))
            for name, array in arrays.items()
        }


class _Rows:
    """Rows of spans of tokens, each for one or more requests, as arrays: tokens, positions,
    segments, real [B, T]; `at` and targets [B, S], the input after which each target is scored.
    `places`: of each request its number, its row and where in S it begins."""

    def __init__(
        self,
        rows: Sequence[Sequence[tuple[int, int]]],
        spans: Sequence[Sequence[int]],
        cut: Sequence[Scored],
        shape: tuple[int, int, int],
    ):
        height, width, scored = shape
        self.arrays: dict[str, np.ndarray] = {
            name: np.zeros((height, width), np.int32)
            for name in ("tokens", "positions", "segments")
        }
        for name in ("at", "targets"):
            self.arrays[name] = np.zeros((height, scored), np.int32)
        self.places: list[tuple[int, int, int]] = []
        for row, members in enumerate(rows):
            free = 0
            for segment, (span, start) in enumerate(members, 1):
                inputs = cut[spans[span][0]].tokens[:-1]
                where = slice(start, start + len(inputs))
                self.arrays["tokens"][row, where] = inputs
                self.arrays["positions"][row, where] = np.arange(len(inputs))
                self.arrays["segments"][row, where] = segment
                for number in spans[span]:
                    tokens, begin = cut[number]
                    end = free + len(tokens) - begin
                    self.arrays["targets"][row, free:end] = tokens[begin:]
                    # The hidden state one before a token predicts it.
                    self.arrays["at"][row, free:end] = start + np.arange(begin - 1, len(inputs))
                    self.places.append((number, row, free))
                    free = end
        self.arrays["real"] = self.arrays["segments"] > 0


def pack(
    lengths: Sequence[int], width: int, scored: Sequence[int] | None = None
) -> list[list[tuple[int, int]]]:
    """Pack spans of these lengths into rows of at most `width` tokens, of which at most `width` are
    scored: best-fit decreasing, the longest first, each into the fullest row with room for it.
    Return (number, start) of the spans in each row."""
    rows: list[list[tuple[int, int]]] = []
    left: list[int] = []
    # Rows by their free places: finding the fullest that fits is a walk over widths and not over
    # all rows.
    by_room: list[list[int]] = [[] for _ in range(width + 1)]
    counts = scored or [0] * len(lengths)
    # Stable and by length alone, so that every process packs the same rows.
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[number]
        rooms = ((room, row) for room in range(need, width + 1) for row in by_room[room])
        room, row = next((each for each in rooms if left[each[1]] >= counts[number]), (width, -1))
        if row < 0:
            row = len(rows)
            rows.append([])
            left.append(width)
        else:
            by_room[room].remove(row)
        rows[row].append((number, width - room))
        left[row] -= counts[number]
        by_room[room - need].append(row)
    return rows


class Texts:
    """Turns texts into tokens as lm-evaluation-harness does: special tokens that are spelt out are
    these tokens."""

    def __init__(self, tokenizer: "TokenizerConfig"):
        self.tokenizer = open_prompt_tokenizer(tokenizer)
        self._bos, self._named = self.tokenizer.encode(b"").tolist(), find_bos(tokenizer)
        self._first = (self._named or self._bos or list(open_tokenizer(tokenizer).eos))[:1]
        self._spelt = self.tokenizer.text_of(self._first[0]) if self._first else None

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self._encode(text) or self._begin(text)

    def pair(self, context: str, continuation: str) -> Scored:
        """Return the context's own tokens, followed by the tokens of the whole text from that
        position on; white space at the context's end belongs to the continuation. DataError where
        nothing is left to score."""
        # Encoded together: a token may join the end of a context with what follows. The context's
        # own tokens stay, as lm-evaluation-harness takes them.
        whole = self._encode(context + continuation, bare=not context)
        before = self._encode(context.rstrip()) if context else []
        if not before:
            before = self._begin(continuation)
            # Not a second BOS where the text begins with one.
            whole = whole if whole[:1] == before else before + whole
        begin = len(before)
        if begin >= len(whole):
            raise DataError(
                f"{quoted(continuation)} after {quoted(context[-40:])}: adds no token, so there is "
                "nothing to score"
            )
        return Scored(before + whole[begin:], begin)

    def windows(self, text: str, length: int) -> list[Scored]:
        """Cut a text into pieces of at most `length` inputs, each of whose tokens is scored once:
        the first after BOS or else EOS, the last piece with as much before it as fits. A BOS that
        the tokenizer's file adds is scored too, as in lm-evaluation-harness."""
        tokens = self._encode(text, bare=not self._named)
        pieces = [Scored(self._begin(text) + tokens[:length], 1)] if tokens else []
        for first in range(length, len(tokens), length):
            end = min(first + length, len(tokens))
            # Windows overlap in what they read and not in what they score.
            pieces.append(Scored(tokens[end - length - 1 : end], length + 1 - (end - first)))
        return pieces

    def _encode(self, text: str, bare: bool = False) -> list[int]:
        """Encode a text, after the BOS that the tokenizer adds unless the text spells it out, or
        `bare`."""
        ids = self.tokenizer.encode_marked(text)[0].tolist()
        if bare or (self._spelt and text.startswith(self._spelt)):
            return ids
        return self._bos + ids

    def _begin(self, text: str) -> list[int]:
        if not self._first:
            raise DataError(
                f"{quoted(text[:40])}: has nothing before it, and the tokenizer "
                f"{self.tokenizer.name} has neither BOS nor EOS to begin with"
            )
        return self._first


def _score(chunks: int) -> Callable[[Models, Batch], Batch]:
    """Return a function of models and a batch to nll float32 and whether the target is the
    likeliest, both [B, S]; logits are made in `chunks` pieces of the rows."""

    def of(models: Models, batch: Batch) -> dict[str, jax.Array]:
        model = models.policy
        # Before the head: logits of all T positions would be up to four times as many.
        x_BSD = jnp.take_along_axis(model.hidden(batch), batch["at"][..., None], axis=1)

        def piece(of_piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_BSD, targets_BS = of_piece
            logits_BSV = model.logits(x_BSD)
            nll_BS, _ = cross_entropy(logits_BSV, targets_BS)
            return nll_BS, logits_BSV.argmax(-1) == targets_BS

        if chunks == 1:
            nll, best = piece((x_BSD, batch["targets"]))
            return {"nll": nll, "best": best}
        # Cut along S, so that each device keeps its rows.
        cut = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(len(x), chunks, -1, *x.shape[2:]), 1, 0),
            (x_BSD, batch["targets"]),
        )
        joined = [
            jnp.moveaxis(x, 0, 1).reshape(batch["targets"].shape) for x in jax.lax.map(piece, cut)
        ]
        return {"nll": joined[0], "best": joined[1]}

    return of


def _divisor(length: int, least: float) -> int:
    """Return the smallest divisor of a length that is at least `least`, or the length."""
    return next((n for n in range(1, length) if length % n == 0 and n >= least), length)
