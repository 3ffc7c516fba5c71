"""Positions of lanes in the data, as checkpoints keep them.

A position is all that a lane remembers: for each source the documents finished and what it is owed,
the document under way, and the step. Which document has a number follows from the source's order,
so no list of documents seen is needed, and any process makes any lane from its position.

Sources are matched by name where a run goes on, so they may change. A source whose documents are
the same goes on in its order, by the key from which that is drawn. A source that has more files is
read as parts: its old files go on in their order, and the new ones have an order of their own from
zero. A source whose documents changed otherwise gets a new key, since numbers in its old order mean
nothing. New sources begin at zero.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxstack.data.files import digest
from maxstack.data.order import EVEN

WINDOW = -2
"""Values of Position.current from this one down mark a window of packing=best."""
REORDERED = "reordered"
"""The identity of documents that were chosen or ordered differently."""


@dataclasses.dataclass
class Position:
    """A lane's position after a row."""

    finished: np.ndarray
    """int64 [sources]: documents finished."""
    owed: np.ndarray
    """int64 [sources]: how far each source is behind its share, in units of mixture.UNIT."""
    current: int = -1
    """The source of the document under way; -1: none, so the next one is chosen by `owed`. Inside
    of a window of packing=best, WINDOW - the step at which the window was packed."""
    offset: int = 0
    """Tokens used of that document, units of that record, or rows given of that window."""
    step: int = 0
    """Batches before."""

    @classmethod
    def start(cls, sources: int) -> "Position":
        """Return the position before the first row."""
        return cls(np.zeros(sources, np.int64), np.zeros(sources, np.int64))

    @classmethod
    def unpacked(cls, state: np.ndarray) -> "Position":
        """Return the position that `packed` made an array of."""
        finished, owed = state[:-3].astype(np.int64).reshape(2, -1)
        return cls(finished.copy(), owed.copy(), *map(int, state[-3:]))

    def packed(self) -> np.ndarray:
        """Return the position as an array, int64 [2 * sources + 3]."""
        # One flat array of a fixed size for each lane, so that checkpoints hold all positions as
        # one array that is sharded like the batch.
        return np.array([*self.finished, *self.owed, self.current, self.offset, self.step])

    def copy(self) -> "Position":
        """Return a copy with arrays of its own."""
        return dataclasses.replace(self, finished=self.finished.copy(), owed=self.owed.copy())


class Part(NamedTuple):
    """Documents of a source with an order of their own: all, or those of the files that it had at
    some time."""

    source: str
    """The source's name."""
    name: str
    """The source's name, with the step at which its files were added."""
    key: str
    """The seed of the order."""
    identity: str
    """A hash that changes with the documents."""
    files: list[str]
    """A mark of each file; none if they are not known."""
    whole: bool = True
    """All documents of the source."""
    dealt: str = ""
    """deal.EpochPlan.mark of a run by train.epochs."""


