"""Pieces of vocabularies: the text that each token stands for."""

import json
import re
from typing import Any

from maxstack.data import byte_level

SPACE = "\u2581"
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def hugging_face_pieces(spec: dict[str, Any], vocab: dict[str, int], size: int) -> list[bytes]:
    """Byte-level vocabularies write a byte as one character; the others write text, with marks for
    spaces and word beginnings."""
    described = json.dumps([spec.get("decoder"), spec.get("pre_tokenizer")])
    is_byte_level, word_piece = '"ByteLevel"' in described, '"WordPiece"' in described
    pieces = [b""] * size
    for text, token in vocab.items():
        if is_byte_level:
            pieces[token] = byte_level.bytes_of(text)
        else:
            pieces[token] = text_of_piece(text.removeprefix("##") if word_piece else text)
    for token in spec.get("added_tokens") or ():
        # Added tokens are written as they are, also in a byte-level vocabulary.
        pieces[token["id"]] = b"" if token.get("special") else token["content"].encode()
    return pieces


def text_of_piece(piece: str) -> bytes:
    """Return the text of a piece, whose spaces are marked, or the byte of one like <0x0A>."""
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(SPACE, " ").encode()
