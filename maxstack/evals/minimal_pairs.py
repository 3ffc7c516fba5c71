"""Questions made of held-out source of Python's standard library: which of several lines is the
real one? The pairs are minimal, in the manner of BLiMP (Warstadt et al. 2020, arXiv:1912.00582)."""

import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from maxstack import load
from maxstack.data.sources import open_sources
from maxstack.errors import ConfigError
from maxstack.evals.baselines import texts_of

BEFORE = 3
"""Lines of context before the one that is asked about."""
SHORTEST, LONGEST = 20, 72
"""Characters of that line."""
MOST = 240
"""Bytes of both together at most: a row of quickstart.yml holds 256."""
KEYWORDS = ("self", "return", "None", "def", "not", "in", "if", "for", "else")
CHOICES = 4
"""Words to choose the next one from."""

Line = tuple[str, str]
"""The lines before it, and itself."""


def documents(kind: str, count: int = 50, seed: int = 0) -> list[dict[str, Any]]:
    """`count` questions: `context`, `choices` and the number of the `right` one. ConfigError for a
    kind that there is not, and where the held-out files do not give as many."""
    if kind not in (*CHANGES, "next_word"):
        raise ConfigError(
            f"dataset_name: {kind}: no such documents; there are "
            f"{', '.join((*CHANGES, 'next_word'))}"
        )
    rng = random.Random(f"{seed} {kind}")
    lines = list(_lines())
    rng.shuffle(lines)
    made = _next_words(lines, rng) if kind == "next_word" else _pairs(lines, CHANGES[kind], rng)
    questions = [question for question, _ in zip(made, range(count), strict=False)]
    if len(questions) < count:
        raise ConfigError(
            f"dataset_kwargs.count={count}: the held-out files give {len(questions)} {kind}"
        )
    return questions


@functools.cache
def _lines() -> tuple[Line, ...]:
    """Lines of the files that quickstart.yml holds out."""
    data = load.load("quickstart", ["data.tokenizer={kind: bytes}"]).data
    found = (
        ("".join(f"{line}\n" for line in lines[i - BEFORE : i]), lines[i])
        for text in texts_of(data, open_sources(data, evaluation=True))
        for lines in [text.decode(errors="replace").split("\n")]
        for i in range(BEFORE, len(lines))
        if SHORTEST < len(lines[i]) < LONGEST
        and lines[i].isascii()
        and not lines[i].lstrip().startswith("#")
    )
    return tuple(line for line in found if sum(len(part.encode()) for part in line) <= MOST)


def _pairs(
    lines: list[Line], change: Callable[[str, random.Random], str | None], rng: random.Random
) -> Iterator[dict[str, Any]]:
    for context, line in lines:
        if (wrong := change(line, rng)) and wrong != line:
            yield _question(context, f"{line}\n", [f"{wrong}\n"], rng)


def _next_words(lines: list[Line], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Which word goes on a line; the others go on other lines."""
    begun = []
    for context, line in lines:
        if words := [*re.finditer(r"(?<=\S) \S+", line)]:
            word = rng.choice(words)
            end = "\n" if word.end() == len(line) else ""
            begun.append((context + line[: word.start()], word[0] + end))
    for context, right in begun:
        others = dict.fromkeys(other for _, other in rng.sample(begun, 2 * CHOICES))
        wrong = [other for other in others if other != right][: CHOICES - 1]
        if len(wrong) == CHOICES - 1:
            yield _question(context, right, wrong, rng)


def _question(context: str, text: str, wrong: list[str], rng: random.Random) -> dict[str, Any]:
    right = rng.randrange(len(wrong) + 1)
    choices = [*wrong[:right], text, *wrong[right:]]
    return {"context": context, "choices": choices, "right": right}


def _letters(line: str, rng: random.Random) -> str | None:
    """Two neighbours inside a word exchanged."""
    if not (words := [*re.finditer(r"[a-z]{5,}", line)]):
        return None
    i = (word := rng.choice(words)).start() + rng.randrange(1, len(word[0]) - 2)
    return line[:i] + line[i + 1] + line[i] + line[i + 2 :]


def _keywords(line: str, rng: random.Random) -> str | None:
    words = [*re.finditer(rf"\b({'|'.join(KEYWORDS)})\b", line)]
    if not words:
        return None
    word = rng.choice(words)
    other = rng.choice([each for each in KEYWORDS if each != word[0]])
    return line[: word.start()] + other + line[word.end() :]


def _brackets(line: str, rng: random.Random) -> str | None:
    if not (closing := [i for i, letter in enumerate(line) if letter in ")]}"]):
        return None
    i = rng.choice(closing)
    return line[:i] + rng.choice([each for each in ")]}" if each != line[i]]) + line[i + 1 :]


def _indentation(line: str, rng: random.Random) -> str | None:
    if not line.startswith("    "):
        return None
    moved = rng.choice((-2, -1, 1, 2))
    return " " * moved + line if moved > 0 else line[-moved:]


CHANGES: dict[str, Callable[[str, random.Random], str | None]] = {
    "letters": _letters,
    "keywords": _keywords,
    "brackets": _brackets,
    "indentation": _indentation,
}
"""What makes a line wrong; None where it cannot."""
