"""Sections of data.steps: filters of documents before they become tokens."""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Regex, Section
from maxstack.config.compose import merged_tree
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError, quoted
from maxstack.schema.tasks import TaskConfig

LANGUAGES = (
    "ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu "
    "ext fa fi fo fr fuv fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig "
    "is it ja jv ka kab kik kk km kn ko ku ky la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt "
    "my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so sq sr st "
    "sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx"
)
"""Codes that py3langid knows."""
Share = Annotated[float, Field(ge=0, le=1)]


class Filter(Section):
    """Keys of every filter."""

    name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Names the filter in counts and in what it removed; null: its kind, with a number where a kind
    is given more than once."""


class NormalizeFilter(Filter):
    """Changes to the characters of each document."""

    kind: Literal["normalize"]
    """The filter."""
    ftfy: bool = False
    """Repair text that was decoded wrongly, HTML entities, ligatures, wide letters and curly quotes
    with ftfy (Speer 2019)."""
    unicode: Literal["NFC", "NFKC"] | None = "NFC"
    """Normal form of Unicode (UAX 15); null: as it is."""
    newlines: bool = True
    """CRLF, CR, NEL and the separators of lines and paragraphs become LF."""
    control: bool = True
    """Control characters other than tab and LF, and byte order marks, are dropped."""


class LanguageFilter(Filter):
    """Removes documents in other languages, as py3langid says, whose model of 140 languages comes
    with it. Short texts are often taken for another language."""

    kind: Literal["language"]
    """The filter."""
    languages: Items[str] = Field(min_length=1)
    """Codes of the languages to keep (ISO 639-1), as in [en, de]."""
    min_confidence: Share = 0.65
    """Probability of the likeliest language at least."""
    characters: PositiveInt = 2000
    """Characters of the document's beginning that are looked at."""

    def own_faults(self) -> Iterator[Fault]:
        for language in self.languages:
            if language not in LANGUAGES.split():
                advice = did_you_mean(language, LANGUAGES.split())
                yield "languages", f"{quoted(language)} is not known{advice}; known: {LANGUAGES}"


class LengthFilter(Filter):
    """Removes documents that are too short or too long."""

    kind: Literal["length"]
    """The filter."""
    unit: Literal["characters", "words", "bytes"] = "characters"
    """What is counted; words stand between white space, bytes are those of UTF-8."""
    min: NonNegativeInt = 0
    """Units at least."""
    max: PositiveInt | None = None
    """Units at most; null: any number."""

    def own_faults(self) -> Iterator[Fault]:
        if self.max is None and not self.min:
            yield "", "removes nothing without a min or a max; give one of them"
        if self.max is not None and self.max < self.min:
            yield "max", f"is below min={self.min}, so that every document is removed"


class RegexFilter(Filter):
    """Removes documents by a regular expression, or replaces what it matches."""

    kind: Literal["regex"]
    """The filter."""
    pattern: Regex
    """Python's syntax; (?i), (?m) and (?s) at its beginning set flags."""
    action: Literal["drop", "keep", "replace"] = "drop"
    """drop: remove documents in which it matches; keep: remove those in which it does not; replace:
    change what it matches."""
    replacement: str = ""
    """Text instead of each match; \\1 stands for the first group."""

    def own_faults(self) -> Iterator[Fault]:
        if self.action != "replace" and self.replacement:
            yield "replacement", f"is not used with action {self.action}; leave it out"
        try:
            re.sub(self.pattern, self.replacement, "")
        except (re.error, IndexError) as error:
            yield "replacement", f"{quoted(self.replacement)} does not fit the pattern: {error}"


