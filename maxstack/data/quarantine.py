"""Documents that a feed passes over: those that cannot be read, are empty, or too long for a
row."""

from typing import NamedTuple

from maxstack.errors import DataError

_NAMED = 5


class News(NamedTuple):
    """Documents that were passed over, each to be reported once."""

    damaged: dict[str, str]
    """Records that cannot be read, and why."""
    empty: dict[str, str]
    """Sources, and their first document without anything to predict."""
    long: dict[str, tuple[str, int]]
    """Sources, their first record that was too long, and how many of them there were."""


def empty_news() -> News:
    """Return news without any document."""
    return News({}, {}, {})


class Quarantine:
    """The records that a feed passes over. Those that cannot be read are counted and reported once
    each, and `key` allows at most `most` of them; of empty ones the first of a source is
    reported."""

    def __init__(self, most: int, key: str):
        self._most, self._key = most, key
        self._damaged: set[str] = set()
        self._empty: set[str] = set()
        self._news = empty_news()

    def add(self, record: str, reason: str) -> None:
        """Pass over a record; `reason` names its file and number. DataError if there are too
        many."""
        # A damaged record comes again in every epoch, and counts once.
        if record not in self._damaged:
            self._damaged.add(record)
            self._news.damaged[record] = reason
        if len(self._damaged) <= self._most:
            return
        reasons = "; ".join([*self._news.damaged.values()][-_NAMED:])
        advice = f"{reasons}. Repair the file, leave it out with `exclude`, or "
        if not self._most:
            raise DataError(
                f"{advice}set {self._key} to the number of such records that may be passed over"
            )
        raise DataError(
            f"{len(self._damaged)} records cannot be read, but {self._key}={self._most} passes "
            f"over at most that many; the last: {advice}raise {self._key}"
        )

    def empty(self, source: str, document: str) -> None:
        """Pass over a document without anything to predict, by its file and number."""
        # Only the first of a source is reported: many blank documents would fill the log.
        if source not in self._empty:
            self._empty.add(source)
            self._news.empty[source] = document

    def long(self, source: str, record: str, count: int = 1) -> None:
        """Count records of a source that were dropped or cut."""
        first, before = self._news.long.get(source, (record, 0))
        self._news.long[source] = first, before + count

    def news(self) -> News:
        """Return documents passed over since the last call."""
        news, self._news = self._news, empty_news()
        return news


class Notices:
    """Lines for the log about documents that a quarantine passed over, each once; `overlong` says
    what becomes of those longer than `room`."""

    def __init__(self, section: str, overlong: str, room: str):
        self._section = section
        self._overlong = overlong
        self._room = room
        self._long: dict[str, int] = {}

    def lines(self, news: News) -> list[str]:
        """Return a line for every record that cannot be read, for each source's first document
        without anything to predict, and its 1st, 10th, 100th, ... that is too long."""
        section = self._section
        lines = [f"{section}.quarantine: passed over {reason}" for reason in news.damaged.values()]
        lines += [
            f"{section}.sources: {document} is empty, with nothing to predict; it and all such "
            f"documents of {source} are passed over"
            for source, document in news.empty.items()
        ]
        for source, (record, count) in news.long.items():
            before = self._long.get(source, 0)
            self._long[source] = before + count
            # At 1, 10, 100, ...: counts of several batches come at once, so compare digits, not
            # remainders.
            if not before or len(str(before + count)) > len(str(before)):
                lines.append(
                    f"{section}.overlong={self._overlong}: {before + count} records of "
                    f"{source} so far are longer than {self._room}, such as {record}"
                )
        # A name or a record may hold half a surrogate pair, which no log can write.
        return [line.encode(errors="backslashreplace").decode() for line in lines]
