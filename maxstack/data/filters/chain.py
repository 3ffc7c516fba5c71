"""The filters of a configuration, in order: the data that they need, and the functions they are."""

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from maxstack.config import storage
from maxstack.data.filters import (
    c4,
    characters,
    contamination,
    duplicates,
    gopher,
    personal,
)
from maxstack.data.filters.filter import KINDS, Filter, Removed, read_lines
from maxstack.schema.filters import (
    GLOBAL,
    AnyFilter,
    C4Filter,
    DecontaminateFilter,
    NearDuplicatesFilter,
)

OWN = c4, characters, contamination, gopher, personal
"""Modules that register their classes in KINDS."""
FilterData = Mapping[int, Any]
"""Data of filters that the main process reads once, by the filter's number."""


def read_data(sections: Sequence[AnyFilter], task_texts: Mapping[str, Sequence[str]]) -> FilterData:
    """Read what filters need besides their section. ConfigError if a file cannot be read."""
    data: dict[int, Any] = {}
    for number, section in enumerate(sections):
        if isinstance(section, DecontaminateFilter):
            data[number] = contamination.read_grams(section, task_texts)
        if isinstance(section, C4Filter) and section.bad_words:
            lines = read_lines("c4.bad_words", section.bad_words, storage.WHOLE)
            data[number] = [line.strip() for line in lines if line.strip()]
    return data


def open_filters(sections: Sequence[AnyFilter], data: FilterData) -> dict[int, Filter]:
    """Return the filters of single documents by number. ConfigError if a package is missing."""
    filters = {}
    for number, section in enumerate(sections):
        if isinstance(section, NearDuplicatesFilter):
            duplicates.check_installed()
        if not isinstance(section, GLOBAL):
            further = [data[number]] if number in data else []
            of_own = pkgutil.resolve_name(section.STEP) if section.STEP else None
            filters[number] = (of_own or KINDS[type(section)])(section, *further)
    return filters


def change(text: str, filters: Mapping[int, Filter]) -> str:
    """Apply filters that do not remove a text, since an earlier pass kept it."""
    for each in filters.values():
        result = each(text)
        assert not isinstance(result, Removed), "a filter removes a document that it kept before"
        text = result
    return text
