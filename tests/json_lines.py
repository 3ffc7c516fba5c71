"""Files of JSON lines, for tests."""

import json
from pathlib import Path


def lines_of(rows):
    """Rows as the text of such a file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def lines_of_texts(texts):
    """Texts as the documents of such a file."""
    return lines_of({"text": text} for text in texts)


def write_rows(path, rows):
    """Write a file of rows."""
    Path(path).write_text(lines_of(rows))


def write_texts(path, texts):
    """Write a file of documents."""
    Path(path).write_text(lines_of_texts(texts))


def read_rows(path):
    """The rows of a file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
