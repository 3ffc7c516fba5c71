"""tokenizer.json and its companions from the metadata of a GGUF file.

The metadata hold the pieces, their kinds, merges or scores, and the name of the pattern by which a
byte-level vocabulary cuts a text into words; what the name stands for is written down here, as in
llama.cpp. A vocabulary of SentencePiece has scores in place of merges: a pair is merged where the
result is a piece, the one of the highest score first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from maxstack.data.byte_level import QWEN2_PATTERN
from maxstack.data.gguf.file import GgufFile
from maxstack.data.pieces import SPACE
from maxstack.errors import ConfigError, DataError, quoted

V = TypeVar("V")
UNKNOWN, CONTROL = 2, 3
USER_DEFINED = 4
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)
"""Tokens that end an answer wherever a vocabulary has them as control tokens, as in llama.cpp."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_START, _MARKS = r"[^\r\n\p{L}\p{N}]?", r"\p{Lm}\p{Lo}\p{M}"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_MARKS}]", rf"[\p{{Ll}}{_MARKS}]"
# A word ends before a capital that follows small letters.
_CASED = rf"{_START}{_UPPER}*{_LOWER}+{{end}}|{_START}{_UPPER}+{_LOWER}*{{end}}"
_SLASH = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")
_TEKKEN = _CASED.replace("{end}", "") + rf"|\p{{N}}|{_SLASH}"
_GPT4O = _CASED.replace("{end}", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}|{_SLASH}"


class Split(NamedTuple):
    """The division of a text into words."""

    pattern: str | None = None
    """A word's; None: GPT-2's."""
    digits: bool = False
    """Digits are words of their own."""
    whole: bool = False
    """A word that is a piece is not merged from others."""
    bos: bool = False
    """BOS begins a text where the file does not say it."""


