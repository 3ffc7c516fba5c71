"""Scheduler of inference: which tokens of which requests a step computes, and in which pages.

Requests that have begun come first, each with its next token; what rows are left go to prompts in
the order of their priority and arrival. A request that finds no page makes the youngest of the
lowest priority give its own back and wait; it computes its tokens again later.

Of several clients, each has its turn (turns.py): where a request finds no place, a client with at
least two more running gives one of them back; where it finds no page, the one that has most.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxstack.errors import ConfigError
from maxstack.inference.fair_share import FairShare, pick_victim
from maxstack.inference.layout import Layout
from maxstack.inference.pool import Pool, page_hash
from maxstack.inference.request import Sampling
from maxstack.schema.mixers import Reach

RESERVE = 100
"""A new request is admitted while one page in so many is left for those that run."""
KEPT = 4
"""One row in so many is left by prompts that go on, while a client waits that has none running."""


@dataclasses.dataclass(eq=False)
class TokenSequence:
    """A request on the host."""

    number: int
    tokens: list[int]
    """The prompt, and what was generated."""
    prompt: int
    """Tokens of the prompt."""
    sampling: Sampling
    priority: int = 0
    """Lower goes first."""
    adapter: int = 0
    client: str = ""
    """Who asks: clients take turns."""
    replica: int = 0
    slot: int = 0
    computed: int = 0
    """Tokens whose arrays are cached."""
    tables: list[list[int]] = dataclasses.field(default_factory=list)
    """By group: the page of each piece of the tokens; 0 where it was given back."""
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    """Of its full pages."""
    drafts: list[int] = dataclasses.field(default_factory=list)
    """Guesses of the next tokens by modules of multi-token prediction."""
    reported: int = 0
    """Tokens of the prompt whose log-probabilities were reported."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache at first."""
    preempted: int = 0
    """Times that it gave its pages back."""

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """Equal for tasks whose prompts have equal arrays."""
        return self.adapter, *self.tokens[: self.prompt]

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the tasks that go first to the front."""
        return self.priority, self.number


class Chunk(NamedTuple):
    """Tokens `start` to `start + size - 1` of a task, which a step computes, and of these drafts
    that the task does not hold yet."""

    task: TokenSequence
    start: int
    size: int
    drafts: tuple[int, ...] = ()


class Limits(NamedTuple):
    """Sizes of an engine, each for one replica."""

    rows: int
    page: int
    pages: tuple[int, ...]
    """By group, without page 0."""
    requests: int
    snapshots: int = 0
    snapshot: int = 512
    """Tokens between snapshots of the states of recurrent layers."""
    prefix_cache: bool = True


class Copy(NamedTuple):
    """A copy of the states of all recurrent layers, between slots of one replica."""

    replica: int
    source: int
    target: int


class PageCopy(NamedTuple):
    """A copy of a page of all layers of a group."""

    replica: int
    group: int
    source: int
    target: int


class Scheduler:
    """Tasks that wait and run, and pages, over one or more replicas of the model."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        replicas: int = 1,
        draft: Callable[[TokenSequence], Sequence[int]] | None = None,
        twins: bool = False,
    ):
        """`draft` guesses the next tokens of a task; `twins`: tasks with equal prompts wait until
        one of them has computed it, and take copies of what is no full page. ConfigError where a
        wrong guess cannot be undone."""
        if draft and layout.recurrent:
            raise ConfigError(
                "serve.speculate: the model has recurrent layers, whose states a wrong guess would "
                "change for good; set it to 0"
            )
        self.limits, self._layout, self._draft = limits, layout, draft
        self._twins = twins and limits.prefix_cache and not layout.recurrent
        self._alike: dict[tuple[int, ...], list[TokenSequence]] = {}
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self._turns = FairShare()
        self._refused: TokenSequence | None = None
        """The task for which the last step had no room."""
        self.pools = [[Pool(size) for size in limits.pages] for _ in range(replicas)]
        self._slots = [list(range(limits.requests, 0, -1)) for _ in range(replicas)]
        self._snapshots = [Pool(limits.snapshots, limits.requests + 1) for _ in range(replicas)]
        self.preemptions = self.queried = self.hits = 0

    def add(self, task: TokenSequence) -> None:
        """Queue a task."""
        self._turns.come(task.client)
        self._wait(task)

    def _wait(self, task: TokenSequence) -> None:
        bisect.insort(self.waiting, task, key=lambda task: task.order)

    def remove(self, task: TokenSequence) -> None:
        """End a task: its pages are free, and their contents may be found again."""
        if task in self.running:
            self.running.remove(task)
            self._give_back(task)
            self._refused = None  # it may find the room that this leaves
        else:
            self.waiting.remove(task)
            self._refused = None if self._refused is task else self._refused
        self._turns.leave(task.client)

    def forget(self) -> None:
        """Contents of all pages and snapshots."""
        for pool in [*self._snapshots, *(pool for pools in self.pools for pool in pools)]:
            pool.forget_all()

    def schedule(
        self, sizes: Sequence[int] = (), guesses: int = 0, prompts: bool = False
    ) -> tuple[list[Chunk], list[Copy | PageCopy]]:
        """Pieces of the next step, those of a replica within its rows, and copies to make before
        it. `sizes` are the numbers of rows that steps may have, `guesses` the tokens that are
        guessed of each request at most; `prompts`: as long as there are prompts to compute, and
        pages for them, these alone."""
        self._make_room()
        left = [self._rows(sizes, guesses)] * len(self.pools)
        begun = sorted(self.running, key=lambda task: (self._turns.served[task.client], task.order))
        long = [task for task in begun if len(task.tokens) - task.computed > 1]
        if prompts:
            pieces, copies = self._pieces(long, left, gently=True), list[Copy | PageCopy]()
            pieces += self._admitted(left, copies, prompts=True)
            if pieces:
                return pieces, copies
        pieces, copies = self._pieces([task for task in begun if task not in long], left), []
        kept = [rows // KEPT if self._turns.someone_waits(self.running) else 0 for rows in left]
        left = [rows - own for rows, own in zip(left, kept, strict=True)]
        pieces += self._pieces(long, left)
        left = [rows + own for rows, own in zip(left, kept, strict=True)]
        # a task that was preempted after its turn may be admitted again, from its beginning
        pieces = [piece for piece in pieces if piece.task in self.running]
        return pieces + self._admitted(left, copies), copies

    def _make_room(self) -> None:
        """Take a task of the client that has most back to the waiting ones, for the one that the
        last step refused, if its client has at least two fewer running: each time they come
        nearer to equal shares, so it ends."""
        task, self._refused = self._refused, None
        if task is not None and self.running:
            clients = [other.client for other in self.running]
            victim = pick_victim(self.running)
            if clients.count(victim.client) > clients.count(task.client) + 1:
                self._preempt(victim)

    def _pieces(
        self, tasks: Sequence[TokenSequence], left: list[int], gently: bool = False
    ) -> list[Chunk]:
        """The next pieces of running tasks, whose rows are taken from those that are left;
        `gently`: none gives its pages back for them."""
        pieces: list[Chunk] = []
        for task in tasks:
            if task in self.running and left[task.replica]:
                piece = self._next(task, left[task.replica], gently)
                if piece:
                    left[task.replica] -= piece.size
                    pieces.append(piece)
        return [piece for piece in pieces if piece.task in self.running]

    def _admitted(
        self, left: list[int], copies: list[Copy | PageCopy], prompts: bool = False
    ) -> list[Chunk]:
        """First pieces of waiting tasks for which there is room, and the copies before them;
        `prompts`: tasks wait whose twins have computed their prompts, and who gave pages back."""
        pieces: list[Chunk] = []
        held = [0] * len(left)  # slots that are kept for tasks that wait for twins
        for task in self._turns.order(self.waiting, self.running):
            if (replica := self._awaited(task, held, prompts)) is not None:
                held[replica] += 1
                continue
            copy = None if prompts and task.preempted else self._admit(task, left, held)
            if copy is None:
                self._refused = None if prompts else task
                break
            self.waiting.remove(task)
            copies += copy
            self.running.append(task)
            piece = self._next(task, left[task.replica])
            assert piece, "a task was admitted without pages for its first piece"
            left[task.replica] -= piece.size
            pieces.append(piece)
        return pieces

    def ahead(self, pieces: Sequence[Chunk], left: Sequence[int], steps: int) -> int:
        """Steps, at most so many, for which there are pages after those of pieces of one token,
        whose tasks may have so many tokens more; the tasks have these pages then."""
        tasks, page = [piece.task for piece in pieces], self.limits.page
        if self._snapshots[0].size:
            every = self.limits.snapshot
            steps = min(steps, *(every - task.computed % every for task in tasks))

        def lengths() -> list[int]:
            return [task.computed + min(steps, own) for task, own in zip(tasks, left, strict=True)]

        def fit() -> bool:
            short = [[0] * len(pools) for pools in self.pools]
            for task, length in zip(tasks, lengths(), strict=True):
                for group, table in enumerate(task.tables):
                    short[task.replica][group] += max(0, -(-length // page) - len(table))
            return all(
                wanted <= pool.available
                for counts, pools in zip(short, self.pools, strict=True)
                for wanted, pool in zip(counts, pools, strict=True)
            )

        while steps > 1 and not fit():
            steps //= 2
        for task, length in zip(tasks, lengths(), strict=True):
            grown = self._grow(task, length)
            assert grown, "pages that were there are gone"
        return steps

    def done(self, piece: Chunk, new: Sequence[int]) -> list[Copy]:
        """Note that a piece was computed and that `new` follows its task's tokens -> copies to make
        before the next step."""
        task, page = piece.task, self.limits.page
        self._turns.served[task.client] += piece.size
        task.tokens += new
        drafts = len(piece.drafts)
        task.computed = piece.start + piece.size - drafts + (max(0, len(new) - 1) if drafts else 0)
        if not self.limits.prefix_cache:
            return []
        hashes = self._hashes(task, task.computed // page)
        for i in range(piece.start // page, len(hashes)):
            for pool, table in zip(self.pools[task.replica], task.tables, strict=True):
                if table[i]:
                    pool.describe(table[i], hashes[i])
        snapshots = self._snapshots[task.replica]
        if not snapshots.size or task.computed % self.limits.snapshot:
            return []
        key = hashes[-1]
        if snapshots.find(key) is not None:
            return []
        target = snapshots.take()
        snapshots.describe(target, key)
        snapshots.release([target])
        return [Copy(task.replica, task.slot, target)]

    def _rows(self, sizes: Sequence[int], guesses: int) -> int:
        """Rows of the next step: of the size below where prompts would fill no more than half of
        the smallest that holds all tokens."""
        if not sizes:
            return self.limits.rows
        running = [len(task.tokens) - task.computed for task in self.running]
        decoding = running.count(1)
        pending = sum(running) + sum(len(task.tokens) for task in self.waiting)
        pending += decoding * guesses
        lower = [size for size in sizes if size < pending]
        above = sizes[min(len(lower), len(sizes) - 1)]
        if lower and lower[-1] >= decoding * (1 + guesses) and 2 * pending <= above:
            return lower[-1]
        return above

    def _next(self, task: TokenSequence, rows: int, gently: bool = False) -> Chunk | None:
        """The next piece of a running task, with pages for it; None where it has to wait."""
        drafts: tuple[int, ...] = ()
        remaining = len(task.tokens) - task.computed
        if remaining == 1 and self._draft and rows > 1:
            drafts = tuple(self._draft(task))[: rows - 1]
        count = min(remaining + len(drafts), rows)
        if self._snapshots[task.replica].size:
            count = min(count, self.limits.snapshot - task.computed % self.limits.snapshot)
        if drafts and not self._grow(task, task.computed + count):
            drafts, count = (), remaining  # a guess takes no pages from other tasks
        while not self._grow(task, task.computed + count):
            if gently:
                return None
            victims = [other for other in self.running if other.replica == task.replica]
            victim = pick_victim(victims)
            self._preempt(victim)
            if victim is task:
                return None
        return Chunk(task, task.computed, count, drafts)

    def _grow(self, task: TokenSequence, length: int) -> bool:
        """Pages for the first `length` tokens, without those that are not read any more; False
        where too few are left, and then nothing is taken."""
        pools, page = self.pools[task.replica], self.limits.page
        wanted = -(-length // page)
        for pool, table, reach in zip(pools, task.tables, self._layout.reaches, strict=True):
            behind = reach.first(task.computed) // page
            gone = [i for i in range(min(behind, len(table))) if table[i]]
            pool.release(table[i] for i in gone)
            for i in gone:
                table[i] = 0
            if pool.available < wanted - len(table):
                return False
        for pool, table in zip(pools, task.tables, strict=True):
            table += [pool.take() for _ in range(wanted - len(table))]
        return True

    def _awaited(self, task: TokenSequence, held: Sequence[int], longer: bool) -> int | None:
        """The replica where a twin of a waiting task computes their prompt, or with `longer` has
        computed it, and a slot is left."""
        twins = self._twins_of(task)
        if not longer and any(twin.computed >= twin.prompt for twin in twins):
            return None
        replicas = (twin.replica for twin in twins)
        return next((i for i in replicas if len(self._slots[i]) > held[i]), None)

    def _twins_of(self, task: TokenSequence) -> list[TokenSequence]:
        """Running tasks with the same prompt and adapter, of which this one may take pages."""
        if not self._twins or task.sampling.prompt_logprobs is not None:
            return []
        return self._alike.get(task.alike, [])

    def _admit(
        self, task: TokenSequence, left: Sequence[int], held: Sequence[int]
    ) -> Sequence[Copy | PageCopy] | None:
        """Give a waiting task a slot and the pages of its prefix that are cached; None where there
        is no room. The copies bring the state of its recurrent layers, or a page in part."""
        open_ = [left[i] and len(self._slots[i]) > held[i] for i in range(len(left))]
        for twin in self._twins_of(task):
            if open_[twin.replica] and twin.computed >= twin.prompt:
                known = task.prompt - 1
                tables = self._tables(task, twin.replica, known, left[twin.replica], twin.tables)
                if tables is not None:
                    self._begin(task, twin.replica, known, tables)
                    return self._split(task, twin)
        fitting = [
            (self._prefix(task, i), self.pools[i][0].available, i)
            for i in range(len(left))
            if open_[i]
        ]
        for hit, _, replica in sorted(fitting, reverse=True):
            known, pools = hit * self.limits.page, self.pools[replica]
            found = [[pool.find(key) or 0 for key in task.hashes[:hit]] for pool in pools]
            tables = self._tables(task, replica, known, left[replica], found)
            if tables is not None:
                self._begin(task, replica, known, tables)
                return self._restored(task, hit)
        return None

    def _tables(
        self,
        task: TokenSequence,
        replica: int,
        known: int,
        rows: int,
        found: Sequence[Sequence[int]],
    ) -> list[list[int]] | None:
        """The full ones of pages with the first `known` tokens of a task, by group, that are read;
        None where some are gone, or too few are left for what its first step computes."""
        page, tables = self.limits.page, []
        full, end = known // page, known + min(rows, len(task.tokens) - known)
        busy = any(other.replica == replica for other in self.running)
        groups = zip(self.pools[replica], self._layout.reaches, found, strict=True)
        for pool, reach, pages in groups:
            first = min(reach.first(known) // page, full)
            shared = [*pages[first:full]]
            if not all(pages[first : -(-known // page)]):
                return None
            tables.append([0] * first + shared)
            free = pool.available - sum(not pool.users(held) for held in shared)
            if free < -(-end // page) - full + (pool.size // RESERVE if busy else 0):
                return None
        return tables

    def _begin(
        self, task: TokenSequence, replica: int, known: int, tables: list[list[int]]
    ) -> None:
        """Give a task a slot and its first pages."""
        task.replica, task.slot = replica, self._slots[replica].pop()
        task.computed, task.tables = known, tables
        for pool, table in zip(self.pools[replica], tables, strict=True):
            for held in filter(None, table):
                pool.share(held)
        self.queried += len(task.tokens)
        self.hits += task.computed
        if not task.preempted:
            task.cached = task.computed
        if self._twins:
            self._alike.setdefault(task.alike, []).append(task)

    def _split(self, task: TokenSequence, twin: TokenSequence) -> list[PageCopy]:
        """Copies of the pages that a task has in part in common with its twin."""
        page, copies = self.limits.page, []
        if task.computed % page:
            for group, (pool, table) in enumerate(
                zip(self.pools[task.replica], task.tables, strict=True)
            ):
                table.append(pool.take())
                source = twin.tables[group][task.computed // page]
                copies.append(PageCopy(task.replica, group, source, table[-1]))
        return copies

    def _restored(self, task: TokenSequence, hit: int) -> list[Copy]:
        """The copy of the snapshot of recurrent layers after so many pages."""
        if not hit or not self._layout.recurrent:
            return []
        snapshots = self._snapshots[task.replica]
        source = snapshots.find(task.hashes[hit - 1])
        assert source is not None
        snapshots.share(source)
        snapshots.release([source])
        return [Copy(task.replica, source, task.slot)]

    def _prefix(self, task: TokenSequence, replica: int) -> int:
        """Pages of the task's tokens that a replica has, all that its layers read of them; at least
        one token is left to compute."""
        if not self.limits.prefix_cache or task.sampling.prompt_logprobs is not None:
            return 0
        page, found = self.limits.page, 0
        hashes = self._hashes(task, (len(task.tokens) - 1) // page)
        groups = list(zip(self.pools[replica], self._layout.reaches, strict=True))
        begins = [0] * len(groups)  # of the cached pages without a gap that end here, by group
        for length, key in enumerate(hashes, 1):
            for i, (pool, reach) in enumerate(groups):
                if pool.find(key) is None:
                    begins[i] = length
                    if reach == Reach():
                        return found
            if self._layout.recurrent and self._snapshots[replica].find(key) is None:
                continue
            if all(
                begin <= reach.first(length * page) // page
                for begin, (_, reach) in zip(begins, groups, strict=True)
            ):
                found = length
        return found

    def _hashes(self, task: TokenSequence, pages: int) -> list[bytes]:
        """Hashes of the first pages of a task's tokens."""
        page, salt = self.limits.page, task.adapter.to_bytes(4, "little")
        for i in range(len(task.hashes), pages):
            parent = task.hashes[-1] if task.hashes else b""
            task.hashes.append(page_hash(parent, task.tokens[i * page : (i + 1) * page], salt))
        return task.hashes[:pages]

    def _preempt(self, task: TokenSequence) -> None:
        self.running.remove(task)
        self._give_back(task)
        task.computed, task.preempted = 0, task.preempted + 1
        self.preemptions += 1
        self._wait(task)

    def _give_back(self, task: TokenSequence) -> None:
        """Free pages and slot; the end of a text goes before its beginning."""
        for pool, table in zip(self.pools[task.replica], task.tables, strict=True):
            pool.release(page for page in reversed(table) if page)
        self._slots[task.replica].append(task.slot)
        task.tables = []
        if self._twins:
            self._alike[task.alike].remove(task)
            if not self._alike[task.alike]:
                del self._alike[task.alike]
