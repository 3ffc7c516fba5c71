"""Documents that share n-grams of words with evaluation tasks."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data.steps.step import Removed, Step, hashes_of, kind, ngrams, unreadable, words_of
from maxstack.errors import ConfigError
from maxstack.schema.steps import DecontaminateStep

log = logging.getLogger(__name__)
Grams = tuple[tuple[str, ...], np.ndarray, np.ndarray]
"""Names of tasks or files; hashes of their n-grams, sorted; the number of the name of each."""


@kind(DecontaminateStep)
class Decontaminate(Step):
    """Removes documents with n-grams of tasks."""

    def __init__(self, cfg: DecontaminateStep, grams: Grams):
        self._cfg = cfg
        self._names, self._grams, self._numbers = grams

    def __call__(self, text: str) -> str | Removed:
        own = ngrams(hashes_of(words_of(text)), self._cfg.ngram)
        at = np.searchsorted(self._grams, own)
        at[at == len(self._grams)] = 0
        found = at[self._grams[at] == own]
        if len(found) < self._cfg.min_matches:
            return text
        return Removed(self._names[self._numbers[found[0]]], len(found))


def grams_of(cfg: DecontaminateStep, texts: Mapping[str, Sequence[str]]) -> Grams:
    """The n-grams of a step's tasks, whose texts are given by name, and of its files. ConfigError
    where there are none."""
    given = {name: texts[name] for name in cfg.tasks} | {path: _read(path) for path in cfg.files}
    hashes, numbers, short = [], [], 0
    for number, texts_of_one in enumerate(given.values()):
        for text in texts_of_one:
            own = np.unique(ngrams(hashes_of(words_of(text)), cfg.ngram))
            short += not len(own)
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
    grams, first = np.unique(np.concatenate(hashes), return_index=True)
    return (*given,), grams, np.concatenate(numbers)[first]


def _read(path: str) -> list[str]:
    try:
        lines = storage.read_whole(path, storage.LARGE).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable("decontaminate.files", path, error) from error
    if not path.endswith(".jsonl"):
        return lines
    rows = (
        strict_json.parse(line.encode(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    return [" ".join(_texts(row)) for row in rows]


def _texts(value: Any) -> Iterator[str]:
    """The texts within a value of JSON."""
    if isinstance(value, str):
        yield value
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for each in inner:
            yield from _texts(each)
