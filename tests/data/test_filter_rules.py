"""Each rule of a step, by texts just on either side of its bound, counted by hand."""

import time

import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from pydantic import TypeAdapter

from maxstack.data.filters.chain import open_filters
from maxstack.data.filters.filter import Removed
from maxstack.schema.filters import LANGUAGES, AnyFilter

OFF = {
    "gopher_quality": (
        "min_words max_words min_mean_word_length max_mean_word_length max_symbol_ratio "
        "max_bullet_lines max_ellipsis_lines min_alphabetic_words min_stop_words"
    ),
    "gopher_repetition": (
        "duplicate_lines duplicate_paragraphs duplicate_line_characters "
        "duplicate_paragraph_characters top_2_gram top_3_gram top_4_gram duplicate_5_grams "
        "duplicate_6_grams duplicate_7_grams duplicate_8_grams duplicate_9_grams duplicate_10_grams"
    ),
}
C4_OFF = {
    "terminal_punctuation": False,
    "min_line_words": 0,
    "javascript": False,
    "policy": False,
    "citations": False,
    "lorem_ipsum": False,
    "curly_bracket": False,
    "min_sentences": 0,
}


def step(kind, data=None, **keys):
    """A step of one section."""
    section = TypeAdapter(AnyFilter).validate_python({"kind": kind, **keys})
    return open_filters([section], {} if data is None else {0: data})[0]


def alone(kind, rule):
    """A step of Gopher with the paper's bound of one rule, the others off."""
    return step(kind, **{name: None for name in OFF[kind].split() if name != rule})


def numbered(count, of=4):
    """So many different words of as many characters."""
    return [str(10 ** (of - 1) + n) for n in range(count)]


def lines(count, repeated):
    """So many different lines of 9 characters, then one of them so many times."""
    return "\n".join(["a" + str(n).zfill(8) for n in range(count)] + ["a00000000"] * repeated)


