"""The engine: requests in, tokens out, one step after the other.

The scheduler picks the chunks of a step, a program computes their tokens as rows of one batch, and
the sampler chooses the next token of each request that has no prompt left to compute. Programs
exist for a few numbers of rows, and a row's result does not depend on the other rows: a request's
answer depends on itself alone (batch_invariance.py checks it).
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.errors import DataError, quoted
from maxstack.inference import multi_step
from maxstack.inference.adapters import Adapters
from maxstack.inference.batch_invariance import StepSizes
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import Programs
from maxstack.inference.request import Chunk, Output, Sampling, Token, TokenSequence
from maxstack.inference.runner import Batch, ChunkTokens, Runner
from maxstack.inference.sampler import LogitsRow, Sampler
from maxstack.inference.sampling import is_adjusted
from maxstack.inference.scheduler import Scheduler, sizes_of_prompt

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config

SLOW = 0.02
"""Seconds of a single step above which several steps in one program gain nothing: the host takes 1
to 4 ms of each, and waits for the rest."""
NGRAM = 4
"""Tokens at the end of a text that are looked for earlier in it, at most."""


class Engine:
    """Generates for any number of requests at a time. Not safe to call from several threads."""

    sizes: StepSizes | None = None
    """Tries sizes of steps before they are used; None: all may be used."""

    def __init__(
        self,
        run: "Run",
        params: Any,
        limits: Limits,
        max_length: int,
        adapters: Adapters = Adapters(),  # noqa: B008 (it holds nothing)
        on_demand: int | None = None,
    ):
        """`run` is assembled from `programs.inference_config(cfg)`. `params` are taken over, and
        deleted where they are replaced; None: `load` brings them. `on_demand`: pages are allocated
        and sizes of steps are tried (serve.identical) as requests need them, the first pages for a
        request of so many tokens."""
        platform = run.mesh.devices.flat[0].platform
        layout = Layout.of(run.cfg.decoder, run.cfg.serve, platform)
        programs = Programs(run, layout, limits, max_length, adapters, on_demand)
        programs.load(params)
        self._init(run.cfg, layout, programs, max_length, adapters.names)
        if on_demand is not None:
            asked = run.cfg.serve.identical
            self.sizes = StepSizes(programs, run.cfg.decoder.vocab, max_length, asked)

    @classmethod
    def from_programs(
        cls, cfg: "Config", layout: Layout, programs: Runner, max_length: int
    ) -> "Engine":
        """Return an engine on programs that hold their weights."""
        engine = cls.__new__(cls)
        engine._init(cfg, layout, programs, max_length)
        return engine

    def _init(
        self,
        cfg: "Config",
        layout: Layout,
        programs: Runner,
        max_length: int,
        adapters: Sequence[str] = (),
    ) -> None:
        self.cfg = cfg
        self.max_length = max_length
        self.programs = programs
        self.adapters = adapters
        self._layout = layout
        self._sampler = Sampler(cfg.decoder.vocab, max_length)
        # The scheduler asks for drafts as it forms a chunk, since they take part of its budget.
        draft = self._drafts if cfg.serve.speculate else None
        limits = programs.limits
        self.scheduler = Scheduler(layout, limits, programs.replicas, draft, share_prompts=True)
        self._sequences: dict[int, TokenSequence] = {}
        self._added = 0
        self.drafted = self.accepted = 0
        self._fastest = math.inf

    def compile(self, prompt: int | None, draws: bool = True) -> None:
        """Compile what a prompt of so many tokens and its answer need, before there are weights.
        None: what all prompts need. `draws`: not all tokens are the likeliest ones."""
        sizes, outputs = self.programs.sizes, self.programs.outputs
        if prompt is None:
            logits_OV = self.programs.compile(sizes, outputs)
        else:
            # Of a prompt, only the last token is followed by one that is chosen.
            logits_OV = self.programs.compile(sizes_of_prompt(sizes, prompt), outputs[:1])
        if logits_OV is not None:
            self._sampler.compile(logits_OV, draws)

    def load(self, params: Any) -> None:
        """Replace the weights by others, which the caller keeps, or None to forget them. Nothing
        that was cached is used again."""
        # Half an answer by old keys and values and half by new weights is the answer of no model.
        assert not self._sequences, "requests began with other weights"
        self.programs.load(params, keep=True)
        self.scheduler.forget()

    def check(self, prompt: Sequence[int]) -> None:
        """Raise DataError for a prompt that cannot be answered. Safe to call from any thread."""
        if not prompt:
            raise DataError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_length:
            raise DataError(
                f"the prompt is {len(prompt)} tokens long, and serve.max_length="
                f"{self.max_length} holds prompt and answer; shorten it, or raise serve.max_length"
            )
        vocab = self.cfg.decoder.vocab
        # An index out of range is no error in XLA: another row of the embedding would answer.
        outside = next((token for token in prompt if not 0 <= token < vocab), None)
        if outside is not None:
            raise DataError(f"token {outside} is outside the model's vocabulary of {vocab}")

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        priority: int = 0,
        adapter: str | None = None,
        client: str = "",
    ) -> int:
        """Queue a request of a client, answered with the adapter of this name -> its number.
        DataError for a prompt that cannot be answered and for an unknown adapter."""
        self.check(prompt)
        number = 0
        if adapter is not None:
            if adapter not in self.adapters:
                known = ", ".join(self.adapters) or "none; name their folders in serve.adapters"
                raise DataError(f"adapter {quoted(adapter)}: no such adapter; there are {known}")
            number = 1 + self.adapters.index(adapter)
        self._added += 1
        sequence = TokenSequence(
            self._added, [*prompt], len(prompt), sampling, priority, number, client
        )
        self._sequences[sequence.number] = sequence
        self.scheduler.add(sequence)
        return sequence.number

    def abort(self, number: int) -> None:
        """End a request; do nothing where it has ended."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def renew(self) -> None:
        """End all requests and begin with an empty cache, after a step that was interrupted."""
        for number in [*self._sequences]:
            self.abort(number)
        self.programs.renew()
        self.scheduler.forget()

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._sequences)

    def sequence(self, number: int) -> TokenSequence | None:
        """Return the tokens of a request so far; None where it has ended."""
        return self._sequences.get(number)

    def step(self, many: int = 1) -> list[Output]:
        """Compute one step, or where requests need nothing of the host in between, up to `many` at
        once -> the progress of the requests in it."""
        chunks, copies = self.scheduler.schedule(
            self.programs.sizes, self.cfg.serve.speculate, prompts_first=many > 1
        )
        if not chunks:
            assert not self._sequences, "requests wait, and none can run"
            self.programs.copy(copies)
            return []
        # First, since the cache may grow for it.
        batch, wanted, firsts = self._batch(chunks)
        most = self.programs.outputs[-1]
        outputs = {len(wanted[i : i + most]) for i in range(0, len(wanted), most)}
        if self.sizes and not self.sizes.admit(self._rows(chunks), outputs):
            # Other sizes give other bits, so what the dropped ones cached is computed again.
            self.scheduler.restart()
            return []
        self.programs.copy(copies)
        if many > 1 and (steps := self._reserve_steps(chunks, many)) > 1:
            several = self._multi_step(chunks, steps)
            if several is not None:
                return several
        began = time.perf_counter()
        x_RD = self.programs.forward(batch)
        # Logits are a program of their own: the head is a fifth of the weights of a 0.1 B model,
        # and of a prompt's 512 rows only the last may be wanted.
        rows = [firsts[row.chunk] + row.position - chunks[row.chunk].start for row in wanted]
        tokens: dict[tuple[int, int], Token] = {}
        embeddings: dict[int, Any] = {}
        for row, token, normed_D in self._choose(x_RD, wanted, rows):
            number = row.sequence.number
            tokens[number, row.position] = token
            if row.sequence.sampling.embed:
                embeddings[number] = np.asarray(normed_D(), np.float32)
        progress = []
        for chunk in chunks:
            output = self._finish(chunk, tokens)
            if output is not None and output.request in embeddings:
                embedding = embeddings[output.request]
                output = dataclasses.replace(output, tokens=(), embedding=embedding)
            if output is not None:
                progress.append(output)
        if self.cfg.serve.modules:
            self._draft_by_modules(x_RD, batch, chunks, firsts)
        self._fastest = min(self._fastest, time.perf_counter() - began)
        return progress

    def try_sizes(self) -> None:
        """Try all sizes of steps, while no request runs."""
        while self.sizes and (size := self.sizes.next_untried()):
            if not self.sizes.admit(size):
                self.scheduler.restart()

    def _rows(self, chunks: Sequence[Chunk]) -> int:
        """Return the batched tokens of the fullest replica."""
        used = [0] * self.programs.replicas
        for chunk in chunks:
            used[chunk.sequence.replica] += chunk.size
        return max(used)

    def _reserve_steps(self, chunks: Sequence[Chunk], many: int) -> int:
        """Take the pages of several steps from these chunks -> how many may be computed at once."""
        # Drafts are checked on the host, between steps.
        if self.cfg.serve.speculate or not self.programs.has_multi_step:
            return 1
        if self._fastest > SLOW:
            return 1
        left = []
        for sequence, start, size, _ in chunks:
            # One prompt in the step rules it out: it has tokens left that the program does not
            # know.
            decodes = size == 1 and len(sequence.tokens) == start + 1
            if not decodes or not multi_step.can_run_ahead(sequence):
                return 1
            last = multi_step.last_position(sequence, self.max_length)
            left.append(last + 1 - len(sequence.tokens))
        # Go on while any has tokens left; rows that end earlier idle until the program ends.
        steps = min(many, multi_step.STEPS, max(left))
        return self.scheduler.reserve_steps(chunks, left, steps) if steps > 1 else 1

    def _multi_step(self, chunks: Sequence[Chunk], steps: int) -> list[Output] | None:
        """Compute several steps in one program; None while it is compiled. It ends early where so
        few requests are left that a smaller step holds them, and with the first answer where others
        want its place."""
        batch, _, firsts = self._batch(chunks)
        sequences = {first: chunk.sequence for first, chunk in zip(firsts, chunks, strict=True)}
        rows = len(batch.rows.tokens_R)
        each = rows // self.programs.replicas
        # Where the live rows fit a smaller step, it costs less to return to the host and use that
        # one.
        fewest = max((size for size in self.programs.sizes if size < each), default=0)
        # Somebody waits for a place: return with the first answer that ends, so that it gets it.
        others = self.scheduler.waiting or len(self.scheduler.running) > len(chunks)
        bounds = multi_step.Bounds(steps, fewest, len(chunks) - 1 if others else 0)
        tops = [chunk.sequence.sampling.logprobs for chunk in chunks]
        rules = multi_step.make_rules(sequences, rows, self.max_length)
        made = self.programs.multi_step(batch, rules, bounds, self._sampler.top_count(tops))
        if made is None:
            return None
        outputs = []
        for chunk, first, top in zip(chunks, firsts, tops, strict=True):
            sequence, new = chunk.sequence, multi_step.read_tokens(made, first, top)
            length = len(sequence.tokens) + len(new)
            finish = self._finish_reason(sequence, length, new[-1].token)
            self._record(chunk._replace(size=len(new)), new, finish)
            outputs.append(Output(sequence.number, tuple(new), (), finish, sequence.cached))
        return outputs

    def _choose(
        self,
        x_RD: Any,
        wanted: Sequence[LogitsRow],
        rows: Sequence[int],
        module: int | None = None,
    ) -> Iterator[tuple[LogitsRow, Token, Callable[[], Any]]]:
        """Yield wanted rows, the tokens after them by the model or a module of multi-token
        prediction, and their normed states [D] for who asks; `rows` are their indices in the
        step."""
        # Logits in float32 are 4 bytes times the vocabulary a row, so compute a bounded number at a
        # time.
        most = self.programs.outputs[-1]
        for start in range(0, len(wanted), most):
            some = wanted[start : start + most]
            normed_OD, logits_OV = self.programs.head(x_RD, rows[start : start + most], module)
            after = self._sampler.tokens(logits_OV, some)
            for i, (row, token) in enumerate(zip(some, after, strict=True)):
                # A state is read from the device only where its request asks for an embedding.
                yield row, token, functools.partial(normed_OD.__getitem__, i)

    def _draft_by_modules(
        self, x_RD: Any, batch: Batch, chunks: Sequence[Chunk], firsts: Sequence[int]
    ) -> None:
        """Guess the tokens after those of a step by modules of multi-token prediction. They compute
        all its rows except those of wrong drafts, because they read keys of their own.

        The key of module m at position p is of the token at p + 1 + m too: where that was a wrong
        draft, or lies behind a cached prefix and another request went on differently, the key stays
        as it was. That makes drafts a little worse and changes no answer."""
        next_R: Any = np.zeros_like(batch.rows.tokens_R)
        positions_R: Any = np.array(batch.rows.positions_R)
        rows, drafting = [], []
        for (sequence, start, size, _), first in zip(chunks, firsts, strict=True):
            sequence.drafts = []
            end = first + sequence.computed - start
            # Position -1 marks a row without a token. Rows of wrong drafts must not write to the
            # module's cache.
            positions_R[end : first + size] = -1
            decodes = len(sequence.tokens) - sequence.computed == 1
            runs = sequence.number in self._sequences
            # A draft helps only where the next step decodes and `_drafts` will offer it.
            if decodes and runs and not is_adjusted(sequence.sampling, sequence.answer_length):
                rows.append(end - 1)
                drafting.append(sequence)
        for module in range(self.cfg.serve.modules):
            for (sequence, start, _, _), first in zip(chunks, firsts, strict=True):
                known = [*sequence.tokens, *sequence.drafts]
                after = known[start + 1 + module : sequence.computed + 1 + module]
                next_R[first : first + len(after)] = after
            # Copy: the arrays of numpy may be read after the call returns, and the next module
            # changes them.
            own = batch.rows._replace(tokens_R=next_R.copy(), positions_R=positions_R)
            x_RD = self.programs.forward(batch._replace(rows=own), x_RD, module)
            # The position decides the random key, so a module draws by the key that the model will
            # use for this token, and a draft is accepted wherever both choose the same.
            wanted = [LogitsRow(each, len(each.tokens) - 1 + module, 0, None) for each in drafting]
            for row, token, _ in self._choose(x_RD, wanted, rows, module):
                row.sequence.drafts.append(token.token)

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[Batch, list[LogitsRow], list[int]]:
        """Return the arrays of a step, the rows whose logits are wanted, and the first row of each
        chunk."""
        contents, wanted = [], []
        for i, (sequence, start, size, drafts) in enumerate(chunks):
            tokens = [*sequence.tokens[start : start + size], *drafts]
            where = sequence.replica, sequence.slot, start
            contents.append(ChunkTokens(*where, tokens, sequence.tables, sequence.adapter))
            scores_prompt = sequence.sampling.prompt_logprobs is not None
            for position in range(start, start + size):
                # The last known token and each draft behind it: what follows these is chosen.
                if position >= len(sequence.tokens) - 1:
                    wanted.append(LogitsRow(sequence, position, i, None))
                # Prompts that were reported before a preemption are computed again, not reported
                # again.
                elif scores_prompt and sequence.reported <= position < sequence.prompt_length - 1:
                    wanted.append(LogitsRow(sequence, position, i, sequence.tokens[position + 1]))
        batch, firsts = self.programs.batch(contents)
        return batch, wanted, firsts

    def _finish(self, chunk: Chunk, tokens: dict[tuple[int, int], Token]) -> Output | None:
        """Record what a chunk gave -> what to report of it, if anything."""
        sequence, last = chunk.sequence, chunk.sequence.prompt_length - 1
        prompt: list[Token] = []
        if sequence.sampling.prompt_logprobs is not None and sequence.reported <= last:
            # The first token has none before it, so no log-probability.
            if not sequence.reported:
                prompt.append(Token(sequence.tokens[0]))
            # After a preemption chunks begin anew, so one may end before what was reported.
            end = max(sequence.reported, min(chunk.start + chunk.size, last))
            prompt += [tokens[sequence.number, i] for i in range(sequence.reported, end)]
            # Beyond `last` once all is reported, so that a prompt of one token is not reported
            # twice either.
            sequence.reported = end if end < last else sequence.prompt_length
        new, finish = self._accept(chunk, tokens)
        self._record(chunk, new, finish)
        if not new and not prompt and not finish:
            return None
        return Output(sequence.number, tuple(new), tuple(prompt), finish, sequence.cached)

    def _record(self, chunk: Chunk, new: Sequence[Token], finish: str | None) -> None:
        """Tell the scheduler that a chunk was computed; end its sequence where it is complete."""
        # Copy now: the snapshot is the state after this step, and the next one overwrites it.
        if copies := self.scheduler.finish_chunk(chunk, [token.token for token in new]):
            self.programs.copy(copies)
        if finish:
            self.scheduler.remove(chunk.sequence)
            del self._sequences[chunk.sequence.number]

    def _accept(
        self, chunk: Chunk, tokens: dict[tuple[int, int], Token]
    ) -> tuple[list[Token], str | None]:
        """Return the new tokens of an answer: the one after the last known one, and those after
        drafts as long as each draft is what would have been chosen."""
        sequence, known = chunk.sequence, len(chunk.sequence.tokens)
        new: list[Token] = []
        # No rejection sampling: each position is chosen by its own key, so accepting a draft only
        # where it equals the choice gives exactly the answer without drafts.
        self.drafted += len(chunk.drafts)
        for position in range(known - 1, chunk.start + chunk.size):
            token = tokens[sequence.number, position]
            new.append(token)
            finish = self._finish_reason(sequence, known + len(new), token.token)
            draft = position - known + 1
            agreed = draft < len(chunk.drafts) and chunk.drafts[draft] == token.token
            if finish or not agreed:
                return new, finish
            self.accepted += 1
        return new, None

    def _finish_reason(self, sequence: TokenSequence, length: int, token: int) -> str | None:
        """Return why the answer ends with `token`, which makes the text `length` tokens long; None:
        it goes on."""
        sampling = sequence.sampling
        if sampling.grammar is not None:
            # Ask the grammar first: it has to see every token of its answer.
            sampling.grammar.accept(token)
            if sampling.grammar.finished:
                return "stop"
        if token in sampling.stop_tokens:
            return "stop"
        return "length" if length > multi_step.last_position(sequence, self.max_length) else None

    def _drafts(self, sequence: TokenSequence) -> Sequence[int]:
        """Return drafts of the next tokens; none where the choice depends on more than the logits
        of each position."""
        if is_adjusted(sequence.sampling, sequence.answer_length):
            return ()
        # A step chooses one token more than it accepts drafts, so the last possible token is never
        # drafted.
        left = multi_step.last_position(sequence, self.max_length) - len(sequence.tokens)
        count = min(self.cfg.serve.speculate, left)
        if count <= 0:
            return ()
        if self.cfg.serve.modules:
            return sequence.drafts[:count]
        return ngram_drafts(sequence.tokens, count)


def ngram_drafts(tokens: Sequence[int], count: int) -> Sequence[int]:
    """Return at most `count` tokens that followed the last occurrence of the text's end, the
    longest end that occurs earlier (prompt lookup, Saxena 2023)."""
    length = len(tokens)
    for size in range(min(NGRAM, length - 1), 0, -1):
        # The latest occurrence is likeliest to go on alike. Compare the first token before slicing:
        # this runs in Python for each request and step.
        end = list(tokens[length - size :])
        for start in range(length - size - 1, -1, -1):
            if tokens[start] == end[0] and list(tokens[start : start + size]) == end:
                return tokens[start + size : start + size + count]
    return ()
