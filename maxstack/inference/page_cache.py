"""Pages of the cache: which page holds which tokens of a request.

A page holds what layers cache of `Limits.page` consecutive tokens. Layers that read equally far
back (`Layout.reaches`) form a page group with a pool of its own, and each request has a page table
per group: a group with a window or chunks releases the pages that no later token reads.

Requests with a common prefix share its full pages. A page is found by a SHA-256 of its tokens, the
hash of the page before it and the adapter, so pages with equal hashes hold equal arrays. A released
page keeps its contents until it is taken again: the one that was released longest ago goes first,
and of a request the end before the beginning, which other requests are likelier to share.

A recurrent layer has one state per request in place of pages, which cannot be cut back to a prefix.
So the state is copied into a snapshot every `Limits.snapshot` tokens, found by the hash of the page
that ends there, and a request resumes from the last snapshot inside its prefix.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maxstack.inference.layout import Layout
from maxstack.inference.request import TokenSequence
from maxstack.schema.mixers import Reach

SPARE = 100
"""A request is admitted beside others only while one page in this many stays free for them."""


class Limits(NamedTuple):
    """Sizes of an engine, each for one replica."""

    rows: int
    """Batched tokens of a step at most."""
    page: int
    """Tokens of a page."""
    pages: tuple[int, ...]
    """Pages by group, without page 0, which stays unused."""
    requests: int
    snapshots: int = 0
    snapshot: int = 512
    """Tokens between snapshots of the states of recurrent layers."""
    prefix_cache: bool = True


class StateCopy(NamedTuple):
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


class Pool:
    """Pages `first` to `first + size - 1`, with reference counts and an index by contents."""

    def __init__(self, size: int, first: int = 1):
        self.size = size
        self.keeps_contents = True
        """Whether a page that was never used is taken before one with contents: the cache grows
        with the prefixes that were seen, not only with those in use."""
        # Released pages in the order in which they are taken: those without contents first, then
        # those that were released longest ago. An OrderedDict removes from the middle in constant
        # time (`share`).
        self._free: OrderedDict[int, None] = OrderedDict()
        self._unused, self._end = first, first + size
        self._users: dict[int, int] = {}
        # Contents to page and back. A page in `_free` may still be found: it is a cache until
        # taken.
        self._page: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages without users."""
        return len(self._free) + self._end - self._unused

    def take(self) -> int:
        """Take a page for one user and forget its contents."""
        page = next(iter(self._free), None)
        holds = page in self._contents
        if self._unused < self._end and (page is None or (holds and self.keeps_contents)):
            page = self._unused
            self._unused += 1
        else:
            assert page is not None, "no page is free"
            del self._free[page]
        self._forget(page)
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a user to a page that `find` returned."""
        # The page is in use already, or free and found by its contents.
        self._free.pop(page, None)
        self._users[page] = self._users.get(page, 0) + 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page; of those without users the first is taken again first."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._free[page] = None
                if page not in self._contents:
                    # Nobody can find a page without contents, so take it before one that may serve
                    # a prefix.
                    self._free.move_to_end(page, last=False)

    def users(self, page: int) -> int:
        """Return the number of users of a page."""
        return self._users.get(page, 0)

    def find(self, contents: bytes) -> int | None:
        """Return the page with these contents."""
        return self._page.get(contents)

    def describe(self, page: int, contents: bytes) -> None:
        """Record what a page holds, unless another page is already found by these contents."""
        # Two sequences may compute the same page at once. Keep the first: others may share it
        # already.
        if contents not in self._page:
            self._forget(page)
            self._page[contents] = page
            self._contents[page] = contents

    def forget_all(self) -> None:
        """Forget the contents of all pages."""
        self._page.clear()
        self._contents.clear()

    def _forget(self, page: int) -> None:
        contents = self._contents.pop(page, None)
        if contents is not None:
            del self._page[contents]


def page_hash(parent: bytes, tokens: Sequence[int], salt: bytes) -> bytes:
    """Return the SHA-256 of a full page of tokens that follow those of `parent`."""
    # A cryptographic hash, because a collision would answer one client from another's text. The
    # length of the salt goes in too, so that no two pairs of salt and text read alike.
    words = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(len(salt).to_bytes(4, "little") + salt + parent + words).digest()


class PageCache:
    """Pages, slots and snapshots of all replicas, and the page tables of running sequences."""

    def __init__(self, layout: Layout, limits: Limits, replicas: int):
        self.limits = limits
        self._layout = layout
        self.pools: list[list[Pool]] = []
        """By replica and group."""
        self._slots: list[list[int]] = []
        self._snapshots: list[Pool] = []
        for _ in range(replicas):
            self.pools.append([Pool(size) for size in limits.pages])
            # Slot 0 stays unused: rows without a token name it.
            self._slots.append(list(range(limits.requests, 0, -1)))
            self._snapshots.append(Pool(limits.snapshots, limits.requests + 1))

    def forget(self) -> None:
        """Forget the contents of all pages and snapshots."""
        for pools in (self._snapshots, *self.pools):
            for pool in pools:
                pool.forget_all()

    def free_slots(self, replica: int) -> int:
        """Return how many more sequences a replica can run."""
        return len(self._slots[replica])

    def until_snapshot(self, sequence: TokenSequence) -> int | None:
        """Return the tokens that may be computed before the next snapshot; None: any number."""
        # Zero snapshots also mean: no recurrent layer, or no prefix cache.
        if not self._snapshots[sequence.replica].size:
            return None
        return self.limits.snapshot - sequence.computed % self.limits.snapshot

    def grow(self, sequence: TokenSequence, length: int) -> bool:
        """Take pages for the first `length` tokens and release those that no later token reads;
        False, with nothing taken, where too few are free."""
        pools, size = self.pools[sequence.replica], self.limits.page
        wanted = -(-length // size)
        for pool, table, reach in zip(pools, sequence.tables, self._layout.reaches, strict=True):
            # Release before taking, so that a window needs no more pages than it and one step
            # cover. Released entries become 0 and stay, because programs index a table by position.
            first = reach.first(sequence.computed) // size
            unread = [i for i, page in enumerate(table[:first]) if page]
            pool.release(table[i] for i in unread)
            for i in unread:
                table[i] = 0
            # Check all groups before taking from any, so that a failure leaves nothing half taken.
            if pool.available < wanted - len(table):
                return False
        for pool, table in zip(pools, sequence.tables, strict=True):
            table += [pool.take() for _ in range(wanted - len(table))]
        return True

    def can_grow(self, lengths: Iterable[tuple[TokenSequence, int]]) -> bool:
        """Return True where pages are free for these lengths of sequences, all together."""
        # Count all sequences together: pages that suffice for each alone may not for all.
        wanted: Counter[tuple[int, int]] = Counter()
        for sequence, length in lengths:
            for group, table in enumerate(sequence.tables):
                missing = -(-length // self.limits.page) - len(table)
                wanted[sequence.replica, group] += max(0, missing)
        return all(
            count <= self.pools[replica][group].available
            for (replica, group), count in wanted.items()
        )

    def count_prefix(self, sequence: TokenSequence, replica: int) -> int:
        """Return how many pages of a sequence's prefix a replica has cached, of every group those
        that its layers read. At least one token is left to compute, for its logits."""
        if not self.limits.prefix_cache or sequence.sampling.prompt_logprobs is not None:
            return 0
        # One pass over the pages, linear in their number. Testing each prefix by itself would be
        # quadratic.
        size, prefix = self.limits.page, 0
        groups = list(zip(self.pools[replica], self._layout.reaches, strict=True))
        gaps = [0] * len(groups)  # by group: pages up to the last one that is not cached
        # A window may have lost early pages and still serve: it reads only those after
        # `reach.first`. So a gap is no end of the search, and the longest prefix may come after
        # shorter ones that fail.
        for count, key in enumerate(self._hashes(sequence, (len(sequence.tokens) - 1) // size), 1):
            for i, (pool, reach) in enumerate(groups):
                if pool.find(key) is None:
                    gaps[i] = count
                    if reach == Reach():
                        return prefix  # full attention reads all pages, so no longer prefix serves
            # A prefix of a recurrent model ends where a snapshot was taken.
            if self._layout.recurrent and self._snapshots[replica].find(key) is None:
                continue
            if all(
                gap <= reach.first(count * size) // size
                for gap, reach in zip(gaps, self._layout.reaches, strict=True)
            ):
                prefix = count
        return prefix

    def find_pages(self, sequence: TokenSequence, replica: int, count: int) -> list[list[int]]:
        """Return the first `count` pages of a sequence by group; 0 where one is not cached."""
        hashes, found = self._hashes(sequence, count), []
        for pool in self.pools[replica]:
            found.append([pool.find(key) or 0 for key in hashes])
        return found

    def start(
        self,
        sequence: TokenSequence,
        replica: int,
        known: int,
        budget: int,
        pages: Sequence[Sequence[int]],
        beside_others: bool,
    ) -> bool:
        """Give a sequence a slot and its prefix of `known` tokens, which `pages` hold by group;
        False where one of these is gone, or too few are free for a first chunk of `budget`
        tokens."""
        size, tables = self.limits.page, []
        full = known // size
        end = known + min(budget, len(sequence.tokens) - known)
        groups = list(zip(self.pools[replica], self._layout.reaches, pages, strict=True))
        for pool, reach, held in groups:
            # Pages before `first` are read by no later token, so they need not be there.
            first = min(reach.first(known) // size, full)
            shared = [*held[first:full]]
            # Round up: a partial page at the end is copied from, so it has to be there too.
            if not all(held[first : -(-known // size)]):
                return False
            # A shared page that nobody uses is free now and will not be once it is shared.
            free = pool.available - sum(1 for page in shared if not pool.users(page))
            # Without a spare share, a new sequence would take the last pages and be preempted, or
            # preempt, as soon as another grows. Alone it may have them all, or a long prompt could
            # never start.
            spare = pool.size // SPARE if beside_others else 0
            if free < -(-end // size) - full + spare:
                return False
            tables.append([0] * first + shared)
        for (pool, _, _), table in zip(groups, tables, strict=True):
            # Share before anything is taken: `take` may reuse any free page, also one of this
            # prefix.
            for page in filter(None, table):
                pool.share(page)
        sequence.replica = replica
        sequence.slot = self._slots[replica].pop()
        sequence.computed = known
        sequence.tables = tables
        return True

    def copy_partial_page(self, sequence: TokenSequence, other: TokenSequence) -> list[PageCopy]:
        """Return copies of the pages that a sequence shares with another up to the middle."""
        # Full pages are shared, since nobody writes to them again. Both sequences will write to the
        # page in the middle, so the new one gets a copy.
        index, rest = divmod(sequence.computed, self.limits.page)
        if not rest:
            return []
        copies = []
        for group, pool in enumerate(self.pools[sequence.replica]):
            page = pool.take()
            sequence.tables[group].append(page)
            copies.append(PageCopy(sequence.replica, group, other.tables[group][index], page))
        return copies

    def restore_snapshot(self, sequence: TokenSequence, pages: int) -> list[StateCopy]:
        """Return the copy of the snapshot of recurrent layers after so many pages."""
        if not pages or not self._layout.recurrent:
            return []
        snapshots = self._snapshots[sequence.replica]
        source = snapshots.find(sequence.hashes[pages - 1])
        assert source is not None
        # Share and release moves it to the end of the free ones: used last, replaced last.
        snapshots.share(source)
        snapshots.release([source])
        return [StateCopy(sequence.replica, source, sequence.slot)]

    def record(self, sequence: TokenSequence, start: int) -> list[StateCopy]:
        """Make the full pages from token `start` on findable -> the snapshot to take, if any."""
        if not self.limits.prefix_cache:
            return []
        size = self.limits.page
        hashes = self._hashes(sequence, sequence.computed // size)
        for i in range(start // size, len(hashes)):
            for pool, table in zip(self.pools[sequence.replica], sequence.tables, strict=True):
                # 0: the page left the window and may belong to another sequence.
                if table[i]:
                    pool.describe(table[i], hashes[i])
        snapshots = self._snapshots[sequence.replica]
        if not snapshots.size or sequence.computed % self.limits.snapshot:
            return []
        # Another sequence took this snapshot already.
        if snapshots.find(hashes[-1]) is not None:
            return []
        # Release it at once: a snapshot has no user, so the pool replaces the one used longest ago.
        target = snapshots.take()
        snapshots.describe(target, hashes[-1])
        snapshots.release([target])
        return [StateCopy(sequence.replica, sequence.slot, target)]

    def release(self, sequence: TokenSequence) -> None:
        """Release the pages and the slot of a sequence; contents can be found again."""
        for pool, table in zip(self.pools[sequence.replica], sequence.tables, strict=True):
            # The end first: what is released first is taken again first, and a beginning is
            # likelier shared.
            pool.release(page for page in reversed(table) if page)
        self._slots[sequence.replica].append(sequence.slot)
        sequence.tables = []

    def _hashes(self, sequence: TokenSequence, pages: int) -> list[bytes]:
        """Return the hashes of the first pages of a sequence; they are kept."""
        size, salt = self.limits.page, sequence.adapter.to_bytes(4, "little")
        for i in range(len(sequence.hashes), pages):
            # Keep the hashes: tokens only get appended, so the hash of a full page never changes.
            parent = sequence.hashes[-1] if sequence.hashes else b""
            tokens = sequence.tokens[i * size : (i + 1) * size]
            sequence.hashes.append(page_hash(parent, tokens, salt))
        return sequence.hashes[:pages]
