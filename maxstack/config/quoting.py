"""Values from users and files as an error shows them: short, on one line, without control
characters."""

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 4
_REPR.maxlevel = 3


def quoted(value: object) -> str:
    """A value in Python's notation, with `...` for what is left out."""
    return shortened(_REPR.repr(value))


def shortened(text: str, most: int = 120) -> str:
    """A name or a line, beyond `most` characters without its middle, and with escapes for
    characters that are not printable."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[-(most // 3) :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