def ngram_text(size, total):
    """Different words of 4 characters, `total` characters in all with spaces, of which the last
    `size` words repeat the first."""
    words = numbered((total + 1) // 5 - size)
    text = " ".join([*words, *words[:size]])
    return text + " " * (total - len(text))


QUALITY = {
    "min_words": ("a " * 50, "a " * 49),
    "max_words": ("a " * 100_000, "a " * 100_001),
    "min_mean_word_length": ("ab abcd", "ab abc"),
    "max_mean_word_length": ("a" * 9 + " " + "a" * 11, "a" * 9 + " " + "a" * 12),
    "max_symbol_ratio": ("a " * 9 + "#", "a " * 8 + "#"),
    "max_bullet_lines": ("- a\n" * 9 + "b", "- a\n" * 10 + "b"),
    "max_ellipsis_lines": ("a...\n" * 3 + "b\n" * 7, "a\u2026\n" * 4 + "b\n" * 6),
    "min_alphabetic_words": ("a " * 8 + "1 2", "a " * 7 + "1 2 3"),
    "min_stop_words": ("The cat, and one dog", "The the cat"),
}
REPETITION = {
    "duplicate_lines": (lines(7, 3), lines(6, 3)),
    "duplicate_line_characters": ("a" * 20 + "\n" + "b" * 59 + "\n" + "a" * 20,
                                  "a" * 20 + "\n" + "b" * 57 + "\n" + "a" * 20),
    "duplicate_paragraphs": (lines(7, 3).replace("\n", "\n\n"), lines(6, 3).replace("\n", "\n\n")),
    "duplicate_paragraph_characters": ("a" * 20 + "\n\n" + "b" * 56 + "\n\n" + "a" * 20,
                                       "a" * 20 + "\n\n" + "b" * 55 + "\n\n" + "a" * 20),
    # "ab cd" twice: 10 characters of 50, and of 49
    "top_2_gram": ("ab cd 1 ab cd " + "x" * 36, "ab cd 1 ab cd " + "x" * 35),
    # "ab cd ef" twice: 16 characters, at most 0.18 of 89
    "top_3_gram": ("ab cd ef 1 ab cd ef " + "x" * 69, "ab cd ef 1 ab cd ef " + "x" * 68),
    # "ab cd ef gh" twice: 22 characters, at most 0.16 of 138
    "top_4_gram": ((four := "ab cd ef gh 1 ab cd ef gh ") + "x" * 112, four + "x" * 111),
    # the last n words of four characters repeat the first: 4 n characters of the least length
    **{
        f"duplicate_{size}_grams": (ngram_text(size, least), ngram_text(size, least - 1))
        for size, least in enumerate((134, 172, 216, 267, 328, 400), 5)
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, rule, kept, removed",
    [
        *(("gopher_quality", rule, *texts) for rule, texts in QUALITY.items()),
        *(("gopher_repetition", rule, *texts) for rule, texts in REPETITION.items()),
    ],
)
def test_a_rule_of_gopher_keeps_at_its_bound_and_removes_beyond(kind, rule, kept, removed):
    filter = alone(kind, rule)
    assert filter(kept) == kept
    made = filter(removed)
    assert isinstance(made, Removed) and made.rule == rule


@pytest.mark.parametrize(
    "keys, before, after",
    [
        ({"terminal_punctuation": True}, "a.\nb!\nc?\nd\u201d\ne\nf,\ng...", "a.\nb!\nc?\nd\u201d"),
        ({"min_line_words": 5}, "a b c d e\na b c d", "a b c d e"),
        ({"javascript": True}, "Enable JavaScript now\nJava now", "Java now"),
        ({"policy": True}, "See our Privacy Policy\nPolicy", "Policy"),
        ({"citations": True}, "so[12] it is[citation needed] [a]", "so it is [a]"),
    ],
)
def test_a_rule_of_c4_drops_lines_or_marks(keys, before, after):
    assert step("c4", **C4_OFF | keys)(before) == after


@pytest.mark.parametrize(
    "keys, kept, removed",
    [
        ({"lorem_ipsum": True}, "lorem", "Lorem ipsum dolor"),
        ({"curly_bracket": True}, "[]", "a {b"),
        ({"bad_words": "words.txt"}, "classic", "an ASS here"),
        ({"min_sentences": 3}, 'It. "Is." so!', "It is 3.5 now. So?"),
    ],
)
def test_a_rule_of_c4_removes_documents(keys, kept, removed):
    made = step("c4", ["ass"] if "bad_words" in keys else None, **C4_OFF | keys)
    assert made(kept) == kept and made(removed).rule == next(iter(keys))


@pytest.mark.parametrize(
    "keys, before, after",
    [
        ({}, "e\u0301 a\r\nb\rc\u2028d\x00\ufeff\te", "\u00e9 a\nb\nc\nd\te"),
        ({"unicode": "NFKC"}, "\ufb01 \uff21", "fi A"),
        ({"ftfy": True}, "schÃ¶n &amp; gut", "schön & gut"),
        ({"unicode": None, "newlines": False, "control": False}, "e\u0301\r\n\0", "e\u0301\r\n\0"),
    ],
)
def test_normalize_changes_what_its_keys_say(keys, before, after):
    assert step("normalize", **keys)(before) == after


@pytest.mark.parametrize(
    "text, masked",
    [
        ("Write to jo.doe+x@mail.example.org.", "Write to <email>."),
        ("a@b is none", "a@b is none"),
        ("8.8.8.8, 2001:4860:4860::8888; not 10.0.0.1, 1.2.3 or 300.1.1.1",
         "<ip>, <ip>; not 10.0.0.1, 1.2.3 or 300.1.1.1"),
        ("std::vector at 12:30", "std::vector at 12:30"),
        ("GB82 WEST 1234 5698 7654 32, not GB83 WEST 1234 5698 7654 32",
         "<iban>, not GB83 WEST 1234 5698 7654 32"),
        ("4111 1111 1111 1111, not 4111 1111 1111 1112",
         "<credit_card>, not 4111 1111 1111 1112"),
        ("call +41 44 668 18 00 today", "call <phone> today"),
        ("call 044 668 18 00 today", "call 044 668 18 00 today"),
        ("IP:8.8.8.8, IP_8.8.8.8_", "IP:<ip>, IP_<ip>_"),
        ("\u306e8.8.8.8\u306b:2001:4860:4860::8888: x", "\u306e<ip>\u306b:<ip>: x"),
        ("::ffff:8.8.8.8 and ::ffff:10.0.0.1", "<ip> and ::ffff:10.0.0.1"),
        ("v8.8.8.8 and 1.8.8.8.8", "v8.8.8.8 and 1.8.8.8.8"),
        ("foo@bar.com\u305d\u3057 \u9023foo@bar.com", "<email>\u305d\u3057 \u9023<email>"),
        ("jos\u00e9@bar.org \u0438\u0432@bar.org :a@b.org_", "<email> <email> :<email>_"),
        ("\u53f7GB82WEST12345698765432\u3002", "\u53f7<iban>\u3002"),
        ("\u53614111111111111111\u3002_", "\u5361<credit_card>\u3002_"),
        ("_4111111111111111_", "_<credit_card>_"),
    ],
)  # fmt: skip
def test_personal_data_is_masked_where_its_check_digits_are_right(text, masked):
    assert step("pii")(text) == masked


@pytest.mark.parametrize(
    "text", ["1:" * 50_000, "a" * 10**5 + "@", "a@" + "a." * 50_000, "1 " * 10**5]
)
def test_looking_for_personal_data_takes_a_time_that_grows_with_the_text_alone(text):
    find, half = step("pii", phone=None), text[: len(text) // 2]
    times = []
    for part in (half, text):
        start = time.process_time()
        find(part)
        times.append(time.process_time() - start)
    assert times[1] < max(4 * times[0], 0.5)


def test_national_phone_numbers_are_masked_in_the_countries_that_are_named():
    made = step("pii", phone_regions=["CH"], phone="[phone]", email=None)
    assert made("a@b.org: 044 668 18 00") == "a@b.org: [phone]"


def test_the_languages_of_the_schema_are_those_of_the_model():
    model = LanguageIdentifier.from_model_file(MODEL_FILE)
    assert sorted(model.labels) == sorted(LANGUAGES.split())


def test_other_languages_are_removed():
    made = step("language", languages=["de", "en"])
    german = "Der Hund liegt im Garten und wartet auf seinen Freund, der bald kommt."
    assert made(german) == german
    assert made("Le chien attend son ami dans le jardin, qui arrive bientôt.") == (
        "languages",
        "fr",
    )


@pytest.mark.parametrize(
    "unit, text, size", [("characters", "ä b", 3), ("words", "ä b", 2), ("bytes", "ä b", 4)]
)
def test_lengths_are_bounded_on_both_sides(unit, text, size):
    assert step("length", unit=unit, min=size, max=size)(text) == text
    assert step("length", unit=unit, min=size + 1)(text) == ("min", size)
    assert step("length", unit=unit, max=size - 1)(text) == ("max", size)


def test_a_regular_expression_drops_keeps_or_replaces():
    assert step("regex", pattern="(?i)secret")("A SECRET") == ("drop", "SECRET")
    assert step("regex", pattern="x", action="keep")("y") == ("keep", None)
    assert step("regex", pattern="x", action="keep")("xy") == "xy"
    assert step("regex", pattern=r"(\d)\d", action="replace", replacement=r"\1_")("12") == "1_"
