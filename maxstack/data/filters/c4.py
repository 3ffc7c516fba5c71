"""The rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2)."""

import re
from collections.abc import Sequence

from maxstack.data.filters.filter import Filter, Removed, kind
from maxstack.schema.filters import C4Filter

_TERMINAL = tuple('.!?"\u201d')
_SENTENCE = re.compile(r"[.!?][\"'\u201d\u2019)\]]*(?=\s|$)")
_CITATION = re.compile(r"\[(?:\d+|edit|citation needed)\]", re.IGNORECASE)
_POLICY = re.compile(
    "terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies",
    re.IGNORECASE,
)
_JAVASCRIPT = re.compile("javascript", re.IGNORECASE)
_LOREM_IPSUM = re.compile("lorem ipsum", re.IGNORECASE)


@kind(C4Filter)
class C4(Filter):
    """Rules for lines, then for the document that is left of them."""

    def __init__(self, cfg: C4Filter, bad_words: Sequence[str] = ()):
        self._cfg = cfg
        words = "|".join(map(re.escape, bad_words)) or "(?!)"
        self._bad = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)

    def __call__(self, text: str) -> str | Removed:
        cfg = self._cfg
        # In the whole page. datatrove looks only at lines that other rules keep, which is most of
        # the difference between the two.
        if cfg.lorem_ipsum and _LOREM_IPSUM.search(text):
            return Removed("lorem_ipsum", True)
        if cfg.curly_bracket and "{" in text:
            return Removed("curly_bracket", True)
        if bad := self._bad.search(text):
            return Removed("bad_words", bad[0])
        lines = (_CITATION.sub("", line) if cfg.citations else line for line in text.split("\n"))
        text = "\n".join(line for line in lines if self._keeps(line))
        sentences = len(_SENTENCE.findall(text))
        if sentences < cfg.min_sentences:
            return Removed("min_sentences", sentences)
        return text

    def _keeps(self, line: str) -> bool:
        cfg, stripped = self._cfg, line.strip()
        return not (
            (cfg.terminal_punctuation and not stripped.endswith(_TERMINAL))
            # An ellipsis ends in a full stop too, but is no end of a sentence.
            or (cfg.terminal_punctuation and stripped.endswith("..."))
            or len(stripped.split()) < cfg.min_line_words
            or (cfg.javascript and _JAVASCRIPT.search(line))
            or (cfg.policy and _POLICY.search(line))
        )