_OF_LLAMA3 = Split(_LLAMA3, whole=True, bos=True)
SPLITS = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Split(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(_LLAMA3)),
    # Without the composed form of texts that Qwen's own files ask for: no reader of GGUF has it.
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), Split(QWEN2_PATTERN)),
    "tekken": Split(_TEKKEN, whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split(_GPT4O, whole=True)),
}
"""By tokenizer.ggml.pre."""


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by name. ConfigError
    for a tokenizer that is not supported, DataError for a damaged one."""
    model = file.value("tokenizer.ggml.model", str)
    if model is None or model not in MODELS:
        raise ConfigError(f"tokenizer.ggml.model={quoted(model)} is none of {', '.join(MODELS)}")
    vocab = _Vocab(file)
    made, adds = MODELS[model](vocab)
    adds = bool(vocab.get("add_bos_token", bool, adds))
    named = vocab.named(model)
    texts = {f"{name}_token": vocab.tokens[number] for name, number in named.items()}
    bos = named.get("bos")
    if bos is not None and adds:
        made["post_processor"] = _bos_first(texts["bos_token"], bos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **texts,
        "add_bos_token": bool(adds and bos is not None),
        "clean_up_tokenization_spaces": False,
        **_template(file),
    }
    ends = [named["eos"]] if "eos" in named else []
    ends += [number for key in ("eot", "eom") if (number := vocab.id(key)) is not None]
    ends += [i for i, kind, text in vocab.added() if text in ENDS]
    ends = [*dict.fromkeys(ends)]
    generation = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    ids = {f"{name}_token_id": named[name] for name in ("bos", "pad") if name in named}
    return {
        "tokenizer.json": made,
        "tokenizer_config.json": config,
        "generation_config.json": ids | generation,
    }


class _Vocab:
    """The pieces of a file."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.tokens: Sequence[str] = self._texts("tokens")
        kinds = self.get("token_type", np.ndarray)
        self.kinds = [1] * len(self.tokens) if kinds is None else kinds.tolist()
        if len(self.kinds) != len(self.tokens):
            raise self.damage("token_type", f"{len(self.kinds)} kinds of {len(self.tokens)} tokens")

    def get(self, key: str, kind: type[V], default: V | None = None) -> V | None:
        return self.file.value(f"tokenizer.ggml.{key}", kind, default)

    def id(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token; None where there is none."""
        number = self.get(f"{name}_token_id", int, default)
        if number is None or 0 <= number < len(self.tokens):
            return number
        raise self.damage(f"{name}_token_id", f"{quoted(number)} is no id of {len(self.tokens)}")

    def named(self, model: str) -> dict[str, int]:
        """Return the special tokens that have a name."""
        usual = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {name: self.id(key, usual.get(name)) for name, key in keys.items()}
        return {name: number for name, number in found.items() if number is not None}

    def added(self) -> Iterator[tuple[int, int, str]]:
        """Yield id, kind and text of the tokens that are found in a text before it is cut."""
        for number, (kind, text) in enumerate(zip(self.kinds, self.tokens, strict=True)):
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text:
                yield number, kind, text

    def added_tokens(self, rstrip: bool = False) -> list[dict[str, Any]]:
        """Return added_tokens of tokenizer.json."""
        settings = {"single_word": False, "lstrip": False, "normalized": False}
        return [
            {
                "id": number,
                "content": text,
                "rstrip": rstrip and text not in ("<unk>", "<s>", "<|endoftext|>"),
                "special": kind != USER_DEFINED,
                **settings,
            }
            for number, kind, text in self.added()
        ]

    def merges(self) -> list[tuple[str, str]]:
        """Return pairs of pieces, the first to be merged first."""
        if (merges := self.get("merges", list)) is None:
            return merges_of({text: i for i, text in enumerate(self.tokens)}, self.scores())
        pairs = []
        for text in merges:
            # A piece may begin with a space.
            first, _, last = text[1:].partition(" ")
            pairs.append((text[:1] + first, last))
        return pairs

    def scores(self) -> list[float]:
        scores = self.get("scores", np.ndarray)
        if scores is None or len(scores) != len(self.tokens):
            raise self.damage("scores", "must be one a token")
        return scores.tolist()

    def damage(self, key: str, why: str) -> DataError:
        return DataError(f"{self.file.path}: tokenizer.ggml.{key}: {why}")

    def _texts(self, key: str) -> list[str]:
        if not (texts := self.get(key, list)):
            raise self.damage(key, "is absent")
        return texts


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all ways to cut a piece into two others, in the order of the scores of the pieces that
    they make, the highest first."""
    pairs = [
        (-scores[number], number, pieces[piece[:at]], (piece[:at], piece[at:]))
        for piece, number in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    return [pair for *_, pair in sorted(pairs)]


def _byte_level(vocab: _Vocab) -> tuple[dict[str, Any], bool]:
    pre = vocab.get("pre", str)
    if (split := SPLITS.get(pre or "")) is None:
        raise ConfigError(
            f"tokenizer.ggml.pre={quoted(pre)}, which says how a text is cut into words, is not "
            f"known; known are {', '.join(SPLITS)}"
        )
    if not vocab.get("merges", list):
        raise vocab.damage("merges", "is absent")
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": split.pattern is None}
    steps: list[dict[str, Any]] = [{"type": "ByteLevel", **level}]
    if split.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if split.pattern:
        regex = {"pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False}
        steps.insert(0, {"type": "Split", **regex})
    made = _tokenizer(vocab, {"ignore_merges": split.whole})
    made |= {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", **level},
    }
    return made, split.bos


def _sentencepiece(vocab: _Vocab) -> tuple[dict[str, Any], bool]:
    unknown, prefix = vocab.id("unknown", 0), vocab.get("add_space_prefix", bool, True)
    settings = {
        "unk_token": vocab.tokens[unknown or 0],
        "fuse_unk": True,
        "byte_fallback": "<0x0A>" in vocab.tokens,
    }
    # llama.cpp, too, knows it by the model's name alone.
    name = (vocab.file.value("general.name", str) or "").lower()
    made = _tokenizer(vocab, settings, "phi-3" in name or "phi3" in name)
    to_piece = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_text = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]
    made["normalizer"] = {"type": "Sequence", "normalizers": [*before, to_piece]}
    made["decoder"] = {"type": "Sequence", "decoders": decoders}
    return made, True


MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}
"""By tokenizer.ggml.model."""


def _tokenizer(vocab: _Vocab, settings: Mapping[str, Any], rstrip: bool = False) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocab.added_tokens(rstrip),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(vocab.tokens)},
            "merges": vocab.merges(),
            **settings,
        },
    }


def _bos_first(text: str, number: int) -> dict[str, Any]:
    bos, one, two = (
        {kind: {"id": name, "type_id": type_id}}
        for kind, name, type_id in (
            ("SpecialToken", text, 0),
            ("Sequence", "A", 0),
            ("Sequence", "B", 1),
        )
    )
    return {
        "type": "TemplateProcessing",
        "single": [bos, one],
        "pair": [bos, one, two],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }


def _template(file: GgufFile) -> dict[str, Any]:
    """Return chat_template of tokenizer_config.json, with further ones by name."""
    key = "tokenizer.chat_template"
    default = file.value(key, str)
    further = {
        name.removeprefix(f"{key}."): file.value(name, str)
        for name in file.metadata
        if name.startswith(f"{key}.")
    }
    if not further:
        return {"chat_template": default} if default else {}
    templates = ({"default": default} if default else {}) | further
    return {"chat_template": [{"name": n, "template": t} for n, t in templates.items()]}
