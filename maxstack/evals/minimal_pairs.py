"""Questions made of held-out source of Python's standard library: which of several lines is the
real one? The pairs are minimal, in the manner of BLiMP (Warstadt et al. 2020, arXiv:1912.00582).

Lines of the files that quickstart.yml holds out are shuffled by a seed; each in turn gives one
question, with the three lines before it as context and a changed line as the wrong choice, until
there are enough.
"""

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxstack.data.sources import open_sources
from maxstack.errors import ConfigError
from maxstack.evals.baselines import texts_of
from maxstack.load import load

BEFORE = 3
"""Lines of context."""
SHORTEST, LONGEST = 20, 72
"""Characters of the line in question."""
MOST = 240
"""Bytes of both together at most: a sequence of quickstart.yml holds 256."""
KEYWORDS = ("self", "return", "None", "def", "not", "in", "if", "for", "else")
CHOICES = 4
"""Words to choose the next one from."""

Question = dict[str, Any]
Line = tuple[str, str]
"""A line's context, and the line."""


def documents(kind: str, count: int = 50, seed: int = 0) -> list[Question]:
    """Return `count` questions: `context`, `choices` and the number of the `right` one. ConfigError
    for an unknown kind, and where the held-out files give fewer questions."""
    if kind not in KINDS:
        raise ConfigError(f"dataset_name: {kind}: no such documents; there are {', '.join(KINDS)}")
    # By kind, so that questions of one kind do not change with what else is asked.
    rng = random.Random(f"{seed} {kind}")
    lines = [*_lines()]
    rng.shuffle(lines)
    made = KINDS[kind](lines, rng)
    questions = [question for question, _ in zip(made, range(count), strict=False)]
    if len(questions) < count:
        raise ConfigError(
            f"dataset_kwargs.count={count}: the held-out files give {len(questions)} {kind}"
        )
    return questions


@functools.cache
def _lines() -> tuple[Line, ...]:
    """Return the usable lines of the files that quickstart.yml holds out."""
    # As bytes: the quickstart's own tokenizer is learnt in a run and need not exist here.
    data = load("quickstart", ["data.tokenizer={kind: bytes}"]).data
    found = []
    for text in texts_of(data, open_sources(data, evaluation=True)):
        lines = text.decode(errors="replace").split("\n")
        for i in range(BEFORE, len(lines)):
            line, context = lines[i], "".join(f"{line}\n" for line in lines[i - BEFORE : i])
            is_code = line.isascii() and not line.lstrip().startswith("#")
            size = len(context.encode()) + len(line.encode())
            # Line and context fit a row of quickstart.yml, so no request loses its beginning.
            if SHORTEST < len(line) < LONGEST and is_code and size <= MOST:
                found.append((context, line))
    return (*found,)


def _question(context: str, text: str, wrong: list[str], rng: random.Random) -> Question:
    # At no fixed place: a model that prefers the first choice must not gain by it.
    right = rng.randrange(len(wrong) + 1)
    return {"context": context, "choices": [*wrong[:right], text, *wrong[right:]], "right": right}


Change = Callable[[str, random.Random], str | None]


def _pairs(change: Change, lines: Sequence[Line], rng: random.Random) -> Iterator[Question]:
    """Yield a question for each line that the change alters."""
    for context, line in lines:
        # Some changes give the same line, as of two equal letters.
        if (wrong := change(line, rng)) and wrong != line:
            yield _question(context, f"{line}\n", [f"{wrong}\n"], rng)


def _next_words(lines: Sequence[Line], rng: random.Random) -> Iterator[Question]:
    """Yield beginnings of lines with the next word; the wrong ones are of other lines."""
    begun = []
    for context, line in lines:
        if words := [*re.finditer(r"(?<=\S) \S+", line)]:
            word = rng.choice(words)
            end = "\n" if word.end() == len(line) else ""
            begun.append((context + line[: word.start()], word[0] + end))
    for context, right in begun:
        # Twice as many are drawn as needed, because some are equal.
        others = dict.fromkeys(other for _, other in rng.sample(begun, 2 * CHOICES))
        wrong = [other for other in others if other != right][: CHOICES - 1]
        if len(wrong) == CHOICES - 1:
            yield _question(context, right, wrong, rng)


def _exchange(pattern: str, words: Sequence[str], line: str, rng: random.Random) -> str | None:
    """Replace a match of a pattern by another of the words."""
    if not (found := [*re.finditer(pattern, line)]):
        return None
    match = rng.choice(found)
    other = rng.choice([word for word in words if word != match[0]])
    return line[: match.start()] + other + line[match.end() :]


def _swap_letters(line: str, rng: random.Random) -> str | None:
    """Exchange two neighbours inside a word."""
    if not (words := [*re.finditer(r"[a-z]{5,}", line)]):
        return None
    word = rng.choice(words)
    i = word.start() + rng.randrange(1, len(word[0]) - 2)
    return line[:i] + line[i + 1] + line[i] + line[i + 2 :]


def _indent(line: str, rng: random.Random) -> str | None:
    if not line.startswith("    "):
        return None
    moved = rng.choice((-2, -1, 1, 2))
    return " " * moved + line if moved > 0 else line[-moved:]


_changes: dict[str, Change] = {
    "letters": _swap_letters,
    "keywords": functools.partial(_exchange, rf"\b({'|'.join(KEYWORDS)})\b", KEYWORDS),
    "brackets": functools.partial(_exchange, r"[)\]}]", ")]}"),
    "indentation": _indent,
}
KINDS: dict[str, Callable[[Sequence[Line], random.Random], Iterator[Question]]] = {
    **{kind: functools.partial(_pairs, change) for kind, change in _changes.items()},
    "next_word": _next_words,
}
"""Kind -> questions made of lines."""
