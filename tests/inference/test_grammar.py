"""Grammars over real tokenizers: whatever is drawn under the masks follows them."""

import json
import re
import sys
import time

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizer_files import learn_byte_level, of_words

from maxstack.data.tokenizers import open_tokenizer
from maxstack.data.vocabulary import train_vocabulary
from maxstack.errors import ConfigError, installing
from maxstack.inference.grammar import Answer, Compiler, Vocabulary
from maxstack.inference.grammar_sandbox import GrammarSandbox
from maxstack.schema.data import (
    BytesTokenizer,
    DataConfig,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextSource,
)

NAMES = ["bytes", "byte_level", "metaspace", "sentencepiece"]
CORPUS = '{"name": "Ada the first", "age": 36, "tags": ["red", "gr\u00fcn"]} 12345\n' * 30
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": -3, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "gr\u00fcn", None]}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "more": {"anyOf": [{"$ref": "#"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """Tokenizer, stop token and compiler by name; each has ids that the model's vocabulary pads."""
    folder = tmp_path_factory.mktemp("grammar")
    (folder / "corpus.txt").write_text(CORPUS)
    sources = [TextSource(kind="text", files=[str(folder / "corpus.txt")])]
    train_vocabulary(DataConfig(sources=sources), str(folder / "sp.model"), vocab=320)

    learn_byte_level([CORPUS], 330, ["</s>"]).save(str(folder / "byte_level.json"))

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *'abcdenrtAT0123456789{}[]:,"', '{"', "na", "\u2581t", '":']
    merges = [("{", '"'), ("n", "a"), ("\u2581", "t"), ('"', ":")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    metaspace = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    metaspace.add_special_tokens(["<unk>", "</s>"])
    metaspace.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=False)
    metaspace.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    metaspace.save(str(folder / "metaspace.json"))

    def hugging_face(name):
        path = str(folder / f"{name}.json")
        return open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=path, eos="</s>"))

    made = {
        "bytes": open_tokenizer(BytesTokenizer(kind="bytes", eos=True)),
        "byte_level": hugging_face("byte_level"),
        "metaspace": hugging_face("metaspace"),
        "sentencepiece": open_tokenizer(
            SentencePieceTokenizer(kind="sentencepiece", path=str(folder / "sp.model"), eos=True)
        ),
    }
    return {name: (tokenizer, *compiler_of(tokenizer)) for name, tokenizer in made.items()}


def compiler_of(tokenizer):
    stop = int(tokenizer.encode(b"a")[-1])
    return stop, Compiler(Vocabulary.of(tokenizer, [stop], tokenizer.vocab_size + 70))


def allowed(matcher):
    return tokens_of(matcher.mask())


def tokens_of(mask):
    assert mask.dtype == np.int32
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def count_allowed(matcher, tokens):
    """How many of these tokens, in order, may follow."""
    return matcher._state.validate_tokens(tokens)


def drawn(matcher, stop, rng):
    """Ids of an answer, each of the allowed ones as likely, without its stop token."""
    ids = []
    while not matcher.finished:
        token = rng.choice(allowed(matcher))
        matcher.accept(token)
        if token != stop:
            ids.append(token)
    return np.array(ids, np.int32)


def is_whole(pattern, text):
    try:
        return re.fullmatch(pattern, text.decode(), re.DOTALL) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("name", NAMES)
def test_text_drawn_under_a_json_schema_follows_it(compilers, name):
    tokenizer, stop, compiler = compilers[name]
    rng = np.random.default_rng(0)
    for _ in range(15):
        text = tokenizer.decode(drawn(compiler.json_schema(SCHEMA), stop, rng))
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "pattern", [r"[A-Z][a-z]{2,5}( [a-z]{1,3}){0,2}", "-?[0-9]{1,4}(\\.[0-9]+)?", '\u00e9?[^"a]{3}']
)
def test_an_answer_may_stop_exactly_where_the_regex_matches_the_whole_of_it(
    compilers, name, pattern
):
    tokenizer, stop, compiler = compilers[name]
    rng = np.random.default_rng(1)
    for _ in range(10):
        matcher, text = compiler.regex(pattern), b""
        while not matcher.finished:
            tokens = allowed(matcher)
            assert (stop in tokens) is matcher.complete is is_whole(pattern, text)
            token = rng.choice(tokens)
            matcher.accept(token)
            text += tokenizer.pieces[token] if token != stop else b""
        assert is_whole(pattern, text)


def test_the_tokens_allowed_are_those_that_a_choice_goes_on_with(compilers):
    _, stop, compiler = compilers["bytes"]
    matcher = compiler.choices(["ab", "a\n\u00e9", "b[.*", "ab(c"])
    assert {*allowed(matcher)} == {*b"ab"}
    matcher.accept(ord("a"))
    assert {*allowed(matcher)} == {*b"b\n"} and not matcher.complete
    matcher.accept(ord("b"))
    assert {*allowed(matcher)} == {ord("("), stop} and matcher.complete and not matcher.finished
    matcher.accept(ord("("))
    matcher.accept(ord("c"))
    assert {*allowed(matcher)} == {stop} and matcher.finished


