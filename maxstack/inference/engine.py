"""The engine: requests in, tokens out, one step after the other.

A step computes rows, each a token of some request, by one of a few programs: what a request is
answered depends on itself alone, not on what is computed beside it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxstack.errors import DataError, quoted
from maxstack.inference import multi_step
from maxstack.inference.adapters import Adapters
from maxstack.inference.drafts import ngram
from maxstack.inference.layout import Layout
from maxstack.inference.programs import Programs
from maxstack.inference.request import Output, Sampling, Token
from maxstack.inference.runner import Batch, ChunkTokens, Runner
from maxstack.inference.sampler import Sampler, Wanted
from maxstack.inference.sampling import is_adjusted
from maxstack.inference.scheduler import Chunk, Limits, Scheduler, TokenSequence

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config


class Engine:
    """Generates for any number of requests at a time. Not safe to call from several threads."""

    def __init__(
        self,
        run: "Run",
        params: Any,
        limits: Limits,
        max_length: int,
        adapters: Adapters = Adapters(),  # noqa: B008 (it holds nothing)
    ):
        """`run` is assembled from `programs.serving(cfg)`; `params` are taken over, and deleted
        where they are replaced; None: `load` brings them."""
        platform = run.mesh.devices.flat[0].platform
        layout = Layout.of(run.cfg.decoder, run.cfg.serve, platform)
        programs = Programs(run, layout, limits, max_length, adapters)
        programs.load(params)
        self._begin(run.cfg, layout, programs, max_length, adapters.names)

    @classmethod
    def on(cls, cfg: "Config", layout: Layout, programs: Runner, max_length: int) -> "Engine":
        """An engine on programs that are there, with their weights."""
        engine = cls.__new__(cls)
        engine._begin(cfg, layout, programs, max_length)
        return engine

    def _begin(
        self,
        cfg: "Config",
        layout: Layout,
        programs: Runner,
        max_length: int,
        adapters: Sequence[str] = (),
    ) -> None:
        self.cfg, self.max_length = cfg, max_length
        self._layout, self.programs, self.adapters = layout, programs, adapters
        self._sampler = Sampler(cfg.decoder.vocab, max_length)
        draft = self._drafts if cfg.serve.speculate else None
        replicas, limits = programs.replicas, programs.limits
        self.scheduler = Scheduler(layout, limits, replicas, draft, twins=True)
        self._tasks: dict[int, TokenSequence] = {}
        self._added = 0
        self.drafted = self.accepted = 0

    def load(self, params: Any) -> None:
        """Other weights, which are kept as they are, or None to forget them; nothing that was
        cached is used again."""
        assert not self._tasks, "requests began with other weights"
        self.programs.load(params, keep=True)
        self.scheduler.forget()

    def check(self, prompt: Sequence[int]) -> None:
        """DataError for a prompt that cannot be answered. Safe to call from any thread."""
        vocab = self.cfg.decoder.vocab
        if not prompt:
            raise DataError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_length:
            raise DataError(
                f"the prompt is {len(prompt)} tokens long, and serve.max_length="
                f"{self.max_length} holds prompt and answer; shorten it, or raise serve.max_length"
            )
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
        DataError for a prompt that cannot be answered, and where there is no such adapter."""
        self.check(prompt)
        if adapter is not None and adapter not in self.adapters:
            there = ", ".join(self.adapters) or "none; name their folders in serve.adapters"
            raise DataError(f"adapter {quoted(adapter)}: no such adapter; there are {there}")
        chosen = 0 if adapter is None else 1 + self.adapters.index(adapter)
        self._added += 1
        task = TokenSequence(
            self._added, list(prompt), len(prompt), sampling, priority, chosen, client
        )
        self._tasks[task.number] = task
        self.scheduler.add(task)
        return task.number

    def abort(self, number: int) -> None:
        """End a request; nothing where it has ended."""
        task = self._tasks.pop(number, None)
        if task is not None:
            self.scheduler.remove(task)

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._tasks)

    def task(self, number: int) -> TokenSequence | None:
        """The state of a request; None where it has ended."""
        return self._tasks.get(number)

    def step(self, many: int = 1) -> list[Output]:
        """Compute one step -> the progress of the requests in it; or where nothing stands against
        it, up to `many` at once."""
        pieces, copies = self.scheduler.schedule(
            self.programs.sizes, self.cfg.serve.speculate, prompts=many > 1
        )
        self.programs.copy(copies)
        if not pieces:
            assert not self._tasks, "requests wait, and none can run"
            return []
        if many > 1 and (steps := self._ahead(pieces, many)) > 1:
            return self._burst(pieces, steps)
        batch, wanted, firsts = self._batch(pieces)
        x_RD = self.programs.forward(batch)
        rows = [firsts[row.piece] + row.position - pieces[row.piece].start for row in wanted]
        tokens: dict[tuple[int, int], Token] = {}
        embeddings: dict[int, Any] = {}
        for row, token, normed_D in self._chosen(x_RD, wanted, rows):
            tokens[row.task.number, row.position] = token
            if row.task.sampling.embed:
                embeddings[row.task.number] = np.asarray(normed_D(), np.float32)
        outputs = [self._finished(piece, tokens) for piece in pieces]
        if self.cfg.serve.modules:
            self._look_further(x_RD, batch, pieces, firsts)
        return [
            dataclasses.replace(output, tokens=(), embedding=embeddings[output.request])
            if output.request in embeddings
            else output
            for output in outputs
            if output is not None
        ]

    def _ahead(self, pieces: Sequence[Chunk], many: int) -> int:
        """Steps that may be computed at once after these pieces were scheduled."""
        if self.cfg.serve.speculate or not self.programs.bursts:
            return 1
        for task, start, size, _ in pieces:
            if size > 1 or len(task.tokens) > start + 1 or not multi_step.can_run_ahead(task):
                return 1
        left = [
            multi_step.last_position(task, self.max_length) + 1 - len(task.tokens)
            for task in (p.task for p in pieces)
        ]
        steps = min(many, multi_step.STEPS, max(left))
        return self.scheduler.ahead(pieces, left, steps) if steps > 1 else 1

    def _burst(self, pieces: Sequence[Chunk], steps: int) -> list[Output]:
        """Several steps in one program. It ends early where so few requests are left that a smaller
        step holds them, and with the first answer where others want its place."""
        batch, _, firsts = self._batch(pieces)
        tasks = {first: piece.task for first, piece in zip(firsts, pieces, strict=True)}
        rows = len(batch.rows.tokens_R)
        each = rows // self.programs.replicas
        fewest = max((size for size in self.programs.sizes if size < each), default=0)
        others = self.scheduler.waiting or len(self.scheduler.running) > len(pieces)
        bounds = multi_step.Bounds(steps, fewest, len(pieces) - 1 if others else 0)
        tops = [piece.task.sampling.logprobs for piece in pieces]
        rules = multi_step.make_rules(tasks, rows, self.max_length)
        made = self.programs.burst(batch, rules, bounds, self._sampler.kept(tops))
        return [
            self._went_on(piece, multi_step.read_tokens(made, first, piece.task.sampling.logprobs))
            for piece, first in zip(pieces, firsts, strict=True)
        ]

    def _went_on(self, piece: Chunk, new: Sequence[Token]) -> Output:
        """Note the tokens of a burst."""
        task = piece.task
        finish = self._ends(task, len(task.tokens) + len(new), new[-1].token)
        self._end(piece._replace(size=len(new)), new, finish)
        return Output(task.number, tuple(new), (), finish, task.cached)

    def _chosen(
        self, x_RD: Any, wanted: Sequence[Wanted], rows: Sequence[int], module: int | None = None
    ) -> Iterator[tuple[Wanted, Token, Callable[[], Any]]]:
        """Wanted rows, the tokens after them by the model or a module of multi-token prediction,
        and their normed states [D] for who asks; `rows` are their indices in the step."""
        most = self.programs.outputs[-1]
        for start in range(0, len(wanted), most):
            some = wanted[start : start + most]
            normed_OD, logits_OV = self.programs.head(x_RD, rows[start : start + most], module)
            after = self._sampler.tokens(logits_OV, some)
            for i, (row, token) in enumerate(zip(some, after, strict=True)):
                yield row, token, functools.partial(normed_OD.__getitem__, i)

    def _look_further(
        self, x_RD: Any, batch: Batch, pieces: Sequence[Chunk], firsts: Sequence[int]
    ) -> None:
        """Guesses of the tokens after those that a step gave, by modules of multi-token prediction;
        they compute all its rows but those of wrong guesses, since they read their own keys.

        A key of module m at p is of the token at p + 1 + m too: where that was a wrong guess, or
        lies behind a cached prefix and another request went on otherwise, the key stays as it was.
        That makes guesses a little worse, and changes no answer."""
        next_R: Any = np.zeros_like(batch.rows.tokens_R)
        positions_R: Any = np.array(batch.rows.positions_R)
        rows, asked = [], []
        for (task, start, size, _), first in zip(pieces, firsts, strict=True):
            task.drafts = []
            end = first + task.computed - start
            positions_R[end : first + size] = -1
            last = len(task.tokens) - task.computed == 1 and task.number in self._tasks
            if last and not is_adjusted(task.sampling, len(task.tokens) - task.prompt):
                rows.append(end - 1)
                asked.append(task)
        for module in range(self.cfg.serve.modules):
            for (task, start, _, _), first in zip(pieces, firsts, strict=True):
                known = [*task.tokens, *task.drafts]
                after = known[start + 1 + module : task.computed + 1 + module]
                next_R[first : first + len(after)] = after
            own = batch.rows._replace(tokens_R=next_R.copy(), positions_R=positions_R)
            x_RD = self.programs.forward(batch._replace(rows=own), x_RD, module)
            wanted = [Wanted(task, len(task.tokens) - 1 + module, 0, None) for task in asked]
            for row, token, _ in self._chosen(x_RD, wanted, rows, module):
                row.task.drafts.append(token.token)

    def _batch(self, pieces: Sequence[Chunk]) -> tuple[Batch, list[Wanted], list[int]]:
        """A step of the pieces, the rows whose logits are wanted, and the first row of each
        piece."""
        rowed, wanted = [], []
        for task, start, size, drafts in pieces:
            tokens = [*task.tokens[start : start + size], *drafts]
            where = task.replica, task.slot, start
            rowed.append(ChunkTokens(*where, tokens, task.tables, task.adapter))
            for position in range(start, start + size):
                if position >= len(task.tokens) - 1:
                    wanted.append(Wanted(task, position, len(rowed) - 1, None))
                elif (
                    task.sampling.prompt_logprobs is not None
                    and task.reported <= position < task.prompt - 1
                ):
                    target = task.tokens[position + 1]
                    wanted.append(Wanted(task, position, len(rowed) - 1, target))
        batch, firsts = self.programs.batch(rowed)
        return batch, wanted, firsts

    def _finished(self, piece: Chunk, tokens: dict[tuple[int, int], Token]) -> Output | None:
        """Note what a piece gave."""
        task, start = piece.task, piece.start
        prompt: list[Token] = []
        if task.sampling.prompt_logprobs is not None and task.reported < task.prompt:
            if not task.reported:
                prompt.append(Token(task.tokens[0]))
            # after a preemption the pieces begin anew
            end = max(task.reported, min(start + piece.size, task.prompt - 1))
            prompt += [tokens[task.number, i] for i in range(task.reported, end)]
            task.reported = end if end < task.prompt - 1 else task.prompt
        new, finish = self._accepted(piece, tokens)
        self._end(piece, new, finish)
        if not new and not prompt and not finish:
            return None
        return Output(task.number, tuple(new), tuple(prompt), finish, task.cached)

    def _end(self, piece: Chunk, new: Sequence[Token], finish: str | None) -> None:
        """Note that a piece was computed; end its task where it is complete."""
        if copies := self.scheduler.done(piece, [token.token for token in new]):
            self.programs.copy(copies)
        if finish:
            self.scheduler.remove(piece.task)
            del self._tasks[piece.task.number]

    def _accepted(
        self, piece: Chunk, tokens: dict[tuple[int, int], Token]
    ) -> tuple[list[Token], str | None]:
        """New tokens of the answer: that after the last known one, and those after drafts as long
        as each draft is what would have been chosen."""
        task, known = piece.task, len(piece.task.tokens)
        end = piece.start + piece.size
        new: list[Token] = []
        self.drafted += len(piece.drafts)
        for position in range(known - 1, end):
            token = tokens[task.number, position]
            new.append(token)
            finish = self._ends(task, known + len(new), token.token)
            draft = position - known + 1
            agreed = draft < len(piece.drafts) and piece.drafts[draft] == token.token
            if finish or not agreed:
                return new, finish
            self.accepted += 1
        return new, None

    def _ends(self, task: TokenSequence, length: int, token: int) -> str | None:
        """Why the answer ends with `token`, which makes the text `length` tokens long; None: it
        goes on."""
        rules = task.sampling
        if rules.grammar is not None:
            rules.grammar.accept(token)
            if rules.grammar.finished:
                return "stop"
        if token in rules.stop_tokens:
            return "stop"
        return "length" if length > multi_step.last_position(task, self.max_length) else None

    def _drafts(self, task: TokenSequence) -> Sequence[int]:
        """Guesses of the next tokens of a request, none where choosing depends on more than the
        logits of each place."""
        rules, length = task.sampling, len(task.tokens)
        if is_adjusted(rules, length - task.prompt):
            return ()
        left = min(task.prompt + rules.max_tokens, self.max_length) - length - 1
        count = max(0, min(self.cfg.serve.speculate, left))
        return task.drafts[:count] if self.cfg.serve.modules else ngram(task.tokens, count)
