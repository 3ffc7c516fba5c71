"""Text of answers, for each kind of tokenizer that can be configured."""

import functools
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import ALPHABET, learn_pieces
from tokenizers import AddedToken, decoders
from tokenizers.models import BPE, WordPiece

from maxstack.data.tokenizers import open_tokenizer
from maxstack.data.vocabulary import train_vocabulary
from maxstack.inference.request import Sampling, Token
from maxstack.inference.server.choices import Choice
from maxstack.inference.text import TextStream
from maxstack.schema.data import (
    BytesTokenizer,
    DataConfig,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextSource,
)

WORDS = ["a", "b", "▁", "▁a", "▁▁", "▁hi", "é", ".", "\ufffd"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
STEPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA = decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)])
GEMMA = decoders.Sequence(STEPS)
NAMES = [
    "bytes",
    "sentencepiece",
    "sentencepiece_prefix",
    "sentencepiece_spaces",
    "byte_level",
    "llama",
    "gemma",
    "metaspace",
    "word_piece",
    "bpe",
]
FALLBACK = {"llama", "gemma"}
CORPUS = "if the world is x then  the whole\n" * 40


def vocabulary(name):
    """Model and decoder of a tokenizer.json."""
    pieces = [*WORDS, *BYTE_TOKENS]
    if name == "byte_level":
        pieces = [*ALPHABET, "Ġhi", "ðŁĺ", "ä¸Ń"]
        return BPE(dict(zip(pieces, range(999), strict=False)), []), decoders.ByteLevel()
    if name == "word_piece":
        pieces = ["[UNK]", "hi", "##é", ".", "do", "##n't", "a"]
        return WordPiece(dict(zip(pieces, range(9), strict=False))), decoders.WordPiece()
    if name == "bpe":
        pieces = ["a", "b</w>", "</w>", "é", "a</w>"]
    ids = dict(zip(pieces, range(999), strict=False))
    kinds = {
        "llama": LLAMA,
        "gemma": GEMMA,
        "metaspace": decoders.Metaspace(),
        "bpe": decoders.BPEDecoder(),
    }
    return BPE(ids, []), kinds[name]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")

    @functools.cache
    def of(name):
        if name == "bytes":
            return open_tokenizer(BytesTokenizer(kind="bytes"))
        if name.startswith("sentencepiece"):
            path = str(folder / f"{name}.model")
            if name == "sentencepiece":
                (folder / "corpus.txt").write_text(CORPUS)
                source = TextSource(kind="text", files=[str(folder / "corpus.txt")])
                train_vocabulary(DataConfig(sources=[source]), path, vocab=300)
            else:
                learn_pieces(
                    folder / name,
                    CORPUS.splitlines(),
                    300,
                    byte_fallback=True,
                    remove_extra_whitespaces=name != "sentencepiece_spaces",
                    user_defined_symbols=["<tool>", "\u2581", "\u2581\u2581"],
                )
            return open_tokenizer(
                SentencePieceTokenizer(kind="sentencepiece", path=path, eos=False)
            )
        model, decoder = vocabulary(name)
        made = tokenizers.Tokenizer(model)
        made.decoder = decoder
        made.add_special_tokens(["<s>", "</s>"])
        made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("x y", special=False)])
        made.save(path := str(folder / f"{name}.json"))
        return open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=path, bos="<s>"))

    return of


def text_of(tokenizer, ids):
    return tokenizer.decode(np.array(ids, np.int32)).decode(errors="replace")


def pieces(tokenizer, prompt, answer, **settings):
    stream = TextStream(tokenizer, prompt, **settings)
    return [*map(stream.feed, answer), stream.flush()]


def has_invalid_run(tokenizer, ids):
    """A run of byte tokens is not UTF-8; the library then replaces all of it."""
    bytes_of = [tokenizer.raw(i) for i in ids if i not in tokenizer.special]
    runs, run = [], b""
    for raw in [*bytes_of, None]:
        run += raw or b""
        if raw is None:
            runs.append(run)
            run = b""
    return any("\ufffd" in run.decode(errors="replace") for run in runs)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_the_pieces_are_the_tokenizers_text_after_the_prompts(opened, name, data):
    tokenizer = opened(name)
    token = st.integers(0, tokenizer.vocab_size - 1)
    run = st.lists(token, max_size=3) | st.text(max_size=3).map(
        lambda text: [*map(int, tokenizer.encode(text.encode())[1:])]
    )
    runs = st.lists(run, max_size=6).map(lambda runs: sum(runs, []))
    prompt, answer = data.draw(runs), data.draw(runs)
    whole = text_of(tokenizer, [i for i in prompt + answer if i not in tokenizer.special])
    if name in FALLBACK and has_invalid_run(tokenizer, prompt + answer):
        return
    before = TextStream(tokenizer)
    given_before = "".join(map(before.feed, prompt))
    joined = given_before + "".join(pieces(tokenizer, prompt, answer))
    if name.startswith("sentencepiece"):  # which counts each byte of an unfinished character
        joined, whole = (re.sub("\ufffd+", "\ufffd", text) for text in (joined, whole))
    assert joined == whole