def test_all_tokens_of_the_same_bytes_are_allowed(compilers):
    tokenizer, _, compiler = compilers["metaspace"]
    tokens = [token for token, piece in enumerate(tokenizer.pieces) if piece in (b"A", b"B")]
    assert len(tokens) == 3
    assert [*allowed(compiler.regex("[AB]x?"))] == tokens


def test_forced_text_takes_the_tokenizers_own_tokens(compilers):
    tokenizer, _, compiler = compilers["byte_level"]
    text = b'{"name": "Ada the first"}'
    matcher = compiler.choices([text.decode()])
    ids = []
    while not matcher.finished:
        (token,) = allowed(matcher)
        matcher.accept(token)
        ids.append(token)
    assert ids == tokenizer.encode(text).tolist()[:-1] and len(ids) < len(text) / 2


def test_a_lark_grammar_is_followed(compilers):
    tokenizer, stop, compiler = compilers["byte_level"]
    rng = np.random.default_rng(2)
    grammar = 'start: "(" start ")" | WORD\nWORD: /[a-c]{1,3}/'
    for _ in range(20):
        text = tokenizer.decode(drawn(compiler.lark(grammar), stop, rng)).decode()
        word = text.strip("()")
        depth = (len(text) - len(word)) // 2
        assert text == "(" * depth + word + ")" * depth and re.fullmatch("[a-c]{1,3}", word)


def test_every_stop_token_may_end_an_answer(compilers):
    tokenizer, stop, _ = compilers["bytes"]
    compiler = Compiler(Vocabulary.of(tokenizer, [stop, 7], 257))
    for end in (stop, 7):
        matcher = compiler.regex("[\\x00-z]")
        assert 7 not in allowed(matcher)
        matcher.accept(ord("a"))
        assert {*allowed(matcher)} == {stop, 7}
        matcher.accept(end)
        assert matcher.finished