class Sources(list[Part]):
    """The parts of the sources, in the order of their positions in a checkpoint."""

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], now: "Sources", data: Mapping[str, Any]) -> "Sources":
        """Read the parts from a checkpoint's metadata. A part counts as other documents if these
        were chosen or ordered by other keys than the section `data` has. Older versions seeded
        orders by places in the list, and kept the identities of all sources as one text, which is
        compared with that of `now`; with made-up documents it held the configuration instead."""
        before = meta["config"]["data"]
        if not isinstance(meta["sources"], str):
            # Another seed or holdout gives documents other numbers, so finished counts say nothing
            # of them.
            known = {name for name, _ in _ordered(before).items() & _ordered(data).items()}
            parts = (Part(*part) for part in meta["sources"])
            return cls(
                part if part.source in known else part._replace(identity=REORDERED, files=[])
                for part in parts
            )
        sources = before["sources"]
        names = _names(sources)
        # Made-up documents depend on the configuration alone, which is compared elsewhere.
        made_up = any(source["kind"] in ("synthetic", "function") for source in sources)
        same = made_up or meta["sources"] == " ".join(part.identity for part in now)
        same = same and names == [part.name for part in now]
        return cls(
            Part(name, name, f"{i}", now[i].identity if same else "", [])
            for i, name in enumerate(names)
        )

    def changes(self, now: "Sources") -> list[str]:
        """Return a line for each source of `now`, all whole, that is new or has other documents
        than here, and for each that is gone."""
        names = [part.name for part in now]
        gone = dict.fromkeys(part.source for part in self if part.source not in names)
        lines = [f"{name}: is gone" for name in gone]
        for part in now:
            before = [old for old in self if old.source == part.name]
            more = self._added(part)
            if not before:
                lines.append(f"{part.name}: is new, and begins at its first document")
            elif more is None:
                other = "other documents"
                if {old.identity for old in before} == {REORDERED}:
                    other = "another order, by data.seed, data.shuffle or its holdout"
                lines.append(f"{part.name}: has {other}, and begins anew at its first one")
            elif more:
                lines.append(f"{part.name}: has more files ({len(more)}), which begin at the first")
        return lines

    def _added(self, part: Part) -> list[str] | None:
        """Return the files that a whole source has in addition to those here, or None if it lacks
        documents that are here, or they cannot be told from others."""
        before = [old for old in self if old.source == part.name]
        if [old.identity for old in before] == [part.identity]:
            return []
        known = {file for old in before for file in old.files}
        # A file that is gone would shift the numbers of the others in the old order.
        if not all(old.files for old in before) or not known <= {*part.files}:
            return None
        return [file for file in part.files if file not in known]

    def exchanged(self, part: Part) -> list[int]:
        """Return the numbers of the files of a whole source that have another size or version than
        here, if its documents have the same numbers."""
        (old, *more) = [old for old in self if old.source == part.name] or [part]
        if more or old.identity != part.identity or len(old.files) != len(part.files):
            return []
        files = enumerate(zip(old.files, part.files, strict=True))
        return [number for number, (before, now) in files if before != now]

    def carried(self, now: "Sources", step: int) -> "Sources":
        """Return the parts with which a run goes on from here at a step, given the whole sources
        that there are now."""
        parts = []
        for part in now:
            before = [old for old in self if old.source == part.name]
            added = self._added(part)
            if not before:
                parts.append(part)
            elif added is None:
                # The step makes the key unlike all earlier ones of the source, however often it
                # changes.
                parts.append(part._replace(key=f"{before[0].key} {step}"))
            elif not added and len(before) == 1:
                # The old key, not that of the present list: it seeds the order that the run has
                # followed.
                parts.append(part._replace(key=before[0].key))
            else:
                # Old files keep an order of their own; shuffled together with new ones, documents
                # that were read would come again and others never in this epoch.
                parts += [old._replace(whole=False) for old in before]
            if before and added:
                name = f"{part.name}+{step}"
                key = f"{name}{EVEN}"
                parts.append(Part(part.name, name, key, files_digest(added), added, whole=False))
        return Sources(parts)

    def moved(self, states: np.ndarray, now: "Sources", changed: bool) -> np.ndarray:
        """Convert positions [rows, K] in these parts to positions in `now`, zero in parts that are
        new. The rest of a document of a source that is gone is passed over. `changed`: the
        configuration by which windows of packing=best were packed changed, so they are packed anew
        from their first document on."""
        # Finished counts are numbers in an order, so they carry over only to the same documents.
        before = {(part.name, part.identity): place for place, part in enumerate(self)}
        same = [before.get((part.name, part.identity)) for part in now]
        moved = []
        for old in map(Position.unpacked, states):
            new = Position.start(len(now))
            new.step = old.step
            # A source's number may be another one in `now`; -1 and windows name no source.
            if old.current == -1 or (old.current <= WINDOW and not changed):
                new.current = old.current
                new.offset = old.offset
            for place, earlier in enumerate(same):
                if earlier is not None:
                    new.finished[place] = old.finished[earlier]
                    new.owed[place] = old.owed[earlier]
                    if old.current == earlier:
                        new.current = place
                        new.offset = old.offset
            moved.append(new.packed())
        return np.stack(moved)


def _names(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    return [source["name"] or f"{source['kind']}-{i}" for i, source in enumerate(sources)]


def _ordered(data: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values of the keys that choose a source's documents and their order, by name."""
    sources = data["sources"]
    chosen = [(source.get("holdout", 0), source.get("holdout_by", "place")) for source in sources]
    named = zip(_names(sources), chosen, strict=True)
    return {name: (data["seed"], data["shuffle"], *held) for name, held in named}


def files_digest(files: Sequence[str]) -> str:
    """Return the identity of the documents of some files."""
    return digest("\0".join(files).encode())
