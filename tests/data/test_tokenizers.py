import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizer_files import ALPHABET, learn_pieces, of_words

from maxstack.data.growth import max_growth
from maxstack.data.sources import open_source
from maxstack.data.tokenizers import open_tokenizer, tokenize_with_sizes
from maxstack.data.vocabulary import check_vocabulary, train_vocabulary
from maxstack.errors import DataError, call_rust
from maxstack.schema.data import (
    BytesTokenizer,
    DataConfig,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TextSource,
)

TEXT = "Hello,  w\u00f6rld!\n\n\tif x == 10:\r\n  return '\U0001f600'\n"


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tokenizers")
        patch.chdir(folder)
        open_tokenizer.cache_clear()  # of files of the same names in another folder
        (folder / "corpus.txt").write_text(
            "if the world is x then return the whole world, twice\n" * 20
            + "for i in range(10):\n  print(i)\n" * 20
        )
        train_vocabulary(
            DataConfig(sources=[TextSource(kind="text", files=["corpus.txt"])]),
            "sp.model",
            vocab=320,
        )
        before, after = tokenizers.pre_tokenizers, tokenizers.decoders
        letters, never = sorted({*TEXT.replace(" ", "\u2581")}), {"prepend_scheme": "never"}
        for name, pre, decoder, alphabet in (
            ("byte_level", before.ByteLevel(add_prefix_space=False), after.ByteLevel(), ALPHABET),
            ("metaspace", before.Metaspace(**never), after.Metaspace(**never), letters),
        ):
            model = tokenizers.Tokenizer(
                tokenizers.models.BPE(byte_fallback=name == "metaspace", unk_token=None)
            )
            model.pre_tokenizer, model.decoder = pre, decoder
            trainer = tokenizers.trainers.BpeTrainer(
                vocab_size=400,
                initial_alphabet=alphabet,
                special_tokens=["<s>", "</s>"],
                show_progress=False,
            )
            model.train_from_iterator([(folder / "corpus.txt").read_text()], trainer)
            model.enable_truncation(4)
            model.enable_padding(length=64)
            model.save(f"{name}.json")
        yield folder


def of_bytes(**keys):
    return open_tokenizer(BytesTokenizer(kind="bytes", **keys))


def of_pieces(path, **keys):
    return open_tokenizer(SentencePieceTokenizer(kind="sentencepiece", path=path, **keys))


def of_file(path, **keys):
    return open_tokenizer(HuggingFaceTokenizer(kind="huggingface", path=str(path), **keys))


def opened(name):
    if name == "bytes":
        return of_bytes(eos=True)
    if name == "sentencepiece":
        return of_pieces("sp.model")
    return of_file(f"{name}.json", bos="<s>", eos="</s>")


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "byte_level", "metaspace"])
def test_decoding_gives_back_the_text_and_token_bytes_add_up_to_its_size(name):
    tokenizer = opened(name)
    ids = tokenizer.encode(TEXT.encode())
    assert ids.dtype == np.int32 and tokenizer.decode(ids).decode() == TEXT
    sizes = tokenizer.token_bytes
    assert sizes.shape == (tokenizer.vocab_size,) and sizes.dtype == np.int32
    assert b"".join(tokenizer.pieces[token] for token in ids) == TEXT.encode()
    assert sizes[ids].sum() == len(TEXT.encode()) and sizes[ids[0]] == sizes[ids[-1]] == 0