@pytest.mark.parametrize("vocab", [257 + 100, 352])
def test_masks_are_as_wide_as_the_models_vocabulary(compilers, vocab):
    tokenizer, stop, _ = compilers["bytes"]
    mask = Compiler(Vocabulary.of(tokenizer, [stop], vocab)).regex("(?s:.)*").copy().mask()
    assert mask.shape == (-(-vocab // 32),)
    assert tokens_of(mask).max() == stop


@pytest.mark.parametrize(
    ("kind", "grammar", "message"),
    [
        ("json_schema", {"type": "objec"}, "JSON schema .*Invalid type: objec"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"$ref": "http://example.com/schema"}, "not fetch"),
        ("json_schema", {"$ref": "#"}, "no text fits it"),
        ("json_schema", False, "Unsatisfiable"),
        ("regex", "a(", "regular expression .*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[^\\s\\S]", "no text fits it"),
        ("lark", "start: word", "Lark grammar .*unknown name"),
        ("choices", [], "empty"),
    ],
)
def test_what_cannot_be_followed_is_refused(compilers, kind, grammar, message):
    *_, compiler = compilers["bytes"]
    with pytest.raises(ConfigError, match=message):
        getattr(compiler, kind)(grammar)


def test_blanks_between_the_parts_of_json_are_bounded(compilers):
    _, stop, compiler = compilers["bytes"]

    def following(schema, text):
        return count_allowed(compiler.json_schema(schema), [*text.encode(), stop])

    schema = {"$defs": {"a": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    spread = "{" + " " * 32 + '"a": 1,\n\t"b": [ 1 ] }'
    assert following(schema, spread) == len(spread) + 1
    assert following(schema, "{" + " " * 99) == 33
    assert following({**schema, "x-guidance": {}}, "{" + " " * 99) == 100


def chained(count, wrap, key="d"):
    """A schema whose definitions refer to one another, one after the other."""
    name = key.replace("~1", "/").replace("~0", "~")
    defs = {f"{name}{i}": wrap({"$ref": f"#/$defs/{key}{i + 1}"}) for i in range(count)}
    return {"$ref": f"#/$defs/{key}0", "$defs": {**defs, f"{name}{count}": {"type": "string"}}}


def nested(count, inner):
    for _ in range(count):
        inner = {"properties": {"a": inner}}
    return inner


@pytest.mark.parametrize(
    ("kind", "grammar", "message"),
    [
        ("json_schema", nested(100, {}), "recursion limit"),
        ("json_schema", nested(sys.getrecursionlimit() * 2, {}), "256 levels"),
        ("json_schema", chained(300, lambda inner: {"items": inner}), "256 levels"),
        ("json_schema", chained(300, lambda inner: {"allOf": [inner]}), "256 levels"),
        ("json_schema", chained(300, lambda inner: inner, "a~1b~0"), "256 levels"),
        ("regex", "a" * 300_000, "262,144 bytes"),
        ("choices", ["ab"] * 99_000, "262,144 bytes"),
        ("json_schema", {"enum": [*range(99_000)]}, "262,144 bytes"),
    ],
)
def test_what_is_too_large_is_refused_before_the_library_sees_it(compilers, kind, grammar, message):
    *_, compiler = compilers["bytes"]
    with pytest.raises(ConfigError, match=message):
        compiler.compile(kind, grammar)


def test_references_in_a_circle_are_followed_once(compilers):
    *_, compiler = compilers["bytes"]
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}
    matcher = compiler.compile("json_schema", schema | {"type": "array"})
    assert count_allowed(matcher, [*b"[[]]"]) == 4


@pytest.fixture(scope="module")
def trial(compilers):
    tokenizer, stop, _ = compilers["byte_level"]
    trial = GrammarSandbox(Vocabulary.of(tokenizer, [stop], tokenizer.vocab_size), seconds=1)
    yield trial
    trial.end()


def rules(count, name, last):
    between = "".join(f'{name}{i}: {name}{i + 1} "a"\n' for i in range(count))
    return f"start: {name}0\n{between}{name}{count}: {last}"


def multiple(number):
    return {"type": "integer", "multipleOf": number}


def upwards(count):
    """`chained`, so that no chain shows where each reference is met first."""
    schema = chained(count, lambda inner: {"properties": {"a": inner}, "required": ["a"]})
    first = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    return {"$defs": schema["$defs"], "anyOf": first}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grammar", "message"),
    [
        ("json_schema", upwards(900), "needs more than 2 MiB of stack"),
        ("lark", rules(9000, "r", '"b"'), "needs more than 2 MiB of stack"),
        ("lark", rules(9000, "T", '"b"'), "needs more than 2 MiB of stack"),
        ("json_schema", multiple(9_999_991), "more than (1 s|512 MiB)"),
        ("json_schema", {"allOf": [multiple(997), multiple(991)]}, "more than 1 s"),
        ("regex", "(", "not a regular expression"),
        ("json_schema", False, "Unsatisfiable"),
        ("regex", "a" * 250_000, "is [0-9]+ MiB when it is compiled"),
    ],
)
def test_a_grammar_that_ends_its_process_is_refused_with_the_limit(trial, kind, grammar, message):
    with pytest.raises(ConfigError, match=message):
        trial.check(kind, grammar)
    trial.check("json_schema", SCHEMA)


def test_an_ambiguous_grammar_ends_its_own_answer_when_its_time_is_over(compilers):
    tokenizer, *_ = compilers["byte_level"]
    grammar = 'start: e\ne: e e | "a" | ' + " | ".join("e " * count for count in range(3, 9))
    answer = Answer(compilers["byte_level"][2].compile("lark", grammar))
    (letter,) = tokenizer.encode(b"a")[:1]
    began, worst, count = time.thread_time(), 0.0, 0
    while answer.error is None:
        before = time.thread_time()
        answer.mask()
        answer.accept(letter)
        worst, count = max(worst, time.thread_time() - before), count + 1
    assert answer.finished and re.search("more than 0.5 s|items", str(answer.error))
    assert worst < 1.5 and time.thread_time() - began < 3 + 0.01 * count


def test_an_error_of_a_grammar_ends_its_own_answer_only(compilers):
    *_, compiler = compilers["bytes"]
    answer = Answer(compiler.compile("regex", "ab"))
    other = answer.copy()
    answer.accept(ord("x"))
    assert answer.finished and "doesn't satisfy" in str(answer.error)
    np.testing.assert_array_equal(answer.mask(), other.mask())
    assert not other.finished


def test_an_answer_that_the_tokenizer_cannot_write_is_refused_where_it_gets_stuck(tmp_path):
    vocab = {"</s>": 0, "a": 1, "b": 2}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="</s>"))
    model.add_special_tokens(["</s>"])
    model.decoder = tokenizers.decoders.Fuse()
    model.save(path := str(tmp_path / "letters.json"))
    tokenizer = open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=path))
    compiler = Compiler(Vocabulary.of(tokenizer, [0], 3))
    assert {*allowed(compiler.regex("a(z|b)|z"))} == {1}
    with pytest.raises(ConfigError, match="no text fits it"):
        compiler.regex("z")
    matcher = compiler.regex("az")
    matcher.accept(1)
    with pytest.raises(ConfigError, match="the answer cannot go on: no text fits it"):
        matcher.mask()


def test_a_tokenizer_that_changes_text_between_its_tokens_is_refused(tmp_path):
    of_words(["a", "?"], "?").save(path := str(tmp_path / "words.json"))
    tokenizer = open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=path))
    with pytest.raises(ConfigError, match="words.json: grammars need a tokenizer"):
        Compiler(Vocabulary.of(tokenizer, [1], 2))


def test_a_tokenizer_without_a_stop_token_is_refused(compilers):
    tokenizer, *_ = compilers["bytes"]
    with pytest.raises(ConfigError, match="bytes: a grammar needs a token that ends"):
        Compiler(Vocabulary.of(tokenizer, [], 257))


def test_the_missing_library_is_named(compilers, monkeypatch):
    tokenizer, stop, _ = compilers["bytes"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=re.escape(installing("serve"))):
        Compiler(Vocabulary.of(tokenizer, [stop], 257))
