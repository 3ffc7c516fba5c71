"""Log-probabilities of continuations, many in a row of tokens, on a run's mesh. Shapes: B rows
T time  D embed  V vocab."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from maxstack.data.chat import bos_of
from maxstack.data.tokenizers import open_prompt_tokenizer, open_tokenizer
from maxstack.errors import DataError, quoted
from maxstack.evals.task import Likelihood
from maxstack.kernels.cross_entropy import cross_entropy
from maxstack.objectives.objective import Batch, Models
from maxstack.schema.mesh import parts

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.data import Tokenizer as TokenizerConfig

LOGITS = 1 << 30
"""Bytes of logits on a device at a time, about."""


class Scored(NamedTuple):
    """Tokens of which those from `begin` on are scored, given all before them."""

    tokens: Sequence[int]
    begin: int


class Scorer:
    """Scores rows that hold several requests each, one after the other as packed documents lie.

    Rows depend on the requests alone, and are the same on any mesh; every process makes them all
    and computes its share.
    """

    def __init__(self, run: "Run", batch_size: int, length: int):
        """`length`: tokens of a row. Both are rounded up to what the mesh divides."""
        rules, shape = run.cfg.mesh.rules, run.mesh.shape
        pieces, over = parts(rules["seq"], shape), parts(rules["batch"], shape)
        self.height = -(-batch_size // over) * over
        self.length = length if pieces == 1 else -(-length // (2 * pieces)) * 2 * pieces
        self._run = run
        chunk = 1
        if pieces == 1:
            vocab = run.cfg.decoder.vocab / parts(rules["vocab"], shape)
            chunk = _divisor(self.length, self.height / over * self.length * vocab * 4 / LOGITS)
        self._step = run.of_models(_scored(chunk))
        self.cut = 0
        """Requests so far that lost their beginning."""

    def too_long(self, request: Scored) -> bool:
        """True for a request that loses its beginning."""
        return len(request.tokens) > self.length + 1

    def check(self, request: Scored) -> None:
        """DataError where more is to be scored than a row holds."""
        if (count := len(request.tokens) - request.begin) > self.length:
            raise DataError(
                f"{count:,} tokens are to be scored, and a row holds {self.length:,}: give more by "
                "data.seq_len, or --length of maxstack eval, or leave the task out"
            )

    def __call__(
        self, params: Any, requests: Sequence[Scored], progress: str = ""
    ) -> list[Likelihood]:
        """The likelihood of each request's continuation; of one that is too long, its beginning is
        left out. `progress`: what a bar says; "" for none. DataError as `check`."""
        for request in requests:
            self.check(request)
            self.cut += self.too_long(request)
        cut = [
            Scored(tokens[(lost := max(0, len(tokens) - self.length - 1)) :], max(begin - lost, 1))
            for tokens, begin in requests
        ]
        rows = packed([len(each.tokens) - 1 for each in cut], self.length)
        found: list[Likelihood | None] = [None] * len(cut)
        for first in tqdm.tqdm(
            range(0, len(rows), self.height),
            desc=progress,
            unit=" batches",
            disable=not progress or None,
        ):
            batch = rows[first : first + self.height]
            result = jax.device_get(self._step(params, self._placed(batch, cut)))
            for row, members in enumerate(batch):
                for number, start in members:
                    tokens, begin = cut[number]
                    span = slice(start + begin - 1, start + len(tokens) - 1)
                    found[number] = Likelihood(
                        -float(result["nll"][row, span].sum(dtype=np.float64)),
                        bool(result["best"][row, span].all()),
                        len(tokens) - begin,
                    )
        return [each for each in found if each is not None]

    def _placed(self, rows: list[list[tuple[int, int]]], cut: list[Scored]) -> dict[str, jax.Array]:
        shape = self.height, self.length
        names = "tokens", "targets", "positions", "segments"
        arrays: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in names}
        for row, members in enumerate(rows):
            for segment, (number, start) in enumerate(members, 1):
                tokens = np.asarray(cut[number].tokens, np.int32)
                span = slice(start, start + len(tokens) - 1)
                arrays["tokens"][row, span] = tokens[:-1]
                arrays["targets"][row, span] = tokens[1:]
                arrays["positions"][row, span] = np.arange(len(tokens) - 1)
                arrays["segments"][row, span] = segment
        arrays["real"] = arrays["segments"] > 0
        batches = self._run.batches
        own = batches.rows(self.height)
        return {
            name: batches.put(array[own], self.height, batches.sharding(name))
            for name, array in arrays.items()
        }


def packed(lengths: Sequence[int], width: int) -> list[list[tuple[int, int]]]:
    """Rows of (number, start) that hold spans of these lengths, none more than `width`: the longest
    first, each into the fullest row with room for it."""
    rows: list[list[tuple[int, int]]] = []
    by_room: list[list[int]] = [[] for _ in range(width + 1)]
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[number]
        room = next((room for room in range(need, width + 1) if by_room[room]), width)
        if not by_room[room]:
            by_room[width].append(len(rows))
            rows.append([])
        row = by_room[room].pop(0)
        rows[row].append((number, width - room))
        by_room[room - need].append(row)
    return rows


class Texts:
    """Texts as the tokens that are scored, in lm-evaluation-harness's ways: special tokens that are
    spelt out are these tokens."""

    def __init__(self, tokenizer: "TokenizerConfig"):
        self.tokenizer = open_prompt_tokenizer(tokenizer)
        self._bos, named = self.tokenizer.encode(b"").tolist(), bos_of(tokenizer)
        self._first = (named or self._bos or list(open_tokenizer(tokenizer).eos))[:1]
        self._spelt = self.tokenizer.text_of(self._first[0]) if self._first else None

    def prompt(self, text: str) -> list[int]:
        """Tokens to go on from."""
        return self._encoded(text) or self._begin(text)

    def pair(self, context: str, continuation: str) -> Scored:
        """A context and what follows: the tokens of the whole, split after as many as the context
        has alone; white space at its end belongs to what follows. DataError where nothing is
        left to score."""
        whole = self._encoded(context + continuation, bare=not context)
        begin = len(self._encoded(context.rstrip())) if context else 0
        if begin == 0:
            before, begin = self._begin(continuation), 1
            whole = whole if whole[:1] == before else before + whole
        if begin >= len(whole):
            raise DataError(
                f"{quoted(continuation)} after {quoted(context[-40:])}: adds no token, so there is "
                "nothing to score"
            )
        return Scored(whole, begin)

    def windows(self, text: str, length: int) -> list[Scored]:
        """A text in pieces of at most `length` inputs, each of whose tokens is scored once, a BOS
        that the tokenizer adds too: the first after BOS or else EOS, the last piece with as much
        before it as fits."""
        tokens = self._encoded(text)
        pieces = [Scored(self._begin(text) + tokens[:length], 1)] if tokens else []
        for first in range(length, len(tokens), length):
            end = min(first + length, len(tokens))
            pieces.append(Scored(tokens[end - length - 1 : end], length + 1 - (end - first)))
        return pieces

    def _encoded(self, text: str, bare: bool = False) -> list[int]:
        """Ids, after the BOS that the tokenizer adds, unless the text spells it out, or `bare`."""
        ids = self.tokenizer.encode_marked(text)[0].tolist()
        adds = not bare and not (self._spelt and text.startswith(self._spelt))
        return self._bos * adds + ids

    def _begin(self, text: str) -> list[int]:
        if not self._first:
            raise DataError(
                f"{quoted(text[:40])}: has nothing before it, and the tokenizer "
                f"{self.tokenizer.name} has neither BOS nor EOS to begin with"
            )
        return self._first


def _scored(chunks: int) -> Callable[[Models, Batch], Batch]:
    """A function of models and a batch -> nll float32 and whether the target is the likeliest,
    both [B, T]; logits are made in so many pieces of the rows."""

    def of(models: Models, batch: Batch) -> dict[str, jax.Array]:
        model = models.policy
        x_BTD = model.hidden(batch)

        def piece(of_piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x_BTD, targets_BT = of_piece
            logits_BTV = model.logits(x_BTD)
            nll_BT, _ = cross_entropy(logits_BTV, targets_BT)
            return nll_BT, logits_BTV.argmax(-1) == targets_BT

        if chunks == 1:
            nll, best = piece((x_BTD, batch["targets"]))
            return {"nll": nll, "best": best}
        cut = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(len(x), chunks, -1, *x.shape[2:]), 1, 0),
            (x_BTD, batch["targets"]),
        )
        joined = [
            jnp.moveaxis(x, 0, 1).reshape(batch["targets"].shape) for x in jax.lax.map(piece, cut)
        ]
        return {"nll": joined[0], "best": joined[1]}

    return of


def _divisor(length: int, least: float) -> int:
    """The smallest divisor of a length that is no less than `least`, or the length."""
    return next((n for n in range(1, length) if length % n == 0 and n >= least), length)
