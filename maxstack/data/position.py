"""Where lanes stand in the data, as a checkpoint keeps it, and how that is carried over where the
sources of a run changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

WINDOW = -2


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


class Sources(NamedTuple):
    """Sources whose positions a checkpoint keeps."""

    names: list[str]
    keys: list[str]
    """By which their orders are drawn."""
    identities: list[str]
    """Of their documents."""

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], now: "Sources") -> "Sources":
        """Those that a checkpoint's notes tell of. Older versions drew orders by places in the
        list, and kept the identities of all as one, which is compared with that of `now` unless
        it holds the configuration of a source, as those of made-up documents did."""
        if isinstance(meta["sources"], Mapping):
            return cls(**meta["sources"])
        sources = meta["config"]["data"]["sources"]
        names = [source["name"] or f"{source['kind']}-{i}" for i, source in enumerate(sources)]
        made_up = any(source["kind"] in ("synthetic", "function") for source in sources)
        same = made_up or meta["sources"] == " ".join(now.identities)
        identities = now.identities if same and names == now.names else [""] * len(names)
        return cls(names, [f"{i}" for i in range(len(names))], identities)

    def changes(self, now: "Sources") -> list[str]:
        """A line for each source of `now` that is new or has other documents than here, and for
        those that are gone."""
        lines = [f"{name}: is gone" for name in self.names if name not in now.names]
        for name, identity in zip(now.names, now.identities, strict=True):
            if name not in self.names:
                lines.append(f"{name}: is new, and begins at its first document")
            elif self.identities[self.names.index(name)] != identity:
                lines.append(f"{name}: has other documents, and begins anew at its first one")
        return lines

    def carried(self, now: "Sources", step: int) -> "Sources":
        """`now` with the keys that the sources have here; one whose documents changed gets another
        key, since its old order means nothing."""
        keys = [
            self.keys[self.names.index(name)] if name in self.names else key
            for name, key, _ in zip(*now, strict=True)
        ]
        return now._replace(
            keys=[
                key if name not in self.names or self.has(name, identity) else f"{key} {step}"
                for name, key, identity in zip(now.names, keys, now.identities, strict=True)
            ]
        )

    def has(self, name: str, identity: str) -> bool:
        """True for a source that is here with the same documents."""
        return (name, identity) in zip(self.names, self.identities, strict=True)

    def moved(self, states: np.ndarray, now: "Sources", changed: bool) -> np.ndarray:
        """Packed positions [rows, K] in these sources as positions in `now`: matched by name; zero
        in a source that is new or has other documents. The rest of a document of a source that is
        gone is passed over. `changed`: windows of packing=best are packed anew, from their first
        document on, since by what they were packed has changed."""
        before = {
            place: self.names.index(name)
            for place, (name, _, identity) in enumerate(zip(*now, strict=True))
            if self.has(name, identity)
        }
        moved = []
        for old in map(Position.unpacked, states):
            new = Position.start(len(now.names))
            new.step = old.step
            if old.current == -1 or (old.current <= WINDOW and not changed):
                new.current, new.offset = old.current, old.offset
            for place, earlier in before.items():
                new.finished[place], new.owed[place] = old.finished[earlier], old.owed[earlier]
                if old.current == earlier:
                    new.current, new.offset = place, old.offset
            moved.append(new.packed())
        return np.stack(moved)
