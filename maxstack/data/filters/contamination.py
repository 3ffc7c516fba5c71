"""Removal of documents that share n-grams of words with evaluation tasks (decontamination; Brown et
al. 2020, arXiv:2005.14165, who use 13 words).

The main process hashes all n-grams of the tasks once, into a sorted array; workers look up the
n-grams of each document in it by binary search. A document with enough of them is removed whole.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.filters.filter import (
    Filter,
    Removed,
    hash_units,
    kind,
    ngrams,
    read_lines,
    split_words,
)
from maxstack.errors import ConfigError
from maxstack.schema.filters import DecontaminateFilter

log = logging.getLogger(__name__)
Grams = tuple[tuple[str, ...], np.ndarray, np.ndarray]
"""Names of tasks or files; hashes of their n-grams, sorted; the number of the name of each."""


@kind(DecontaminateFilter)
class Decontaminate(Filter):
    """Remove documents with n-grams of tasks."""

    def __init__(self, cfg: DecontaminateFilter, grams: Grams):
        self._cfg = cfg
        self._names, self._grams, self._numbers = grams

    def __call__(self, text: str) -> str | Removed:
        own = ngrams(hash_units(split_words(text)), self._cfg.ngram)
        at = np.searchsorted(self._grams, own)
        # Past the end: larger than all, so equal to none, also not to the first.
        at[at == len(self._grams)] = 0
        found = at[self._grams[at] == own]
        if len(found) < self._cfg.min_matches:
            return text
        return Removed(self._names[self._numbers[found[0]]], len(found))


def read_grams(cfg: DecontaminateFilter, texts: Mapping[str, Sequence[str]]) -> Grams:
    """Return the n-grams of a filter's tasks, whose texts are given by name, and of its files.
    ConfigError if there are none."""
    given = {name: texts[name] for name in cfg.tasks} | {path: _read(path) for path in cfg.files}
    hashes = list[np.ndarray]()
    numbers = list[np.ndarray]()
    short = 0
    for number, texts_of_one in enumerate(given.values()):
        for text in texts_of_one:
            own = np.unique(ngrams(hash_units(split_words(text)), cfg.ngram))
            if not len(own):
                short += 1
            hashes.append(own)
            numbers.append(np.full(len(own), number))
    if short:
        log.warning(
            "decontaminate: %d of %d texts have fewer than %d words and are not looked for",
            short, len(hashes), cfg.ngram,
        )  # fmt: skip
    if short == len(hashes):
        raise ConfigError(
            f"data.steps: decontaminate: no text of {', '.join(given)} has {cfg.ngram} words; give "
            "a smaller ngram"
        )
    # A sorted array takes 8 bytes an n-gram, and goes to each worker as a single block.
    grams, first = np.unique(np.concatenate(hashes), return_index=True)
    return (*given,), grams, np.concatenate(numbers)[first]


def _read(path: str) -> list[str]:
    lines = read_lines("decontaminate.files", path, storage.LARGE)
    if not path.endswith(".jsonl"):
        return lines
    rows = (
        strict_json.parse(line.encode(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    return [" ".join(_texts(row)) for row in rows]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts inside a value of JSON."""
    if isinstance(value, str):
        yield value
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for each in inner:
            yield from _texts(each)
