"""Numbered pages that requests share, with reference counts and a table of contents by hash."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Pool:
    """Pages `first` to `first + size - 1`. A page without users keeps its contents, and may be
    shared again, until it is taken: the one that was released longest ago goes first."""

    def __init__(self, size: int, first: int = 1):
        self.size = size
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, first + size))
        self._users: dict[int, int] = {}
        self._page: dict[bytes, int] = {}
        self._contents: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages without users."""
        return len(self._unused)

    def take(self) -> int:
        """A page for one user; its contents are forgotten. IndexError where all have users."""
        if not self._unused:
            raise IndexError("no page is left")
        page, _ = self._unused.popitem(last=False)
        self._forget(page)
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more user of a page that `find` gave."""
        self._unused.pop(page, None)
        self._users[page] = self._users.get(page, 0) + 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less of each; pages that shall be taken first come first."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._unused[page] = None
                if page not in self._contents:
                    self._unused.move_to_end(page, last=False)

    def users(self, page: int) -> int:
        """Number of users of a page."""
        return self._users.get(page, 0)

    def find(self, contents: bytes) -> int | None:
        """The page with these contents."""
        return self._page.get(contents)

    def describe(self, page: int, contents: bytes) -> None:
        """Say what a page holds; the first page with these contents stays the one that is found."""
        if contents not in self._page:
            self._forget(page)
            self._page[contents], self._contents[page] = page, contents

    def forget_all(self) -> None:
        """Contents of all pages."""
        self._page.clear()
        self._contents.clear()

    def _forget(self, page: int) -> None:
        contents = self._contents.pop(page, None)
        if contents is not None:
            del self._page[contents]


def page_hash(parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
    """SHA-256 of a full page of tokens after those that `parent` stands for; `salt` says what else
    its cached arrays depend on, such as an adapter."""
    words = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(len(salt).to_bytes(4, "little") + salt + parent + words).digest()
