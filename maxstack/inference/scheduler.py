"""Scheduler of inference: which tokens of which requests a step computes.

A step computes at most `serve.rows` tokens on each replica (batched tokens). Running requests come
first: one token, and its drafts, for each that is decoding; then a chunk of each prompt that is not
computed yet; what is left of the budget admits waiting requests. Clients take turns at all three
(fair_share.py); among the requests of one client, priority and then arrival decide.

A request that needs a page where none is free preempts one: of the client with most requests
running, the youngest of the lowest priority, which may be itself. A preempted request gives all its
pages back and waits; later it computes its tokens again, to the same bits (page_cache.py keeps them
findable meanwhile). Nothing is swapped out to the host.

A waiting request that finds no place makes a client with at least two more running give one up,
one in a step, until shares are equal. Requests with equal prompts wait until one of them has
computed it, and then share its pages.
"""

import bisect
from collections.abc import Callable, Sequence

from maxstack.errors import ConfigError
from maxstack.inference.fair_share import FairShare, pick_victim
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits, PageCache, PageCopy, StateCopy
from maxstack.inference.request import Chunk, TokenSequence

RESERVED = 4
"""Prompts leave one batched token in this many while a client waits that has nothing running."""
Copies = list[StateCopy | PageCopy]


class Scheduler:
    """Sequences that wait and run, over one or more replicas of the model."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        replicas: int = 1,
        draft: Callable[[TokenSequence], Sequence[int]] | None = None,
        share_prompts: bool = False,
    ):
        """`draft` guesses the next tokens of a sequence. `share_prompts`: a prompt is computed once
        for all requests that have it. ConfigError where a wrong draft cannot be undone."""
        if draft and layout.recurrent:
            raise ConfigError(
                "serve.speculate: the model has recurrent layers, whose states a wrong guess would "
                "change for good; set it to 0"
            )
        self.limits = limits
        self._draft = draft
        # A recurrent state cannot be cut back to the end of the prompt once its sequence has gone
        # on, so such models share prefixes by snapshots alone.
        self._share_prompts = share_prompts and limits.prefix_cache and not layout.recurrent
        self._by_prompt: dict[tuple[int, ...], list[TokenSequence]] = {}
        self.waiting: list[TokenSequence] = []
        self.running: list[TokenSequence] = []
        self._shares = FairShare()
        self._refused: TokenSequence | None = None
        """The sequence for which the last step had no room."""
        self._cache = PageCache(layout, limits, replicas)
        self.pools = self._cache.pools
        self.preemptions = 0
        self.queried = 0
        """Tokens that were looked for in the prefix cache; `hits` were found."""
        self.hits = 0

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence."""
        self._shares.join(sequence.client)
        self._wait(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """End a sequence and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
            # The refused sequence may find the room that this leaves, so preempt nobody for it.
            self._refused = None
        else:
            self.waiting.remove(sequence)
            if self._refused is sequence:
                self._refused = None
        self._shares.leave(sequence.client)

    def forget(self) -> None:
        """Forget the contents of all pages and snapshots."""
        self._cache.forget()

    def restart(self) -> None:
        """Preempt all sequences and forget what was cached."""
        for sequence in [*self.running]:
            self._preempt(sequence)
        self.forget()

    def keep_prefixes(self, keep: bool) -> None:
        """Choose whether the cache grows for prefixes that no running request needs."""
        for pools in self.pools:
            for pool in pools:
                pool.keeps_contents = keep

    def schedule(
        self, sizes: Sequence[int] = (), max_drafts: int = 0, prompts_first: bool = False
    ) -> tuple[list[Chunk], Copies]:
        """Return the chunks of the next step, and the copies to make before it. `sizes` are the
        numbers of batched tokens that steps may have, `max_drafts` the drafts of a sequence at
        most. `prompts_first`: prompts alone, as long as there are any with pages for them."""
        self._make_room()
        # All replicas compute one program, so a step has the same number of rows on each.
        budget = [self._step_size(sizes, max_drafts)] * len(self.pools)
        copies: Copies = []
        running = sorted(
            self.running, key=lambda each: (self._shares.served[each.client], each.order)
        )
        # A sequence that is decoding has one token that is not computed: the one chosen last.
        prefilling = [each for each in running if len(each.tokens) - each.computed > 1]
        if prompts_first:
            # Prompts first make the steps after them pure decoding, which one program computes up
            # to 16 at a time. Prompts that preempted here were a livelock with a full cache (found
            # by hypothesis).
            chunks = self._continue(prefilling, budget, may_preempt=False)
            chunks += self._admit_waiting(budget, copies, prompts_first=True)
            if chunks:
                return chunks, copies
        # Decoding comes before prefill: a long prompt delays no answer that has begun.
        chunks = self._continue([each for each in running if each not in prefilling], budget)
        chunks += self._prefill(prefilling, budget)
        # A later chunk may have preempted the sequence of an earlier one. It may be admitted again
        # below, from its beginning, so drop its stale chunk first: else it is computed twice.
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        return chunks + self._admit_waiting(budget, copies), copies

    def reserve_steps(self, chunks: Sequence[Chunk], left: Sequence[int], steps: int) -> int:
        """Take pages for more steps after these chunks of one token, whose sequences may get `left`
        more tokens each -> the number of steps, at most `steps`."""
        sequences = [chunk.sequence for chunk in chunks]
        for sequence in sequences:
            # A snapshot is copied by the host between steps, so no program runs past one.
            steps = min(steps, self._cache.until_snapshot(sequence) or steps)

        def lengths() -> list[tuple[TokenSequence, int]]:
            return [
                (sequence, sequence.computed + min(steps, own))
                for sequence, own in zip(sequences, left, strict=True)
            ]

        # Fewer steps rather than preemption: what runs ahead takes only pages that nobody needs
        # now.
        while steps > 1 and not self._cache.can_grow(lengths()):
            steps //= 2
        for sequence, length in lengths():
            grown = self._cache.grow(sequence, length)
            assert grown, "pages that were free are gone"
        return steps

    def finish_chunk(self, chunk: Chunk, new: Sequence[int]) -> list[StateCopy]:
        """Record that a chunk was computed and that the tokens `new` follow its sequence -> copies
        to make before the next step."""
        sequence = chunk.sequence
        # Every computed token counts, also drafts that are refused and tokens computed again: what
        # a client costs, not what it gets.
        self._shares.served[sequence.client] += chunk.size
        sequence.tokens += new
        # The last new token is chosen, not computed; those before it are the accepted drafts, whose
        # arrays this chunk has written. Those of wrong drafts are overwritten by the next chunk.
        accepted = max(0, len(new) - 1) if chunk.drafts else 0
        sequence.computed = chunk.start + chunk.size - len(chunk.drafts) + accepted
        return self._cache.record(sequence, chunk.start)

    def _wait(self, sequence: TokenSequence) -> None:
        # Insert instead of sorting at each request: 512 requests took 17 ms, now 3.
        bisect.insort(self.waiting, sequence, key=lambda each: each.order)

    def _make_room(self) -> None:
        """Preempt a sequence for the one that the last step refused, if its client has at least two
        more running. Shares come nearer to equal each time, so this ends."""
        refused, self._refused = self._refused, None
        if refused is not None and self.running:
            clients = [each.client for each in self.running]
            # One preemption a step, because each may cost its sequence all tokens computed so far.
            victim = pick_victim(self.running)
            # With a difference of one, the two clients would swap places forever.
            if clients.count(victim.client) > clients.count(refused.client) + 1:
                self._preempt(victim)

    def _step_size(self, sizes: Sequence[int], max_drafts: int) -> int:
        """Return the batched tokens of the next step: the smallest size that holds all pending
        tokens, or the size below, where prompts would fill at most half of that one."""
        if not sizes:
            return self.limits.rows
        # Cost grows with the size of a step, not with the tokens in it: rows without a token are
        # computed as well.
        running = [len(each.tokens) - each.computed for each in self.running]
        decoding = running.count(1)
        pending = sum(running) + sum(len(each.tokens) for each in self.waiting)
        pending += decoding * max_drafts
        return _step_size(sizes, pending, decoding * (1 + max_drafts))

    def _continue(
        self, sequences: Sequence[TokenSequence], budget: list[int], may_preempt: bool = True
    ) -> list[Chunk]:
        """Return the next chunks of running sequences, whose tokens are taken from the budget."""
        chunks: list[Chunk] = []
        for sequence in sequences:
            # A chunk of this very loop may have preempted it.
            if sequence in self.running and budget[sequence.replica]:
                chunk = self._next_chunk(sequence, budget[sequence.replica], may_preempt)
                if chunk:
                    budget[sequence.replica] -= chunk.size
                    chunks.append(chunk)
        # Keep no chunk whose sequence was preempted for a later chunk: its pages are gone.
        return [chunk for chunk in chunks if chunk.sequence in self.running]

    def _prefill(self, sequences: Sequence[TokenSequence], budget: list[int]) -> list[Chunk]:
        """Return the next chunks of prompts, which leave some tokens to a client that waits."""
        reserved = [0] * len(budget)
        if self._shares.someone_waits(self.running):
            reserved = [tokens // RESERVED for tokens in budget]
        for replica, tokens in enumerate(reserved):
            budget[replica] -= tokens
        chunks = self._continue(sequences, budget)
        # Give the reserve back for admission, which follows and serves the waiting client first.
        for replica, tokens in enumerate(reserved):
            budget[replica] += tokens
        return chunks

    def _next_chunk(
        self, sequence: TokenSequence, budget: int, may_preempt: bool = True
    ) -> Chunk | None:
        """Return the next chunk of a running sequence, with pages for it; None where it waits."""
        drafts: tuple[int, ...] = ()
        remaining = len(sequence.tokens) - sequence.computed
        # Drafts only where one token remains: a prompt's next tokens are known.
        if remaining == 1 and self._draft and budget > 1:
            drafts = tuple(self._draft(sequence))[: budget - 1]
        size = min(remaining + len(drafts), budget)
        # A snapshot needs the state after a multiple of `Limits.snapshot` tokens, so a chunk ends
        # there.
        size = min(size, self._cache.until_snapshot(sequence) or size)
        if drafts and not self._cache.grow(sequence, sequence.computed + size):
            # A draft is a gamble, so it preempts nobody: fall back to the one known token.
            drafts = ()
            size = remaining
        while not self._cache.grow(sequence, sequence.computed + size):
            if not may_preempt:
                return None
            # Pages of another replica lie on other devices.
            same = [each for each in self.running if each.replica == sequence.replica]
            victim = pick_victim(same)
            self._preempt(victim)
            if victim is sequence:
                return None
        return Chunk(sequence, sequence.computed, size, drafts)

    def _admit_waiting(
        self, budget: list[int], copies: Copies, prompts_first: bool = False
    ) -> list[Chunk]:
        """Return the first chunks of waiting sequences, as many as there is room for, and add the
        copies before them. `prompts_first`: sequences whose prompt is computed already wait, and
        so do preempted ones."""
        chunks: list[Chunk] = []
        # Keep a slot for each sequence that waits for its prompt, or others would take them all.
        reserved = [0] * len(budget)
        for sequence in self._shares.order(self.waiting, self.running):
            replica = self._replica_of_prompt(sequence, reserved, prompts_first)
            if replica is not None:
                reserved[replica] += 1
                continue
            admitted = None
            if not (prompts_first and sequence.preempted):
                admitted = self._admit(sequence, budget, reserved)
            if admitted is None:
                # Stop at the first that finds no place. Smaller requests behind it would pass it
                # again and again, and it would starve.
                self._refused = None if prompts_first else sequence
                break
            self.waiting.remove(sequence)
            copies += admitted
            self.running.append(sequence)
            # `start` has checked the pages of this chunk, so it preempts nobody.
            chunk = self._next_chunk(sequence, budget[sequence.replica])
            assert chunk, "a sequence was admitted without pages for its first chunk"
            budget[sequence.replica] -= chunk.size
            chunks.append(chunk)
        return chunks

    def _admit(
        self, sequence: TokenSequence, budget: Sequence[int], reserved: Sequence[int]
    ) -> Sequence[StateCopy | PageCopy] | None:
        """Start a waiting sequence -> the copies that its first chunk needs; None where there is no
        room."""
        replicas = [
            i
            for i, tokens in enumerate(budget)
            if tokens and self._cache.free_slots(i) > reserved[i]
        ]
        copies = self._start_after_prompt(sequence, replicas, budget)
        return self._start_after_prefix(sequence, replicas, budget) if copies is None else copies

    def _start_after_prompt(
        self, sequence: TokenSequence, replicas: Sequence[int], budget: Sequence[int]
    ) -> list[PageCopy] | None:
        """Start where another sequence has computed the same prompt; the last token is computed
        again, for its logits."""
        # A shared partial page is copied, so the prompt need not end with a page, as it must in
        # `_start_after_prefix`.
        known = sequence.prompt_length - 1
        for other in self._same_prompt(sequence):
            done = other.computed >= other.prompt_length
            if done and other.replica in replicas:
                own = budget[other.replica]
                if self._start(sequence, other.replica, known, own, other.tables):
                    return self._cache.copy_partial_page(sequence, other)
        return None

    def _start_after_prefix(
        self, sequence: TokenSequence, replicas: Sequence[int], budget: Sequence[int]
    ) -> list[StateCopy] | None:
        """Start on the replica that has most of the prefix, and then most free pages."""
        candidates = []
        for i in replicas:
            prefix = self._cache.count_prefix(sequence, i)
            candidates.append((prefix, self.pools[i][0].available, i))
        # Try the next best replica where the best is full, rather than wait there for a prefix.
        for prefix, _, replica in sorted(candidates, reverse=True):
            known = prefix * self.limits.page
            pages = self._cache.find_pages(sequence, replica, prefix)
            if self._start(sequence, replica, known, budget[replica], pages):
                return self._cache.restore_snapshot(sequence, prefix)
        return None

    def _start(
        self,
        sequence: TokenSequence,
        replica: int,
        known: int,
        budget: int,
        pages: Sequence[Sequence[int]],
    ) -> bool:
        """Start a sequence on a replica after `known` tokens, if there is room."""
        beside_others = any(other.replica == replica for other in self.running)
        if not self._cache.start(sequence, replica, known, budget, pages, beside_others):
            return False
        # Count successful starts alone: a sequence that waits is tried at every step.
        self.queried += len(sequence.tokens)
        self.hits += known
        # After a preemption it would find its own pages, which are no saving to report.
        if not sequence.preempted:
            sequence.cached = known
        if self._share_prompts:
            self._by_prompt.setdefault(sequence.prompt_key, []).append(sequence)
        return True

    def _same_prompt(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Return the running sequences with the same prompt and adapter, if it may be shared."""
        # Log-probabilities of a prompt need its logits, so its tokens have to be computed.
        if not self._share_prompts or sequence.sampling.prompt_logprobs is not None:
            return []
        return self._by_prompt.get(sequence.prompt_key, [])

    def _replica_of_prompt(
        self, sequence: TokenSequence, reserved: Sequence[int], prompts_first: bool
    ) -> int | None:
        """Return the replica with a free slot on which another sequence is computing the same
        prompt, or with `prompts_first` has computed it; None: nothing to wait for."""
        others = self._same_prompt(sequence)
        done = any(other.computed >= other.prompt_length for other in others)
        # With `prompts_first` even a computed prompt is waited for: the one token that is left of
        # it joins the steps of pure decoding instead of prolonging those of prompts.
        if done and not prompts_first:
            return None
        for other in others:
            if self._cache.free_slots(other.replica) > reserved[other.replica]:
                return other.replica
        return None

    def _preempt(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        # Keep the sampled tokens: computed again, they have the same bits, so the answer goes on as
        # if nothing had happened. `number` stays, so it waits in its old place.
        sequence.computed = 0
        sequence.preempted += 1
        self.preemptions += 1
        self._wait(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        self._cache.release(sequence)
        if self._share_prompts:
            others = self._by_prompt[sequence.prompt_key]
            others.remove(sequence)
            if not others:
                del self._by_prompt[sequence.prompt_key]


def sizes_of_prompt(sizes: Sequence[int], tokens: int) -> list[int]:
    """Return the sizes of the steps that compute a prompt alone, and of those after it."""
    used = [sizes[0]]
    while tokens > 0:
        used.append(_step_size(sizes, tokens, 0))
        tokens -= used[-1]
    return [*dict.fromkeys(used)]


def _step_size(sizes: Sequence[int], pending: int, decoding: int) -> int:
    lower = [size for size in sizes if size < pending]
    above = sizes[min(len(lower), len(sizes) - 1)]
    # A size that would be at most half full costs more than a full smaller one now and the rest of
    # the prompts in the next step. Decoding sequences are never put off for that.
    if lower and lower[-1] >= decoding and 2 * pending <= above:
        return lower[-1]
    return above
