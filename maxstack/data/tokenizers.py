"""Tokenizers: the bytes of a document to token ids and back, and how many bytes each id stands
for.

A subclass for each kind of file encodes a plain text; Tokenizer adds BOS and EOS, special tokens
that are spelt out, and long texts in parts (long_texts.py). Bits per byte need the bytes of each
id: the lengths of the vocabulary's pieces if they sum to the text, else the spans that the library
reports. Ids that a model was not trained with do silent harm, so a file is refused if the library
would number its tokens in another way.
"""

import contextlib
import copy
import functools
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxstack import strict_json
from maxstack.config import storage
from maxstack.data import byte_level, hub, tiktoken_files
from maxstack.data.documents import Document, Documents, Picture, Tokens
from maxstack.data.files import digest
from maxstack.data.growth import AT_ONCE, max_growth
from maxstack.data.long_texts import LONGEST, Encode, split_text, widest_token
from maxstack.data.pieces import BYTE, hugging_face_pieces, text_of_piece
from maxstack.errors import ConfigError, DataError, call_rust, quoted
from maxstack.schema.data import (
    BYTE_IDS,
    OF_FILES,
    Beyond,
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from maxstack.schema.data import Tokenizer as TokenizerConfig


class Tokenizer(ABC):
    """From a document's bytes to ids and back."""

    name: str
    """The file or kind, for messages."""
    vocab_size: int
    """Ids are below this."""
    pieces: list[bytes]
    """[vocab_size] UTF-8 bytes of text that each id stands for; none for special tokens."""
    token_bytes: np.ndarray
    """int32 [vocab_size]: their number."""
    fingerprint: str
    """A hash of everything that a document's ids depend on."""
    special: Mapping[int, str]
    """Tokens that `decode` leaves out, and how they are written."""
    named: Mapping[str, str] = {}
    """bos_token and eos_token of chat templates, as far as it knows them without other files."""
    grows: float = 1
    """The most bytes of text that encoding makes of one byte (growth.py)."""
    _bos: Sequence[int]
    _eos: Sequence[int]

    @property
    def bos(self) -> tuple[int, ...]:
        """Ids that begin a document."""
        return tuple(self._bos)

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a document."""
        return tuple(self._eos)

    def encode(self, document: bytes, longest: int = LONGEST) -> np.ndarray:
        """Return int32 ids, with the configured beginning and end, of a document of which `longest`
        bytes are tokenized at once. UnicodeDecodeError for other bytes than the UTF-8 that it
        needs."""
        return self.encode_parts([document], longest)

    def encode_parts(
        self, texts: Sequence[bytes | int | np.ndarray], longest: int = LONGEST
    ) -> np.ndarray:
        """Return int32 ids of texts, each encoded by itself, and of ids between them, with the
        configured beginning and end."""
        ids = [np.asarray(self._bos, np.int32)]
        for text in texts:
            if not isinstance(text, bytes):
                ids.append(np.atleast_1d(text).astype(np.int32))
                continue
            # Ids of parts are those of the whole text; memory is that of one part.
            for start, stop in self._parts(text, longest, self._text_ids):
                ids.append(np.asarray(self._text_ids(text[start:stop]), np.int32))
        return np.concatenate([*ids, np.asarray(self._eos, np.int32)])

    def without_ends(self, ids: np.ndarray) -> np.ndarray:
        """Return ids of a document without the configured beginning and end."""
        begin, end = len(self._bos), len(ids) - len(self._eos)
        # Prepared shards may come from a tokenizer with other ends; only ends that are there are
        # cut.
        if [*ids[:begin]] != [*self._bos]:
            begin = 0
        return ids[begin : end if [*ids[end:]] == [*self._eos] else len(ids)]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None if the vocabulary has none."""
        return next((i for i, text in self.special.items() if text == token), None)

    @abstractmethod
    def text_of(self, token: int) -> str:
        """Return how a token is written in the tokenizer's own file."""

    def ends(self, document: bytes, longest: int = LONGEST) -> np.ndarray:
        """Return int64 [N]: the byte of the document at which the text of each id of `encode` ends;
        they increase, and the last is the document's size."""
        ends = self.spans(document, longest)[:, 1]
        # White space that the tokenizer leaves out at the end counts for the last token, so that
        # all bytes of the document are counted.
        ends[len(self._bos) :][-1 - len(self._eos) :] = len(document)
        return np.maximum.accumulate(ends)

    def spans(self, document: bytes, longest: int = LONGEST) -> np.ndarray:
        """Return int64 [N, 2]: the bytes of the document from and up to which the text of each id
        of `encode` goes, without white space that the tokenizer leaves out; none for beginning and
        end."""
        spans = [np.zeros((len(self._bos), 2), np.int64)]
        for start, stop in self._parts(document, longest, self._text_ids):
            found = np.array(self._text_spans(document[start:stop]), np.int64)
            spans.append(start + found.reshape(-1, 2))
        return np.concatenate([*spans, np.full((len(self._eos), 2), len(document))])

    def bytes_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of bytes of text that each id stands for; 0 for ids beyond the
        vocabulary, which synthetic sources may have."""
        # Ids beyond the table are clipped to its last entry, which is 0.
        return self._sizes.take(ids, mode="clip")

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """`token_bytes`, with a 0 at the end for ids beyond the vocabulary."""
        return np.append(self.token_bytes, np.int32(0))

    @abstractmethod
    def decode(self, ids: np.ndarray) -> bytes:
        """Return the text of the ids, without special tokens."""

    @abstractmethod
    def raw(self, token: int) -> bytes | None:
        """Return bytes of a token that may hold a part of a character; None for a token of text,
        which may depend on the tokens before it."""

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [N], the bytes from and up to which the text of each goes, int64 [N,
        2]) of a text in which special tokens, where they are spelt out, stand for themselves;
        without beginning and end. The texts between them are encoded each by itself."""
        names = {name: token for token, name in self.special.items()}
        ids = [np.zeros(0, np.int32)]
        spans = [np.zeros((0, 2), np.int64)]
        done = 0
        for part in self._marks.split(text):
            encoded = part.encode()
            if part in names:
                ids.append(np.array([names[part]], np.int32))
                spans.append(np.array([(done, done + len(encoded))]))
            elif part:
                ids.append(np.asarray(self._text_ids(encoded), np.int32))
                spans.append(done + np.array(self._text_spans(encoded)).reshape(-1, 2))
            done += len(encoded)
        return np.concatenate(ids), np.concatenate(spans)

    def fewest(self, document: bytes) -> int:
        """Return a lower bound on the number of ids of `encode_by_parts`, without encoding."""
        return 0

    def encode_by_parts(
        self, document: bytes, longest: int = LONGEST
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids of `encode_marked`, of `longest` bytes at a time, and the byte up to which
        they go. Other threads run while the library works."""
        for start, stop in self._parts(document, longest, self._marked_ids):
            yield np.asarray(self._marked_ids(document[start:stop]), np.int32), stop

    def _parts(self, text: bytes, longest: int, encode: Encode) -> Iterator[tuple[int, int]]:
        # A text that the steps multiply is encoded in smaller parts, so memory keeps its bound.
        return split_text(text, min(longest, int(AT_ONCE / self.grows)), encode)

    def _marked_ids(self, document: bytes) -> Sequence[int] | np.ndarray:
        names = {name: token for token, name in self.special.items()}
        ids: list[int] = []
        for part in self._marks.split(document.decode()):
            ids.extend([names[part]] if part in names else self._text_ids(part.encode()))
        return ids

    @functools.cached_property
    def _marks(self) -> re.Pattern[str]:
        """Special tokens that are spelt out, of which the longest counts."""
        # A regular expression takes the first alternative that matches, not the longest.
        names = sorted(self.special.values(), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    @abstractmethod
    def _text_ids(self, document: bytes) -> Sequence[int] | np.ndarray:
        """Return ids without beginning and end."""

    @abstractmethod
    def _text_spans(self, document: bytes) -> Sequence[tuple[int, int]] | np.ndarray:
        """Return the bytes from and up to which the text of each of these ids goes, as the library
        says."""


class Bytes(Tokenizer):
    """Each byte is an id; 256, which chat templates write as <|endoftext|>, begins and ends a
    document."""

    def __init__(self, cfg: BytesTokenizer):
        self.name, self.vocab_size = "bytes", BYTE_IDS
        self.pieces = [bytes([byte]) for byte in range(256)] + [b""]
        self.token_bytes = _sizes(self.pieces)
        self.fingerprint = digest(f"bytes {cfg.bos} {cfg.eos}".encode())
        self._bos, self._eos = [256] * cfg.bos, [256] * cfg.eos
        self.special = {256: byte_level.END}
        self.named = {"bos_token": byte_level.END, "eos_token": byte_level.END}

    def decode(self, ids: np.ndarray) -> bytes:
        return ids[ids < 256].astype(np.uint8).tobytes()

    def raw(self, token: int) -> bytes:
        return self.pieces[token]

    def fewest(self, document: bytes) -> int:
        # Only this token makes one id of several bytes.
        return len(document) // len(byte_level.END)

    def text_of(self, token: int) -> str:
        return self.special.get(token) or self.pieces[token].decode("latin-1")

    def _text_ids(self, document: bytes) -> np.ndarray:
        return np.frombuffer(document, np.uint8)

    def _text_spans(self, document: bytes) -> np.ndarray:
        return np.arange(len(document))[:, None] + np.arange(2)


class SentencePiece(Tokenizer):
    """A SentencePiece model (Kudo and Richardson 2018, arXiv:1808.06226)."""

    def __init__(self, cfg: SentencePieceTokenizer):
        import sentencepiece

        model = _read(cfg.path)
        try:
            if not model:
                raise ValueError("an empty file, which the library takes for none")
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError, TypeError) as error:
            raise DataError(
                f"{cfg.path}: not a SentencePiece model; `maxstack data tokenizer` makes one"
            ) from error
        self.name, self.vocab_size = cfg.path, self._model.vocab_size()
        self.fingerprint = digest(model + f" {cfg.bos} {cfg.eos}".encode())
        self._bos = self._special("bos", cfg.bos, self._model.bos_id())
        self._eos = self._special("eos", cfg.eos, self._model.eos_id())
        self.pieces = [self._piece(token) for token in range(self.vocab_size)]
        self.token_bytes = _sizes(self.pieces)
        ids = filter(self._model.is_control, range(self.vocab_size))
        self.special = {i: self._model.id_to_piece(i) for i in ids}
        known = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}
        self.named = {key: self.special[i] for key, i in known.items() if i in self.special}

    def id_of(self, token: str) -> int | None:
        # For an unknown piece the library gives the id of the unknown token.
        number = self._model.piece_to_id(token)
        return number if self._model.id_to_piece(number) == token else None

    def text_of(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def decode(self, ids: np.ndarray) -> bytes:
        return self._model.decode([int(i) for i in ids]).encode()

    def raw(self, token: int) -> bytes | None:
        return self.pieces[token] if self._model.is_byte(token) else None

    def _text_ids(self, document: bytes) -> list[int]:
        return self._model.encode(document.decode())

    def _text_spans(self, document: bytes) -> list[tuple[int, int]]:
        return self._model.encode(document, return_type="offset_mapping")["offsets"]

    def _special(self, key: str, wanted: bool, token: int) -> list[int]:
        if wanted and token < 0:
            raise DataError(
                f"{self.name}: this model has no {key.upper()} token; set "
                f"data.tokenizer.{key}=false"
            )
        return [token] if wanted else []

    def _piece(self, token: int) -> bytes:
        model = self._model
        if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
            return b""
        return text_of_piece(model.id_to_piece(token))


class HuggingFace(Tokenizer):
    """A tokenizer.json file of the Hugging Face tokenizers library, vocab.json with merges.txt, or
    a file of tiktoken.

    Special tokens spelt out in a document are plain text.
    """

    def __init__(self, path: str):
        """Read a tokenizer without BOS and EOS."""
        import tokenizers

        # The library's threads gain nothing for a document at a time, and warn where one forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        text, files = _read(path), "not a tokenizer.json file"
        folder, name = os.path.split(hub.resolve_file(path))
        make: Callable[[Path], bytes] | None = None
        if name == byte_level.VOCAB:
            files = f"not a {name} with {byte_level.MERGES} beside it"
            make = byte_level.tokenizer_json
        elif name in tiktoken_files.FILES:
            files = "not a file of tiktoken"
            make = tiktoken_files.tokenizer_json
        try:
            if make:
                text = make(hub.model_folder(folder, weights=False) / name)
            spec = strict_json.parse_object(text, path)
            self._model: Any = call_rust(path, tokenizers.Tokenizer.from_buffer, text)
        except DataError:
            raise
        except Exception as error:  # the library's own, as it makes one of other files
            raise DataError(f"{path}: {files}: {error}") from error
        self.grows = max_growth(self._model, path)
        # A tokenizer.json may carry the settings of its last use, and would cut documents in
        # silence.
        self._model.no_truncation()
        self._model.no_padding()
        # Documents are data: a special token that somebody spelt out in one must not become that
        # token.
        self._model.encode_special_tokens = True
        ids = self._model.get_vocab(with_added_tokens=True)
        for token in spec.get("added_tokens") or ():
            # The library renumbers added tokens without a word; the model's embeddings have the
            # file's numbers.
            if ids[token["content"]] != token["id"]:
                raise DataError(
                    f"{path}: added token {token['content']!r} has id {token['id']}, "
                    "but the tokenizers library, which numbers such tokens on from the "
                    f"vocabulary, makes it {ids[token['content']]}; give it that id, "
                    "or fill the gap"
                )
        self.name, self.vocab_size = path, _size(path, ids)
        self._hash = hashlib.blake2b(text, digest_size=16)
        self._post_processor = spec.get("post_processor")
        self.pieces = hugging_face_pieces(spec, ids, self.vocab_size)
        self.token_bytes = _sizes(self.pieces)
        self._widest, self._lost = widest_token(spec)
        added = self._model.get_added_tokens_decoder().items()
        self.special = {i: token.content for i, token in added if token.special}
        decoder = spec.get("decoder") or {}
        kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
        # Only with ByteLevel alone does a token's text stand for its bytes whatever comes before
        # it.
        self._byte_level, self._byte_fallback = kinds == {"ByteLevel"}, "ByteFallback" in kinds
        # Encodes special tokens as such where a text spells them out; it shares the vocabulary.
        self._marked: Any = tokenizers.Tokenizer(self._model.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (own := getattr(self._model, part)) is not None:
                setattr(self._marked, part, own)
        self._marked.add_tokens([token for _, token in sorted(added)])

    def with_ends(self, cfg: HuggingFaceTokenizer) -> "HuggingFace":
        """Return this tokenizer with the BOS and EOS of a configuration."""
        ends = {"bos": cfg.bos, "eos": cfg.eos}
        # The hub is asked only if its files decide.
        if OF_FILES in ends.values():
            folder = os.path.dirname(hub.resolve_file(cfg.path)) or "."
            beside = hub.model_folder(folder, weights=False)
            named = byte_level.read_ends(beside, self._post_processor)
            ends = {key: named[key] if said == OF_FILES else said for key, said in ends.items()}
        made = copy.copy(self)
        # With the tokens that were found, since the files that name them may change.
        hashed = self._hash.copy()
        hashed.update(f" {ends['bos']} {ends['eos']}".encode())
        made.fingerprint = hashed.hexdigest()
        made._bos, made._eos = (self._special(key, token) for key, token in ends.items())
        return made

    def id_of(self, token: str) -> int | None:
        return self._model.token_to_id(token)

    def fewest(self, document: bytes) -> int:
        if self._widest is None:
            return 0
        # Bytes that may get no id are taken out first, or the bound would be too high.
        return -(-len(document.translate(None, self._lost)) // self._widest)

    def text_of(self, token: int) -> str:
        return self._model.id_to_token(token)

    def decode(self, ids: np.ndarray) -> bytes:
        numbers = [int(i) for i in ids]
        return call_rust(self.name, self._model.decode, numbers, skip_special_tokens=True).encode()

    def raw(self, token: int) -> bytes | None:
        piece = self._model.id_to_token(token) or ""
        if self._byte_level:
            return byte_level.bytes_of(piece)
        byte = BYTE.fullmatch(piece) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else None

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        document = text.encode()
        ids = []
        spans = []
        for start, stop in self._parts(document, len(document), self._marked_ids):
            part = document[start:stop]
            encode = self._marked.encode
            encoded = call_rust(self.name, encode, part.decode(), add_special_tokens=False)
            ids.append(np.array(encoded.ids, np.int32))
            spans.append(start + _in_bytes(encoded.offsets, part))
        return np.concatenate(ids), np.concatenate(spans)

    def _marked_ids(self, document: bytes) -> list[int]:
        encode = self._marked.encode_batch_fast
        return call_rust(self.name, encode, [document.decode()], add_special_tokens=False)[0].ids

    def _text_ids(self, document: bytes) -> list[int]:
        text = document.decode()  # without offsets, which cost a fifth of the time
        # the library lets other threads run while it encodes a batch, and not a text
        encode = self._model.encode_batch_fast
        return call_rust(self.name, encode, [text], add_special_tokens=False)[0].ids

    def _text_spans(self, document: bytes) -> np.ndarray:
        text = document.decode()
        encoded = call_rust(self.name, self._model.encode, text, add_special_tokens=False)
        return _in_bytes(encoded.offsets, document)

    def _special(self, key: str, token: str | None) -> list[int]:
        if token is None:
            return []
        number = self._model.token_to_id(token)
        if number is None:
            special = self._model.get_added_tokens_decoder().values()
            raise DataError(
                f"{self.name}: no token {quoted(token)} for data.tokenizer.{key}; its special "
                f"tokens are {', '.join(repr(added.content) for added in special) or 'none'}"
            )
        return [number]


@functools.lru_cache(maxsize=8)
def open_tokenizer(cfg: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer of a configuration, its file read once a process. DataError if the file
    is missing or damaged."""
    if isinstance(cfg, BytesTokenizer):
        return Bytes(cfg)
    if isinstance(cfg, SentencePieceTokenizer):
        return SentencePiece(cfg)
    return HuggingFace(cfg.path).with_ends(cfg)


def open_prompt_tokenizer(cfg: TokenizerConfig, bos: bool = True, eos: bool = False) -> Tokenizer:
    """Return the tokenizer of a configuration without EOS, for prompts and texts that are scored.
    `bos` and `eos`: whether to keep those of the configuration; a completion has EOS, no BOS."""
    # The kinds say "no such token" in two ways: a name or None, and a flag.
    none = None if cfg.kind == "huggingface" else False
    wanted = {"bos": bos, "eos": eos}
    other = cfg.model_copy(update={k: none for k, keep in wanted.items() if not keep})
    if isinstance(other, HuggingFaceTokenizer):
        opened = open_tokenizer(cfg)
        assert isinstance(opened, HuggingFace)
        # Vocabularies are large, and this one is read.
        return opened.with_ends(other)
    return open_tokenizer(other)


def tokenize(
    documents: Documents,
    index: int,
    tokenizer: Tokenizer,
    longest: int = LONGEST,
    beyond: Beyond = "split",
) -> np.ndarray:
    """Return the int32 ids of a document of text or tokens. DataError, naming its file and record,
    if it cannot be read, or is a text of more than `longest` bytes and is to be refused."""
    with name_errors(documents, index):
        document = read_document(documents, index, longest, beyond)
        return _encode(document, tokenizer, longest)


def tokenize_with_sizes(
    documents: Documents,
    index: int,
    tokenizer: Tokenizer,
    longest: int = LONGEST,
    beyond: Beyond = "split",
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a document as `tokenize` does, and how many bytes of its text each stands
    for.

    float32 [N]: 0 for the beginning and the end, their sum the text's size; NaN where the tokens
    were stored without sizes. These are the lengths of the vocabulary's pieces if they sum to the
    size of the text; else (normalized text, unknown characters) each id counts from the end of the
    id before it to its own.
    """

    with name_errors(documents, index):
        document = read_document(documents, index, longest, beyond)
        ids = _encode(document, tokenizer, longest)
        # Lengths of pieces come from a table; spans would encode the text a second time with
        # offsets.
        sizes = tokenizer.bytes_of(ids)
        if isinstance(document, bytes) and sizes.sum() != len(document):
            sizes = np.diff(tokenizer.ends(document, longest), prepend=0)
        sizes = sizes.astype(np.float32)
        if isinstance(document, Tokens) and document.sizes is not None:
            sizes[document.sizes[:, 0]] = document.sizes[:, 1]
        # Bits per byte of these would be of another text, so no figure is given rather than a wrong
        # one.
        elif isinstance(document, Tokens) and not isinstance(tokenizer, Bytes):
            sizes[:] = np.nan
        return ids, sizes


def read_document(documents: Documents, index: int, longest: int, beyond: Beyond) -> Document:
    """Return a document. DataError, naming its file and record, if it is a text of more than
    `longest` bytes and is to be refused."""
    document = documents[index]
    if beyond == "refuse" and isinstance(document, bytes) and len(document) > longest:
        raise DataError(
            f"{documents.where(index)}: a text of {len(document):,} bytes, and data.beyond is "
            f"refuse for more than data.longest={longest}; raise it, set data.beyond=split, or "
            "leave the document out"
        )
    return document


def _encode(document: Document, tokenizer: Tokenizer, longest: int) -> np.ndarray:
    if isinstance(document, bytes):
        return tokenizer.encode(document, longest)
    if isinstance(document, Picture):
        raise DataError("is a picture, and text is wanted")
    return document.ids if isinstance(document, Tokens) else document


@contextlib.contextmanager
def name_errors(documents: Documents, index: int) -> Iterator[None]:
    """Raise any error in the block as a DataError with the document's file and record, except for
    ConfigError, which does not belong to one document."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(
            f"{documents.where(index)}: cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_fits(tokenizer: Tokenizer, vocab: int) -> None:
    """DataError if a tokenizer has ids beyond a model's `vocab` embedding rows."""
    if tokenizer.vocab_size > vocab:
        raise DataError(
            f"data.tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but "
            f"model.vocab={vocab}; set model.vocab to at least {tokenizer.vocab_size}"
        )


def _read(path: str) -> bytes:
    file = os.path.expanduser(hub.resolve_file(path))
    try:
        return storage.read_whole(file)
    except OSError as error:
        start = "" if storage.is_url(path) else f" (relative paths start at {os.getcwd()})"
        raise DataError(
            f"{path}: the tokenizer file cannot be read: {error.strerror}{start}"
        ) from error


def _size(path: str, ids: Mapping[str, int]) -> int:
    """Return one more than the largest id. DataError if there is none, or the tables that ids need
    would be large."""
    size = max(ids.values(), default=-1) + 1
    if not 0 < size <= byte_level.MOST_IDS:
        raise DataError(
            f"{path}: its ids go up to {size - 1:,}, of {len(ids):,} tokens; a vocabulary has 1 "
            f"to {byte_level.MOST_IDS:,} ids"
        )
    return size


def _in_bytes(characters: list[tuple[int, int]], document: bytes) -> np.ndarray:
    """Return spans of characters of a UTF-8 text as spans of bytes, int64 [N, 2]."""
    # The library counts characters; every byte but a continuation byte of UTF-8 begins one.
    continued = np.frombuffer(document, np.uint8) & 0xC0 == 0x80
    begins = np.append(np.flatnonzero(~continued), len(document))
    return begins[np.array(characters, np.int64).reshape(-1, 2)]


def _sizes(pieces: list[bytes]) -> np.ndarray:
    return np.array(list(map(len, pieces)), np.int32)