class GopherQualityFilter(Filter):
    """Rules of quality of MassiveText (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1). Words
    stand between white space. null switches a rule off."""

    kind: Literal["gopher_quality"]
    """The filter."""
    min_words: NonNegativeInt | None = 50
    """Words at least."""
    max_words: PositiveInt | None = 100_000
    """Words at most."""
    min_mean_word_length: float | None = Field(3.0, ge=0)
    """Mean characters of a word at least."""
    max_mean_word_length: float | None = Field(10.0, ge=0)
    """Mean characters of a word at most."""
    max_symbol_ratio: float | None = Field(0.1, ge=0)
    """Hash signs, or ellipses, per word at most."""
    max_bullet_lines: Share | None = 0.9
    """Share of lines that begin with a bullet at most."""
    max_ellipsis_lines: Share | None = 0.3
    """Share of lines that end with an ellipsis at most."""
    min_alphabetic_words: Share | None = 0.8
    """Share of words with a letter at least."""
    min_stop_words: NonNegativeInt | None = 2
    """Different ones of `stop_words` at least."""
    stop_words: Items[str] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Frequent words of the language, in lower case."""


class GopherRepetitionFilter(Filter):
    """Rules of repetition of MassiveText (Rae et al. 2021, arXiv:2112.11446, table A1). Characters
    are those of the whole text. A duplicate is every occurrence but the first. null switches a
    rule off."""

    kind: Literal["gopher_repetition"]
    """The filter."""
    duplicate_lines: Share | None = 0.3
    """Share of lines that are duplicates at most."""
    duplicate_paragraphs: Share | None = 0.3
    """Share of paragraphs, between blank lines, that are duplicates at most."""
    duplicate_line_characters: Share | None = 0.2
    """Share of characters in duplicate lines at most."""
    duplicate_paragraph_characters: Share | None = 0.2
    """Share of characters in duplicate paragraphs at most."""
    top_2_gram: Share | None = 0.2
    """Share of characters in the occurrences of the most frequent pair of words at most."""
    top_3_gram: Share | None = 0.18
    """The same of three words."""
    top_4_gram: Share | None = 0.16
    """The same of four words."""
    duplicate_5_grams: Share | None = 0.15
    """Share of characters in duplicate sequences of five words at most, each counted once."""
    duplicate_6_grams: Share | None = 0.14
    """The same of six words."""
    duplicate_7_grams: Share | None = 0.13
    """The same of seven words."""
    duplicate_8_grams: Share | None = 0.12
    """The same of eight words."""
    duplicate_9_grams: Share | None = 0.11
    """The same of nine words."""
    duplicate_10_grams: Share | None = 0.1
    """The same of ten words."""


class C4Filter(Filter):
    """Rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2): documents are removed by
    what they hold, then lines are dropped, then documents of too little that is left. Spans of
    three sentences that other documents have too are not looked for."""

    kind: Literal["c4"]
    """The filter."""
    terminal_punctuation: bool = True
    """Drop lines that do not end with a period, exclamation mark, question mark or quotation
    mark, and those that end with an ellipsis."""
    min_line_words: NonNegativeInt = 5
    """Words of a line at least."""
    javascript: bool = True
    """Drop lines with the word Javascript."""
    policy: bool = True
    """Drop lines about terms of use, privacy policies and cookies."""
    citations: bool = True
    """Drop markers such as [1], [edit] and [citation needed]."""
    lorem_ipsum: bool = True
    """Remove documents with lorem ipsum."""
    curly_bracket: bool = True
    """Remove documents with a curly bracket."""
    bad_words: str | None = None
    """A file with a word or phrase a line, a path or URL; documents with any of them are removed,
    as the paper does by a public list. null: none are looked for."""
    min_sentences: NonNegativeInt = 3
    """Sentences of a document at least."""


class ExactDuplicatesFilter(Filter):
    """Keeps the first of equal documents, across all sources, in their order."""

    kind: Literal["exact_duplicates"]
    """The filter."""
    ignore: Items[Literal["case", "whitespace", "punctuation"]] = ("case", "whitespace")
    """Differences that do not count. whitespace: its amount and kind."""


class NearDuplicatesFilter(Filter):
    """Keeps the first document of each cluster of similar ones, across all sources, in their order.
    Similarity is the Jaccard index of sets of n-grams, estimated by MinHash (Broder 1997); pairs
    are found by bands of the signatures (LSH), and two documents are in a cluster where pairs link
    them."""

    kind: Literal["near_duplicates"]
    """The filter."""
    threshold: float = Field(0.8, gt=0, lt=1)
    """Estimated similarity at least."""
    permutations: int = Field(128, ge=16, le=1024)
    """Length of a signature. The estimate's standard deviation at similarity J is
    sqrt(J (1 - J) / permutations)."""
    ngram: PositiveInt = 5
    """Units of an n-gram; shorter documents are one."""
    unit: Literal["words", "characters"] = "words"
    """What n-grams are made of, in lower case; words are runs of letters and digits. characters:
    for languages without white space."""
    seed: NonNegativeInt = 1
    """Seed of the permutations."""


class DecontaminateFilter(Filter):
    """Removes documents that share n-grams of words with evaluation tasks (Brown et al. 2020,
    arXiv:2005.14165, appendix C), in lower case and without punctuation. Texts of tasks that are
    shorter than an n-gram are not looked for."""

    kind: Literal["decontaminate"]
    """The filter."""
    tasks: Items[str] = ()
    """Names or files of tasks, as in eval.tasks: their questions with each answer."""
    files: Items[str] = ()
    """Further files of texts, paths or URLs: of .jsonl all texts in each line, otherwise each line
    is a text."""
    ngram: PositiveInt = 13
    """Words of an n-gram."""
    min_matches: PositiveInt = 1
    """Positions with such an n-gram from which on a document is removed."""

    def own_faults(self) -> Iterator[Fault]:
        if not self.tasks and not self.files:
            yield "tasks", "names nothing to look for; give tasks, or files"
        for number, task in enumerate(self.tasks):
            try:
                merged_tree(TaskConfig.PRESETS, task)
            except ConfigError as error:
                yield f"tasks.{number}", str(error)


class PersonalDataFilter(Filter):
    """Masks personal data with placeholders. null leaves a kind of data as it is."""

    kind: Literal["pii"]
    """The filter."""
    email: str | None = "<email>"
    """For addresses of email."""
    ip: str | None = "<ip>"
    """For IP addresses, of version 4 and 6, that lie in public networks."""
    phone: str | None = "<phone>"
    """For valid phone numbers, as phonenumbers has it."""
    phone_regions: Items[Annotated[str, Field(pattern="^[A-Z]{2}$")]] = ()
    """Countries whose national notation is looked for too, as in [US, CH]; otherwise numbers that
    begin with +."""
    iban: str | None = "<iban>"
    """For account numbers (ISO 13616) with right check digits."""
    credit_card: str | None = "<credit_card>"
    """For 13 to 19 digits of a known issuer with the right check digit (Luhn)."""


AnyFilter = Annotated[
    NormalizeFilter
    | LanguageFilter
    | LengthFilter
    | RegexFilter
    | GopherQualityFilter
    | GopherRepetitionFilter
    | C4Filter
    | ExactDuplicatesFilter
    | NearDuplicatesFilter
    | DecontaminateFilter
    | PersonalDataFilter,
    Field(discriminator="kind"),
]


def names_of(filters: Sequence[Filter]) -> list[str]:
    """Return the name of each filter."""
    kinds: collections.Counter[str] = collections.Counter()
    names = []
    for section in filters:
        kind: str = section.kind  # type: ignore[attr-defined]
        kinds[kind] += 1
        names.append(section.name or (kind if kinds[kind] == 1 else f"{kind}-{kinds[kind]}"))
    return names


GLOBAL = ExactDuplicatesFilter, NearDuplicatesFilter
"""Filters that compare documents with each other."""
CHANGING = NormalizeFilter, RegexFilter, C4Filter, PersonalDataFilter
"""Filters that may change a text."""
