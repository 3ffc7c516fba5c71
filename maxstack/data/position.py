"""Where lanes stand in the data, as a checkpoint keeps it, and how that is carried over where the
sources of a run changed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxstack.data.files import digest
from maxstack.data.order import EVEN

WINDOW = -2
REORDERED = "reordered"
"""Identity of documents that were chosen or put in order in another way."""


@dataclasses.dataclass
class Position:
    """Where a lane stands after a row."""

    finished: np.ndarray
    """int64 [sources]: documents that it has finished."""
    owed: np.ndarray
    """int64 [sources]: what each source is behind its share, in units of mixture.UNIT."""
    current: int = -1
    """The source of the document that is being read; -1: none, or as `owed` says. Less: with
    packing=best, WINDOW less the step at which the rows that are left were packed."""
    offset: int = 0
    """Tokens used of that document, units of that record, or with packing=best rows given."""
    step: int = 0
    """Batches before."""

    @classmethod
    def start(cls, sources: int) -> "Position":
        """That of a lane before the first row."""
        return cls(np.zeros(sources, np.int64), np.zeros(sources, np.int64))

    @classmethod
    def unpacked(cls, state: np.ndarray) -> "Position":
        """The position that `packed` gave."""
        finished, owed = state[:-3].astype(np.int64).reshape(2, -1)
        return cls(finished.copy(), owed.copy(), *map(int, state[-3:]))

    def packed(self) -> np.ndarray:
        """int64 [2 * sources + 3]."""
        return np.array([*self.finished, *self.owed, self.current, self.offset, self.step])

    def copy(self) -> "Position":
        """One that changes by itself."""
        return dataclasses.replace(self, finished=self.finished.copy(), owed=self.owed.copy())


class Part(NamedTuple):
    """Documents of a source that have an order of their own: all, or those of the files that it had
    at some time."""

    source: str
    """The source's name."""
    name: str
    """The source's, or for files that were added that and the step."""
    key: str
    """By which the order is drawn."""
    identity: str
    """Of the documents."""
    files: list[str]
    """A mark of each file; none where they are not known."""
    whole: bool = True
    """All documents of the source."""
    dealt: str = ""
    """deal.Dealt.mark of a run by train.epochs."""


class Sources(list[Part]):
    """Parts whose positions a checkpoint keeps, in the order of the positions."""

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], now: "Sources", data: Mapping[str, Any]) -> "Sources":
        """Those that a checkpoint's notes tell of; their documents are others where they were
        chosen or put in order in another way than by the section `data`. Older versions drew orders
        by places in the list, and kept the identities of all as one, which is compared with that of
        `now` unless it holds the configuration of a source, as those of made-up documents did."""
        before = meta["config"]["data"]
        if not isinstance(meta["sources"], str):
            known = {name for name, _ in _ordered(before).items() & _ordered(data).items()}
            parts = (Part(*part) for part in meta["sources"])
            return cls(
                part if part.source in known else part._replace(identity=REORDERED, files=[])
                for part in parts
            )
        sources = before["sources"]
        names = _names(sources)
        made_up = any(source["kind"] in ("synthetic", "function") for source in sources)
        same = made_up or meta["sources"] == " ".join(part.identity for part in now)
        same = same and names == [part.name for part in now]
        return cls(
            Part(name, name, f"{i}", now[i].identity if same else "", [])
            for i, name in enumerate(names)
        )

    def changes(self, now: "Sources") -> list[str]:
        """A line for each source of `now`, all whole, that is new or has other documents than here,
        and for those that are gone."""
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
        """Files of a whole source that are not here; None where documents that are here are not
        in it any more, or cannot be told apart from others."""
        before = [old for old in self if old.source == part.name]
        if [old.identity for old in before] == [part.identity]:
            return []
        known = {file for old in before for file in old.files}
        if not all(old.files for old in before) or not known <= {*part.files}:
            return None
        return [file for file in part.files if file not in known]

    def exchanged(self, part: Part) -> list[int]:
        """Numbers of the files of a whole source that have another size or version than here, where
        its documents have the same numbers."""
        (old, *more) = [old for old in self if old.source == part.name] or [part]
        if more or old.identity != part.identity or len(old.files) != len(part.files):
            return []
        files = enumerate(zip(old.files, part.files, strict=True))
        return [number for number, (before, now) in files if before != now]

    def carried(self, now: "Sources", step: int) -> "Sources":
        """The parts of `now`, all whole, that go on from here at a step: as they are here, and of
        their own what is new. A source whose documents changed gets another key, since its old
        order means nothing."""
        parts = []
        for part in now:
            before, added = [old for old in self if old.source == part.name], self._added(part)
            if not before:
                parts.append(part)
            elif added is None:
                parts.append(part._replace(key=f"{before[0].key} {step}"))
            elif not added and len(before) == 1:
                parts.append(part._replace(key=before[0].key))
            else:
                parts += [old._replace(whole=False) for old in before]
            if before and added:
                name = f"{part.name}+{step}"
                key = f"{name}{EVEN}"
                parts.append(Part(part.name, name, key, files_digest(added), added, whole=False))
        return Sources(parts)

    def moved(self, states: np.ndarray, now: "Sources", changed: bool) -> np.ndarray:
        """Packed positions [rows, K] in these parts as positions in `now`: zero in what is new. The
        rest of a document of a source that is gone is passed over. `changed`: windows of
        packing=best are packed anew, from their first document on, since by what they were packed
        has changed."""
        before = {(part.name, part.identity): place for place, part in enumerate(self)}
        same = [before.get((part.name, part.identity)) for part in now]
        moved = []
        for old in map(Position.unpacked, states):
            new = Position.start(len(now))
            new.step = old.step
            if old.current == -1 or (old.current <= WINDOW and not changed):
                new.current, new.offset = old.current, old.offset
            for place, earlier in enumerate(same):
                if earlier is not None:
                    new.finished[place], new.owed[place] = old.finished[earlier], old.owed[earlier]
                    if old.current == earlier:
                        new.current, new.offset = place, old.offset
            moved.append(new.packed())
        return np.stack(moved)


def _names(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    return [source["name"] or f"{source['kind']}-{i}" for i, source in enumerate(sources)]


def _ordered(data: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What chooses a source's documents and their order, by its name."""
    sources = data["sources"]
    chosen = [(source.get("holdout", 0), source.get("holdout_by", "place")) for source in sources]
    named = zip(_names(sources), chosen, strict=True)
    return {name: (data["seed"], data["shuffle"], *held) for name, held in named}


def files_digest(files: Sequence[str]) -> str:
    """The identity of the documents of some files."""
    return digest("\0".join(files).encode())
