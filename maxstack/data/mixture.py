"""The mixture of a run's sources: which document a lane reads next, by weights that may change with
the step.

Drawing sources at random would need a generator's state in every checkpoint and would keep shares
only on average. Instead each lane remembers what it owes each source: with every document (or
token, by data.mixture.by) that it reads, all sources are owed their shares of it, and the one that
gave it pays it back. The next document comes from the source that is owed most, so shares hold in
each lane from the first document on, to within a document. Debts are whole numbers (UNIT), so
adding them up in another process gives the same bits. A phase by lane and source shifts where lanes
begin in the cycle; without it all lanes would draw from the same source at once.

Debts and finished documents are kept by source (position.py), so weights may change from any step
on, and sources may come, go or grow: what is new begins at zero. A source that gave its epochs, or
whose weight is 0, has no share, and the others share what it would have.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxstack.data.deal import Deal, EpochPlan
from maxstack.data.documents import Documents, Selection, find_part, text_hash
from maxstack.data.examples import Segment, Unit, units_of
from maxstack.data.infilling import check_marks, infill
from maxstack.data.order import EVEN, SMALL, Order
from maxstack.data.position import Part, Position, Sources
from maxstack.data.quarantine import Notices, Quarantine
from maxstack.data.tokenizers import Tokenizer, open_tokenizer, tokenize, tokenize_with_sizes
from maxstack.errors import ConfigError, DataError, StoreError
from maxstack.schema.data import PICTURED, AnySource, DataConfig
from maxstack.schema.mixture import weight_at
from maxstack.schema.stages import Stages

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field

log = logging.getLogger(__name__)
UNIT = 1 << 20
"""The value of a document, or of a token, in Position.owed."""
MOST_FILES = 10_000
"""Most files of a source of which a checkpoint keeps marks; a source of more begins anew where it
grew."""
SAMPLED = 64
"""Documents of a source from which its number of tokens is estimated."""


class TooLong(DataError):
    """A record that does not fit in a row where data.overlong is error."""


class Mixture:
    """The choice of a lane's next document, a function of the configuration, the lane and its
    position.

    `section`: the configuration's key of `cfg`, for messages.
    """

    def __init__(
        self,
        cfg: DataConfig,
        sources: list[Documents],
        batch_size: int,
        evaluation: bool,
        section: str,
        fields: Mapping[str, "Field"],
        stages: Stages | None = None,
        plan: EpochPlan | None = None,
    ):
        """`plan`: that of train.epochs, by which lanes exchange documents."""
        self.fields = fields
        self.stages = stages or Stages((), batch_size, cfg.seq_len)
        """Shapes of the batches, by step."""
        self.cfg = cfg
        self.sources = sources
        """Documents that have an order of their own: parts of cfg.sources where files were added in
        mid-run."""
        self.batch_size = batch_size
        self.evaluation = evaluation
        self.section = section
        self.room = cfg.seq_len
        """The most tokens of a record; `room_of` names what sets it."""
        self.room_of = f"data.seq_len={cfg.seq_len}"
        self._ends = np.cumsum([len(source) for source in sources])
        self.documents = int(self._ends[-1])
        """Number of documents in all sources."""
        self._unit = UNIT * (cfg.seq_len if cfg.mixture.by == "tokens" else 1)
        self.source_of = [*range(len(sources))]
        """The place in cfg.sources of each of `sources`."""
        self._parts = Sources()
        self._plan = plan
        self._deals = [Deal(batch_size, np.inf)]
        self._counts = dict[int, np.ndarray]()
        self._orders = list[Order]()
        if not evaluation:
            # An evaluation reads its documents once, in order, so it needs neither shares nor
            # orders.
            self._whole = sources
            self._factors = size_factors(cfg, sources)
            self._set(self._described)
            check_marks(cfg)

    def start(self, lanes: int) -> np.ndarray:
        """Return the positions before the first batch: int64 [lanes, K]."""
        return np.tile(Position.start(self.counters).packed(), (lanes, 1))

    @property
    def counters(self) -> int:
        """The number of sources whose positions are counted; one in an evaluation."""
        return 1 if self.evaluation else len(self.sources)

    def described(self) -> Sources:
        """Return the sources, or their parts, as a checkpoint records them."""
        return self._parts

    @functools.cached_property
    def _described(self) -> Sources:
        """All sources as they are now, whole. Each file is looked at once."""
        described = Sources()
        for number, (name, source) in enumerate(zip(self.cfg.named, self.cfg.sources, strict=True)):
            documents = self._whole[number]
            files = documents.by_file() if len(documents.files) <= MOST_FILES else None
            known = files[0] if files else []
            key = source.name or f"{number}"
            # The mark is part of the key, so a checkpoint from before it keeps its order of four
            # rounds.
            if len(documents) > SMALL:
                key += EVEN
            dealt = self._plan.mark(number) if self._plan else ""
            described.append(Part(name, name, key, documents.identity(), known, dealt=dealt))
        return described

    def _set(self, parts: Sources) -> None:
        """Read these parts of the sources."""
        places = {name: place for place, name in enumerate(self.cfg.named)}
        self._parts = parts
        self.source_of = [places[part.source] for part in parts]
        self.sources = [
            self._whole[place] if part.whole else _files_of(self._whole[place], part)
            for place, part in zip(self.source_of, parts, strict=True)
        ]
        # Seeded by key, not by place in the list, so sources may change places.
        self._orders = [
            Order(f"{self.cfg.seed} shuffle {part.key}", len(source))
            for part, source in zip(parts, self.sources, strict=True)
        ]
        sizes = np.array([len(documents) for documents in self.sources], np.float64)
        every = np.array([len(self._whole[place]) for place in self.source_of])
        # A part that came later takes its share from the source's own weight, not from other
        # sources.
        self._portions = sizes / every
        epochs = [self.cfg.sources[place].epochs or np.inf for place in self.source_of]
        self._limits = np.array(epochs) * sizes
        self._counts = {}
        self._deals = []
        for number, limit in enumerate(self._limits):
            moves = self._plan.moves[number] if self._plan else None
            self._deals.append(Deal(self.batch_size, limit, moves))
        scheduled = any(isinstance(source.weight, tuple) for source in self.cfg.sources)
        # Shares are asked for with every document; constant ones are computed once.
        self._constant_shares = None if scheduled else self.shares(1)

    def changes(self, saved: Sources) -> list[str]:
        """Return a line for each source that is new, gone, or has other documents than in a
        checkpoint."""
        now = self._described
        lines = saved.changes(now)
        for part, documents in zip(now, self._whole, strict=True):
            if changed := saved.exchanged(part):
                names = [documents.files[number].path for number in changed]
                lines.append(
                    f"{part.name}: {len(names)} of its files changed, such as {names[0]}; its "
                    "order goes on"
                )
        return lines

    def adopt(
        self, saved: Sources, states: np.ndarray, step: int, changed: bool = False
    ) -> np.ndarray:
        """Convert positions [rows, K] in the sources of a checkpoint of a step to positions in
        these sources, whose orders go on by the keys that they have there. `changed`: the
        configuration of the data changed."""
        self._set(saved.carried(self._described, step))
        # The width tells the versions apart: positions have 2 * sources + 3 numbers now.
        if states.shape[1] == len(saved) + 1:  # of an older version
            states = self._upgraded(saved, states, step)
        return saved.moved(states, self._parts, changed)

    def check_deal(self, saved: Sources) -> None:
        """ConfigError if the plan of train.epochs is not the one by which a checkpoint's run began,
        so that some documents would come twice and others never."""
        before = {part.source: part.dealt for part in saved}
        now = {part.source: part.dealt for part in self._described}
        if not any([*before.values(), *now.values()]):
            return
        changes = saved.changes(self._described)
        if before == now and not changes:
            return
        if not any(before.values()):
            how = "without it, or in an older version"
            advice = "go on by train.steps and data.sources.*.epochs as in the run's config.yml"
        else:
            (steps,) = {mark.partition(" ")[0] for mark in before.values()}
            how = f"with documents shared out to its rows for {steps} steps"
            advice = (
                "put train.epochs and the data back as in the run's config.yml, or begin a new run "
                "from its weights (model.from=RUN, its folder)"
            )
        raise ConfigError(
            f"train.epochs: this run began {how}; now some documents would repeat and others never "
            "come: " + "; ".join([*changes, advice])
        )

    def _upgraded(self, saved: Sources, states: np.ndarray, step: int) -> np.ndarray:
        """Convert positions of an older version, documents finished and an offset: a source is owed
        what it is behind its share of all documents."""
        names = [part.name for part in self._parts]
        given = dict(zip(names, self.shares(1), strict=True))
        shares = np.array([given.get(part.name, 0.0) for part in saved])
        shares /= shares.sum() or 1.0
        upgraded = []
        for state in states.astype(np.int64):
            finished = state[:-1]
            # Older versions chose the source that was furthest behind its share of documents.
            owed = np.rint((shares * finished.sum() - finished) * UNIT).astype(np.int64)
            upgraded.append(Position(finished, owed, -1, int(state[-1]), step).packed())
        return np.stack(upgraded)

    def shares(self, step: int) -> np.ndarray:
        """Return the shares of the sources in the batch of a step, from 1: float64 [sources]. Parts
        of a source share its weight by their documents."""
        weights = [weight_at(source.weight, step) for source in self.cfg.sources]
        weighted = (np.array(weights, np.float64) * self._factors)[self.source_of] * self._portions
        return weighted / weighted.sum()

    def _open_shares(self, position: Position, lane: int) -> np.ndarray:
        """Return the shares of the sources that still give documents; all 0 if none does."""
        shares = self._constant_shares
        if shares is None:
            shares = self.shares(position.step + 1)
        # By lane, since the deal of train.epochs gives lanes different numbers of documents.
        if lane not in self._counts:
            self._counts[lane] = np.array([deal.count(lane) for deal in self._deals])
        # A source that gave all its epochs has no share; dividing by the rest gives it to the
        # others.
        given = np.where(position.finished < self._counts[lane], shares, 0.0)
        return given / (given.sum() or 1.0)

    def phase(self, lane: int) -> np.ndarray:
        """Return a lane's start in the cycle of the mixture: float64 in [0, 1) for each source."""
        keys = ["0"] if self.evaluation else [part.key for part in self._parts]
        # By key as well, so a lane keeps its phase when sources come, go or change places.
        seeds = [f"{self.cfg.seed} mixture {lane} {key}" for key in keys]
        return np.array([text_hash(seed) * 2.0**-64 for seed in seeds])

    def pick(self, position: Position, phase: np.ndarray, lane: int) -> int | None:
        """Return the source of a lane's next document, the one that is owed most, or None if no
        source gives any more."""
        if self.evaluation:
            return 0
        shares = self._open_shares(position, lane)
        given = shares > 0
        if not given.any():
            return None
        # The share of the next document is added before its size is known, so by tokens a full row
        # stands for it. Sums below 2**53 are exact in float64, so all processes choose alike.
        owed = position.owed + np.rint((shares + phase) * self._unit)
        # The phase shifts this choice alone and never enters the debts.
        return int(np.argmax(np.where(given, owed, -np.inf)))

    def limit(self, source: int) -> int:
        """Return how many documents a source with epochs gives in all."""
        # Epochs may be a fraction; the last place counts if any part of it does.
        return math.ceil(self._limits[source])

    def infills(self, source: int) -> bool:
        """Return True if a document's tokens depend on its place in the order."""
        return bool(self._config(source).fill_in_the_middle)

    def gives(self, source: int, step: int) -> bool:
        """Return True if a source has a weight above 0 in the batch of a step."""
        return self.evaluation or weight_at(self._config(source).weight, step) > 0

    def _config(self, source: int) -> AnySource:
        return self.cfg.sources[self.source_of[source]]

    def count(self, position: Position, source: int, tokens: int, lane: int) -> None:
        """Count a finished document in a lane's position: pay its source and owe all their
        shares."""
        if not self.evaluation:
            size = tokens if self.cfg.mixture.by == "tokens" else 1
            # Before `finished` counts this document: a source that ends with it still has a share
            # of it.
            shares = self._open_shares(position, lane)
            # Rounded to whole numbers, which loses at most half of 1 / UNIT a source and document.
            position.owed += np.rint(shares * size * UNIT).astype(np.int64)
            position.owed[source] -= size * UNIT
        position.finished[source] += 1

    def quarantine(self) -> Quarantine:
        """Return a new, empty quarantine."""
        return Quarantine(self.cfg.quarantine, f"{self.section}.quarantine")

    def notices(self) -> Notices:
        """Return what makes log lines of a quarantine's news."""
        return Notices(self.section, self.cfg.overlong, self.room_of)

    def place(self, position: Position, counter: int, lane: int) -> int:
        """Return the place of a lane's next document in a source's global order."""
        return self._deals[counter].place(lane, int(position.finished[counter]))

    def locate(self, counter: int, place: int) -> tuple[int, int] | None:
        """Return (source, index) of the document at a place of a source's global order, or None
        past the end of an evaluation."""
        if self.evaluation:
            if place >= self.documents:
                return None
            return find_part(self._ends, place)
        return counter, self.drawn(counter, place)

    def drawn(self, source: int, place: int) -> int:
        """Return the index of the document at a place of a training source's order."""
        if self.cfg.shuffle:
            return self._orders[source][place]
        return place % len(self.sources[source])

    def units(self, source: int, index: int, place: int, quarantine: Quarantine) -> list[Unit]:
        """Return a document, at a place of its source's global order, as units of rows; in an
        evaluation with `bytes`, the bytes of text that each token stands for.

        Empty if it cannot be read and is passed over. DataError if it may not be passed over.
        """
        documents = self.sources[source]
        try:
            if documents.record:
                units = units_of(documents, index, self.cfg, self.fields)
                return self._fitting(units, documents, index, quarantine)
            tokenizer = open_tokenizer(self.cfg.tokenizer)
            limit = self.cfg.longest, self.cfg.beyond
            values = {}
            if self.evaluation:
                # Sizes may cost a second encoding, and only bits per byte need them.
                ids, values["bytes"] = tokenize_with_sizes(documents, index, tokenizer, *limit)
            elif cut := self._config(source).fill_in_the_middle:
                # By place rather than index, so that a document is cut otherwise in each epoch.
                seed = f"{self.cfg.seed} middle {self._parts[source].key} {place}"
                ids = infill(documents, index, tokenizer, cut, seed, *limit)
            else:
                ids = tokenize(documents, index, tokenizer, *limit)
            before = self._end_before(ids, tokenizer)
            ids = np.concatenate([before, ids])
            values = {name: np.pad(each, (len(before), 0)) for name, each in values.items()}
            return [Unit([Segment(ids, values)], whole=False)]
        # Neither is damage of the record: TooLong is what data.overlong asks for, and a store that
        # is away would make documents vanish from the run.
        except (TooLong, StoreError):
            raise
        except DataError as error:
            # By the document, not its place, so that a damaged one counts once in all epochs.
            quarantine.add(f"{source} {index}", str(error))
            return []

    def check(self) -> None:
        """Read the first document of each source, so that a wrong kind, column or shape is an error
        before anything is compiled: a DataError, unless such documents may be passed over."""
        for number, source in enumerate(self.sources):
            try:
                if source.record and source.record.kind not in PICTURED:
                    self.units(number, 0, 0, self.quarantine())
                else:
                    source[0]
            except DataError:
                if not self.cfg.quarantine:
                    raise

    def _end_before(self, ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Return the ids to put before a document, int32: EOS if rows go across documents that end
        in EOS and begin without BOS. Without it EOS would be a target alone, never an input, and
        the model could not see where a document begins."""
        if self.cfg.across_documents and not tokenizer.bos and len(ids):
            if ids[-1] in tokenizer.eos:
                return np.array(tokenizer.eos, np.int32)
        return np.zeros(0, np.int32)

    def _fitting(
        self, units: list[Unit], documents: Documents, index: int, quarantine: Quarantine
    ) -> list[Unit]:
        """Return the units that fit in a row, and the others cut if data.overlong says so."""
        fitting = []
        for unit in units:
            if unit.length <= self.room:
                fitting.append(unit)
                continue
            # A last token is a target alone, unless one of no meaning follows it (add_end_token).
            last = [part for part in unit.segments if "ends" not in part.values]
            text = f"{documents.where(index)}: {unit.length + len(last)} tokens"
            if self.cfg.overlong == "error":
                raise TooLong(
                    f"{text}, but {self.room_of}; raise it, or set {self.section}.overlong to "
                    "drop or cut"
                )
            quarantine.long(documents.name, text)
            if self.cfg.overlong == "cut" and (short := unit.cut(self.room)):
                fitting.append(short)
        return fitting


def _files_of(documents: Documents, part: Part) -> Documents:
    """Return the documents of the files of a part of a source."""
    found = documents.by_file()
    assert found
    marks, file_of = found
    wanted = {*part.files}
    files = [number for number, mark in enumerate(marks) if mark in wanted]
    # By file, since new files may stand between old ones in the order of names.
    selected = Selection(documents, np.flatnonzero(np.isin(file_of, files)))
    selected.name = part.name
    return selected


def size_factors(cfg: DataConfig, sources: Sequence[Documents]) -> np.ndarray:
    """Return the factors of the sources' weights by data.mixture: float64 [sources]."""
    mixture = cfg.mixture
    if not mixture.temperature and not mixture.unimax:
        return np.ones(len(sources))
    sizes = np.array([float(len(source)) for source in sources])
    if mixture.by == "tokens":
        sizes *= [_mean_tokens(cfg, source) for source in sources]
    if mixture.unimax:
        epochs, budget = mixture.unimax.epochs, mixture.unimax.budget
        if (most := epochs * sizes.sum()) < budget:
            log.warning(
                "data.mixture.unimax: %g epochs of all sources are some %.4g %s, less than budget="
                "%d: sources are read more often, in proportion to their sizes; allow more epochs, "
                "or set the budget to the tokens of the run",
                *(epochs, most, mixture.by, budget),
            )
        if any(source.weight != 1 for source in cfg.sources):
            log.warning(
                "data.mixture.unimax: its shares are multiplied by the weights of data.sources, so "
                "a source may be read more than %g times; leave weights out for none to be",
                epochs,
            )
        return unimax(sizes, epochs, budget)
    assert mixture.temperature
    return (sizes / sizes.sum()) ** (1 / mixture.temperature)


def unimax(sizes: np.ndarray, epochs: float, budget: float) -> np.ndarray:
    """Return shares of sources of so many documents or tokens by UniMax: the budget in equal parts,
    from the smallest source on, but of none more than `epochs` times its size (Chung et al. 2023,
    arXiv:2304.09151, algorithm 1)."""
    given = np.zeros(len(sizes))
    left = float(budget)
    for i, source in enumerate(np.argsort(sizes, kind="stable")):
        # From the smallest on, so that each source's unspent part is shared by all larger ones.
        given[source] = min(left / (len(sizes) - i), epochs * sizes[source])
        left -= given[source]
    return given / given.sum()


def _mean_tokens(cfg: DataConfig, source: Documents) -> float:
    """Return the mean tokens of a document, estimated from some that are spread over the source."""
    tokenizer = open_tokenizer(cfg.tokenizer)
    counts = []
    for index in range(0, len(source), max(1, len(source) // SAMPLED)):
        try:
            if source.record:
                counts.append(sum(unit.length for unit in units_of(source, index, cfg, {})))
            else:
                counts.append(len(tokenize(source, index, tokenizer)))
        except DataError:  # reported when the document is due
            continue
    if not sum(counts):
        raise DataError(f"source {source.name}: none of {SAMPLED} documents has a token to count")
    return sum(counts) / len(counts)
