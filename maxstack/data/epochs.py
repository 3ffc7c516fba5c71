"""The steps of a run that is to see its data some times: counted by packing all of it once."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from maxstack.config import storage
from maxstack.data.files import digest
from maxstack.data.lanes import FED, Rows
from maxstack.data.mixture import Mixture
from maxstack.data.sources import open_sources
from maxstack.report.progress import progress

if TYPE_CHECKING:
    from maxstack.schema.config import Config
    from maxstack.schema.objective import RowField as Field


def with_epochs(cfg: "Config") -> "Config":
    """The configuration with train.epochs as the most passes over each source that says none."""
    sources = tuple(
        source if source.epochs else source.model_copy(update={"epochs": cfg.train.epochs})
        for source in cfg.data.sources
    )
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"sources": sources})})


def steps_of(cfg: "Config", lanes: Sequence[int], fields: Mapping[str, "Field"]) -> int:
    """Batches until some lanes have nothing left, of a configuration by `with_epochs`. The number
    is kept in $MAXSTACK_CACHE."""
    data, size = cfg.data, cfg.train.batch_size
    mixture = Mixture(data, open_sources(data), size, False, "data", fields, cfg.stages)
    described = [mixture.described(), data.model_dump(mode="json"), size, [*lanes]]
    stages = [stage.model_dump() for stage in cfg.train.stages]
    key = digest(json.dumps([*described, stages, sorted(fields)]).encode())
    kept = storage.cache_folder() / "epochs" / key
    if kept.exists():
        return int(kept.read_text())
    rows, steps = Rows(mixture, [*lanes], mixture.start(size)[[*lanes]]), 0
    sources = zip(data.sources, mixture.sources, strict=True)
    passes = sum((source.epochs or 0) * len(documents) for source, documents in sources)
    turns, last = max(size // stage.rows for stage in cfg.stages.all), 0
    with progress(int(passes * len(lanes) / size), "train.epochs: counting", "documents") as bar:
        while steps < last + turns:
            counts, steps = rows.next()[FED], steps + 1
            bar.update(int(counts[:, -2].sum()))
            if counts[:, :-2].any():
                last = steps
    with storage.replacing(str(kept)) as unfinished:
        unfinished.write_text(f"{last}")
    return last