def lossy(kind):
    """A tokenizer that normalises, collapses or drops spaces, and does not know all characters."""
    text = "hello world how are you the fi world is x " * 20
    if kind == "sentencepiece":
        return of_pieces(learn_pieces("lossy", text.split(), 30))
    model = of_words(["[UNK]", "<s>", *sorted({*text.split()})], "[UNK]")
    model.normalizer = tokenizers.normalizers.NFKC()
    model.save("lossy.json")
    return of_file("lossy.json", bos="<s>", eos="<s>")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_the_ids_of_a_lossy_tokenizer_stand_for_the_documents_own_bytes_up_to_where_each_ends(kind):
    start, document = "  hello   \ufb01 ", "  hello   \ufb01 world \u4e2d\u4e2d you  "
    with open("document.txt", "w", newline="") as file:
        file.write(document)
    tokenizer = lossy(kind)
    ids, sizes = tokenize_with_sizes(
        open_source(TextSource(kind="text", files=["document.txt"])), 0, tokenizer
    )
    plain = tokenizer.token_bytes[ids].sum()
    assert (
        sizes.sum() == len(document.encode()) != plain and sizes.min() == 0 == sizes[0] == sizes[-1]
    )
    before = [i for i in range(1, len(ids)) if b"world" in tokenizer.decode(ids[: i + 1])][0]
    assert sizes[: before + 1].sum() == len(f"{start}world".encode())


def test_bytes_need_no_utf8():
    assert opened("bytes").encode(b"\xff\x00").tolist() == [256, 255, 0, 256]


def test_begin_and_end_are_left_out_unless_asked_for():
    assert of_bytes(bos=False).encode(b"ab").tolist() == [97, 98]
    assert not len(of_pieces("sp.model", bos=False, eos=False).encode(b""))
    assert not len(of_file("byte_level.json").encode(b""))


def test_documents_begin_and_end_as_the_files_say_unless_told_otherwise(folder, tmp_path):
    spec = json.loads((folder / "byte_level.json").read_text())
    path = tmp_path / "tokenizer.json"

    def ends(settings, before=None, **said):
        model = tokenizers.Tokenizer.from_str(json.dumps(spec))
        if before:
            made = tokenizers.processors.TemplateProcessing(f"{before} $A", None, [(before, 0)])
            model.post_processor = made
        model.save(str(path))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        open_tokenizer.cache_clear()
        found = of_file(path, **said)
        return [*found.bos], [*found.eos]

    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    assert ends(named, "<s>") == ([0], [1]) and ends({}, "<s>") == ([0], [])
    assert ends(named) == ([], [1]) and ends(named | {"add_bos_token": True}) == ([0], [1])
    assert ends(named, "<s>", bos=None, eos=None) == ([], [])
    assert ends({}, eos="</s>") == ([], [1])


def test_special_tokens_spelt_out_in_a_document_are_text():
    tokenizer = of_file("byte_level.json")
    ids = tokenizer.encode(b"a</s>b")
    assert 1 not in ids and tokenizer.decode(ids) == b"a</s>b"


def test_the_fingerprint_tells_models_and_their_ends_apart():
    found = [opened(name) for name in ("bytes", "sentencepiece", "byte_level", "metaspace")]
    found += [of_bytes(eos=False), of_pieces("sp.model", eos=False)]
    assert len({tokenizer.fingerprint for tokenizer in found}) == 6


@pytest.mark.parametrize("of_kind", [of_pieces, of_file])
@pytest.mark.parametrize("data", [None, b"", b"{}", b"garbage \xff", b"[" * 300_000])
def test_a_missing_or_broken_file_is_an_error_that_names_it(of_kind, data, folder):
    path = folder / f"broken-{0 if data is None else len(data)}"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=path.name):
        of_kind(str(path))


def test_a_begin_token_that_the_file_lacks_is_an_error():
    with pytest.raises(DataError, match=r"byte_level.json.*'<bos>'.*data.tokenizer.bos.*'<s>'"):
        of_file("byte_level.json", bos="<bos>")


def test_a_begin_token_that_the_model_lacks_is_an_error(folder):
    sentencepiece.SentencePieceTrainer.train(
        input="corpus.txt", model_prefix="nobos", vocab_size=35, bos_id=-1, minloglevel=2
    )
    with pytest.raises(DataError, match=r"nobos.model.*BOS.*data.tokenizer.bos=false"):
        of_pieces("nobos.model")


