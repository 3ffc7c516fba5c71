"""Prompts of records, drawn one after the other by lanes, as documents are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxstack.data.lanes import Lane
from maxstack.data.mixture import Mixture
from maxstack.data.sources import open_sources
from maxstack.schema.data import DataConfig

NOTHING: Mapping[str, Any] = {}


class Prompt(NamedTuple):
    """A prompt and its record."""

    ids: np.ndarray
    """int32 [N]."""
    record: Mapping[str, Any]
    where: str
    """Its file and number, for messages."""
    key: str
    """Its place in the order of all prompts, of every epoch."""


class Prompts:
    """Lanes of prompts: lane c of n takes those at places c, n + c, 2 n + c, ... of the order of
    each source. `room` is the most tokens of a prompt; `room_of` says why."""

    def __init__(
        self,
        cfg: DataConfig,
        lanes: int,
        held: Sequence[int],
        room: int,
        room_of: str,
        *,
        evaluation: bool = False,
        whole: bool = False,
        section: str = "data",
    ):
        """`held`: the lanes of this process; `evaluation`: the held-out prompts, once, in order;
        `whole`: also all prompts of sources that hold nothing out."""
        sources = open_sources(cfg, evaluation, whole)
        self.mixture = Mixture(cfg, sources, lanes, evaluation, section, {})
        self.mixture.room, self.mixture.room_of = room - 1, room_of
        self._quarantine, self._notices = self.mixture.quarantine(), self.mixture.notices()
        self._lanes = {lane: _PromptLane(self.mixture, lane, self._quarantine) for lane in held}

    def next(self, lane: int) -> Prompt | None:
        """Return the next prompt of a lane; None at the end of an evaluation. DataError if it
        cannot be read and may not be passed over."""
        return self._lanes[lane].next()

    def skipped(self) -> list[str]:
        """Return lines about prompts passed over since the last call, as those of
        data.feed.Feed."""
        return self._notices.lines(self._quarantine.news())

    def state(self) -> np.ndarray:
        """Return int64 [held lanes, K]: where each lane stands."""
        return np.stack([lane.state() for lane in self._lanes.values()])

    def restore(self, state: np.ndarray) -> None:
        """Go on where `state` was taken."""
        for lane, own in zip(self._lanes.values(), state, strict=True):
            lane.restore(own)


class _PromptLane(Lane):
    """A lane whose units are prompts."""

    def next(self) -> Prompt | None:
        unit = self._current()
        if unit is None:
            return None
        at = self._at
        place = self._mixture.place(at, at.current, self._lane)
        located = self._mixture.locate(at.current, place)
        assert located
        source, index = located
        self._finish()
        where = self._mixture.sources[source].where(index)
        return Prompt(unit.segments[0].ids, unit.record or NOTHING, where, f"{source} {place}")
