"""Runs by train.epochs: how many steps they take, and which documents each lane takes.

How many steps an epoch takes depends on how documents pack into rows, so it can only be counted by
packing them. The documents are tokenized once for their lengths, each process measuring its share;
deal.py exchanges documents among lanes so that all lanes end together; and the lanes are run on
blank documents of these lengths (`_Blanks`), which costs no reading, until they are empty. The
result is kept in $MAXSTACK_CACHE by a hash of all that it depends on.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.experimental import multihost_utils

from maxstack.cluster.peers import Peers
from maxstack.config import storage
from maxstack.data.deal import EpochPlan, Pass, level_lanes
from maxstack.data.examples import Segment, Unit
from maxstack.data.files import digest
from maxstack.data.lanes import FED, Rows, lane_class, nothing_to_predict
from maxstack.data.mixture import Mixture
from maxstack.data.quarantine import Quarantine
from maxstack.data.sources import open_sources
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import DataError
from maxstack.report.progress import progress

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.schema.objective import RowField as Field

BLANK = np.zeros(1, np.int32)


class Lengths(NamedTuple):
    """Lengths of a source's documents, or of its places if a document's length depends on them, as
    with fill-in-the-middle."""

    tokens: np.ndarray
    """int32: the length of each unit, document after document."""
    ends: np.ndarray
    """int64 [documents + 1]: where the units of each document begin and end."""


class _Blanks(Mixture):
    """A mixture of blank documents of given lengths."""

    def __init__(self, lengths: Sequence[Lengths], *given: Any):
        super().__init__(*given)
        self._lengths = lengths

    def units(self, source: int, index: int, place: int, quarantine: Quarantine) -> list[Unit]:
        tokens, ends = self._lengths[source]
        at = place if self.infills(source) else index
        whole = bool(self.sources[source].record)
        units = []
        for count in tokens[ends[at] : ends[at + 1]].tolist():
            # A broadcast view has the length without the memory.
            units.append(Unit([Segment(np.broadcast_to(BLANK, count + 1), {})], whole))
        return units


def set_epochs(cfg: "Config") -> "Config":
    """Return the configuration with train.epochs for each source without `epochs` of its own."""
    update = {"epochs": cfg.train.epochs}
    sources = tuple(
        source if source.epochs else source.model_copy(update=update) for source in cfg.data.sources
    )
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"sources": sources})})


def plan_epochs(cfg: "Config", lanes: Sequence[int], fields: Mapping[str, "Field"]) -> EpochPlan:
    """Return the steps and moves of a configuration by `set_epochs`, the same in every process.
    Each process measures a part of the documents and packs its `lanes`. Lanes take turns if every
    row is a document. DataError if there is nothing to learn from."""
    data = cfg.data
    size = cfg.train.batch_size
    given: Any = data, open_sources(data), size, False, "data", fields, cfg.stages
    mixture = Mixture(*given)
    peers = Peers()
    described = [mixture.described(), data.model_dump(mode="json"), size, [*lanes]]
    # By its content: another tokenizer at the same path gives documents other lengths.
    if lane_class(fields, data).packs:
        described.append(open_tokenizer(data.tokenizer).fingerprint)
    stages = [stage.model_dump() for stage in cfg.train.stages]
    key = digest(json.dumps(["epochs", *described, stages, sorted(fields)]).encode())
    kept = storage.cache_folder() / "epochs" / f"{key}.npz"
    # Measuring is collective, so all processes must take the same branch, though one host's cache
    # may lack the file.
    if all(peers.exchange("epochs", kept.exists())):
        with np.load(kept) as known:
            moves = [known[f"moves.{i}"] for i in range(len(data.sources))]
            return EpochPlan(int(known["steps"]), moves)
    # No moves: where each row is one document, lanes that take turns end together.
    moves = level_lanes((), len(data.sources), size)
    if lane_class(fields, data).packs:
        lengths = [_measure(mixture, source, peers) for source in range(len(data.sources))]
        moves = level_lanes(_passes(mixture, lengths), len(data.sources), size)
        mixture = _Blanks(lengths, *given, EpochPlan(0, moves))
    # A process counts its own lanes; the longest of all lanes ends the run.
    steps = max(peers.exchange("epochs", _count_steps(mixture, lanes)))
    if not steps:
        raise DataError(f"train.epochs: {nothing_to_predict(mixture)}")
    found: dict[str, Any] = {f"moves.{i}": moved for i, moved in enumerate(moves)}
    with storage.replacing(str(kept)) as unfinished, open(unfinished, "wb") as file:
        np.savez(file, steps=steps, **found)
    return EpochPlan(steps, moves)


def _measure(mixture: Mixture, source: int, peers: Peers) -> Lengths:
    """Return the lengths of a source's documents, of which N processes read every N-th each.
    DataError in all of them if one has a document that cannot be read and may not be passed over.
    """
    documents = mixture.sources[source]
    infills = mixture.infills(source)
    count = mixture.limit(source) if infills else len(documents)
    # Of its own: the run counts and reports the same documents when it comes to them.
    quarantine = mixture.quarantine()
    own = list[list[int]]()
    fault = None
    places = range(peers.number, count, peers.count)
    with progress(len(places), f"train.epochs: measuring {documents.name}", "documents") as bar:
        try:
            for at in places:
                index = mixture.drawn(source, at) if infills else at
                units = mixture.units(source, index, at, quarantine)
                own.append([unit.length for unit in units])
                bar.update()
        # Raised only after the exchange: a process that left alone would let the others wait.
        except DataError as error:
            fault = str(error)
    tokens = np.array([*itertools.chain(*own)], np.int32)
    # The coordination service carries small data; the lengths themselves go through the devices.
    told = peers.exchange("measured", [len(tokens), fault])
    if faults := [fault for _, fault in told if fault]:
        raise DataError(faults[0])
    # process_allgather wants arrays of equal shapes from all processes.
    counts = np.zeros(-(-count // peers.count), np.int32)
    counts[: len(own)] = [len(lengths) for lengths in own]
    if peers.count == 1:
        return Lengths(tokens, np.concatenate([[0], np.cumsum(counts)]))
    most = max(number for number, _ in told)
    padded = np.pad(tokens, (0, most - len(tokens)))
    gather = multihost_utils.process_allgather
    return join_lengths(gather(counts), gather(padded), count)


def join_lengths(counts_PN: np.ndarray, tokens_PM: np.ndarray, documents: int) -> Lengths:
    """Join the lengths that P processes measured in turns. `counts_PN`: units of the documents of
    each process, `tokens_PM`: lengths of these, both padded with zeros."""
    ends = np.concatenate([[0], np.cumsum(counts_PN.T.reshape(-1)[:documents])])
    tokens = np.zeros(ends[-1], np.int32)
    for process, own in enumerate(tokens_PM):
        # Process p measured the documents p, p + P, p + 2P, ...
        begins = ends[process : -1 : len(tokens_PM)]
        counts = counts_PN[process, : len(begins)]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens[np.repeat(begins, counts) + within] = own[: counts.sum()]
    return Lengths(tokens, ends)


def _passes(mixture: Mixture, lengths: Sequence[Lengths]) -> Iterator[Pass]:
    """Yield the passes: the first over each source, the second over each, and so on."""
    rows = mixture.cfg.packing == "none"
    costs = []
    for tokens, ends in lengths:
        # With packing=none a document fills a row whatever its length, so rows are levelled.
        # By sums up to each end rather than np.add.reduceat, which gives a document without units
        # the length of the next one.
        sums = np.concatenate([[0], np.cumsum(tokens > 0 if rows else tokens)])[ends]
        costs.append(np.diff(sums).astype(np.float64))
    sizes = [len(documents) for documents in mixture.sources]
    limits = [mixture.limit(source) for source in range(len(sizes))]
    most = max(math.ceil(limit / size) for limit, size in zip(limits, sizes, strict=True))
    for number, source in itertools.product(range(most), range(len(sizes))):
        first = number * sizes[source]
        places = np.arange(first, min(limits[source], first + sizes[source]))
        read = places
        # With fill-in-the-middle lengths were measured by place, else by document.
        if not mixture.infills(source):
            read = np.array([mixture.drawn(source, place) for place in places.tolist()], np.int64)
        if len(places):
            yield Pass(source, first, costs[source][read])


def _count_steps(mixture: Mixture, lanes: Sequence[int]) -> int:
    """Count the batches until the lanes have nothing left. The end is known once as many batches
    are empty as it takes for each lane to have its turn in the smallest batch."""
    size = mixture.batch_size
    rows = Rows(mixture, [*lanes], mixture.start(size)[[*lanes]])
    turns = max(size // stage.rows for stage in mixture.stages.all)
    steps = 0
    last = 0
    passes = sum(mixture.limit(source) for source in range(len(mixture.sources)))
    with progress(int(passes * len(lanes) / size), "train.epochs: counting", "documents") as bar:
        while steps < last + turns:
            counts = rows.next()[FED]
            steps += 1
            bar.update(int(counts[:, -2].sum()))
            if counts[:, :-2].any():
                last = steps
    return last