def test_the_text_comes_token_by_token(opened):
    tokenizer = opened("llama")
    ids = [tokenizer._model.token_to_id(piece) for piece in ("▁hi", "▁a", "<0xC3>", "<0xA9>", "b")]
    assert pieces(tokenizer, [], ids) == ["hi", " a", "", "é", "b", ""]
    assert pieces(tokenizer, ids[:1], ids[:1]) == [" hi", ""]


def offsets(tokenizer, prompt, answer, echo=None, **settings):
    stream = TextStream(tokenizer, prompt, **settings)
    choice = Choice(tokenizer, prompt, Sampling(max_tokens=9), stream, echo=echo)
    tokens = [*(prompt if echo is not None else []), *answer]
    return choice.completion_logprobs([*map(Token, tokens)])["text_offset"]


def test_offsets_count_in_the_text_that_is_returned(opened):
    """A special token that it hides, the first space, and what completes a character."""
    tokenizer = opened("llama")
    pieces = ("<s>", "▁hi", "▁a", "<0xC3>", "<0xA9>", "b")
    bos, hi, a, first, second, b = map(tokenizer._model.token_to_id, pieces)
    assert offsets(tokenizer, [bos, hi], [a, b], echo="hi") == [0, 0, 2, 4]
    assert offsets(tokenizer, [bos, hi], [a, b], echo="<s>hi") == [0, 3, 5, 7]
    assert offsets(tokenizer, [bos, hi], [a, first, second, b]) == [0, 2, 2, 3]
    assert offsets(tokenizer, [hi], [bos, a, b], shown=[bos]) == [0, 3, 5]
    assert offsets(tokenizer, [hi], [bos, a, b]) == [0, 0, 2]


def test_an_unfinished_character_at_the_end_is_replaced(opened):
    assert pieces(opened("bytes"), [], [*"é中".encode()][:4]) == ["", "é", "", "", "\ufffd"]


def test_valid_bytes_beside_invalid_ones_stay(opened):
    tokenizer = opened("llama")
    ids = [tokenizer._model.token_to_id(f"<0x{byte:02X}>") for byte in b"A\xff\xc3\xa9"]
    assert "".join(pieces(tokenizer, [], ids)) == "A\ufffdé"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_have_no_text_unless_they_are_shown(opened, name):
    tokenizer = opened(name)
    for token, written in tokenizer.special.items():
        assert pieces(tokenizer, [], [token]) == ["", ""]
        assert pieces(tokenizer, [], [token], shown=[token]) == [written, ""]
    assert tokenizer.special


@pytest.mark.parametrize("name", NAMES)
def test_tokens_beyond_the_vocabulary_have_no_text(opened, name):
    tokenizer = opened(name)
    assert pieces(tokenizer, [tokenizer.vocab_size], [tokenizer.vocab_size + 7]) == ["", ""]


def test_what_may_begin_a_stop_string_is_held_back(opened):
    stops = ["\n\nUser", "END"]
    given_out = pieces(opened("bytes"), [], b"a\n\nUE ENX", stops=stops)
    assert given_out == ["a", "", "", "", "\n\nU", "E ", "", "", "ENX", ""]
    assert pieces(opened("bytes"), [], b"aEN", stops=stops) == ["a", "", "", "EN"]


@pytest.mark.parametrize("include, text", [(False, "ab"), (True, "abSTOP")])
def test_a_stop_string_ends_the_text(opened, include, text):
    stream = TextStream(opened("bytes"), b"STOP", ["STOP"], include_stop=include)
    assert "".join([*map(stream.feed, b"abSTOPcdSTOP"), stream.flush()]) == text
    assert stream.stopped == "STOP"


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12)),
    include=st.booleans(),
)
@settings(deadline=None)
def test_the_text_before_a_stop_string_does_not_depend_on_the_tokens(
    opened, text, stops, cuts, include
):
    """Tokens are parts of the text, as a vocabulary of all texts would have them."""
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    expected = text[: ends[0]] if ends else text
    if ends and not include:
        expected = expected[: -max(len(stop) for stop in stops if expected.endswith(stop))]
    stream = TextStream(opened("bytes"), (), stops, include)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    joined = "".join(stream._until_stop(part, last=False) for part in parts)
    assert joined + stream.flush() == expected


def test_a_token_costs_the_same_in_a_long_answer(opened):
    tokenizer = opened("llama")
    sizes = []
    stream = TextStream(tokenizer)
    decode = stream._decode
    stream._decode = lambda tokens: sizes.append(len(tokens)) or decode(tokens)
    for token in range(tokenizer.vocab_size):
        stream.feed(token)
    for _ in range(50):
        stream.feed(tokenizer._model.token_to_id("▁"))
    assert max(sizes) <= 3