def test_the_vocabulary_is_compared_with_the_models():
    tokenizer = SentencePieceTokenizer(kind="sentencepiece", path="sp.model")
    text = DataConfig(sources=[TextSource(kind="text", files=["corpus.txt"])], tokenizer=tokenizer)
    check_vocabulary(text, 320)
    with pytest.raises(DataError, match=r"sp.model has 320 tokens, but model.vocab=319"):
        check_vocabulary(text, 319)


@pytest.mark.parametrize("kind", ["vocabulary", "added token", "vocab.json"])
def test_an_id_that_would_make_tables_of_gigabytes_is_refused(kind, tmp_path):
    made = json.loads(of_words(["a"], "a").to_str())
    path = tmp_path / "tokenizer.json"
    if kind == "vocabulary":
        made["model"]["vocab"]["b"] = 10**9
    elif kind == "added token":
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        made["added_tokens"] = [{"id": 10**9, "content": "b"} | flags]
    else:
        path = tmp_path / "vocab.json"
        made = {"a": 0, "b": 10**9}
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    path.write_text(json.dumps(made))
    with pytest.raises(DataError, match="1,?000,?000,?000"):
        of_file(path)


def test_a_panic_of_a_library_in_rust_is_an_error_of_data():
    made = of_words(["a"], "a")
    made.enable_truncation(2, stride=2)
    with pytest.raises(DataError, match="^a.json: `stride` must be strictly less"):
        call_rust("a.json", made.encode, "a a a")
    with pytest.raises(KeyError):
        call_rust("a.json", {}.__getitem__, 1)


def steps(name, *made):
    """A tokenizer with steps of one kind."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    kind = getattr(tokenizers, f"{name}s" if name != "post_processor" else "processors")
    setattr(model, name, kind.Sequence([*made]))
    return model


LONG = "a" * 3000


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("normalizer", [tokenizers.normalizers.Replace("a", LONG)] * 2),
        ("normalizer", [tokenizers.normalizers.Replace(tokenizers.Regex("a"), LONG)] * 2),
        ("pre_tokenizer", [tokenizers.pre_tokenizers.ByteLevel()] * 20),
        (
            "post_processor",
            [tokenizers.processors.TemplateProcessing(" ".join(["$A"] * 200), None, [])] * 2,
        ),
        ("decoder", [tokenizers.decoders.Replace("a", "a" * 100)]),
        ("decoder", [tokenizers.decoders.CTC(word_delimiter_token="")] * 20),
    ],
)
def test_a_file_whose_steps_multiply_text_is_refused(name, made, tmp_path):
    path = tmp_path / "tokenizer.json"
    steps(name, *made).save(str(path))
    with pytest.raises(DataError, match=f"{path}.*{name}.* times as long"):
        of_file(path)


def test_steps_as_published_tokenizers_have_them_are_taken():
    normal, before = tokenizers.normalizers, tokenizers.pre_tokenizers
    table = normal.Precompiled(bytes([4, 0, 0, 0] * 2) + b"x" * 33 + b"\0y\0")
    llama = [normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")]
    xlnet = [normal.NFKD(), normal.StripAccents(), normal.Lowercase(), table]
    xlnet.append(normal.Replace(tokenizers.Regex(" {2,}"), " "))
    assert max_growth(steps("normalizer", *llama), "a.json") == 4 * 3
    model = steps("normalizer", *xlnet)
    model.pre_tokenizer = before.Sequence([before.WhitespaceSplit(), before.Metaspace()])
    assert max_growth(model, "a.json") == 11 * 1.5 * 33 * 2 * 4


def test_a_text_that_grows_is_encoded_in_smaller_parts(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    model = steps("normalizer", tokenizers.normalizers.Replace("a", "b" * 1000))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(path))
    tokenizer = of_file(path)
    monkeypatch.setattr("maxstack.data.tokenizers.AT_ONCE", 2_000_000)
    sizes = [
        stop - start
        for start, stop in tokenizer._parts(b"a " * 9_000, 1 << 20, tokenizer._text_ids)
    ]
    assert 1900 < max(sizes) <= 2000
