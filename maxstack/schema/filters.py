"""Sections of data.steps: the processing of documents before tokenization."""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from maxstack.config import Fault, Items, NonNegativeInt, PositiveInt, Regex, Section
from maxstack.config.compose import merged_tree
from maxstack.config.own_kinds import Kind, Open, last_name
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
"""Language codes of py3langid."""
Share = Annotated[float, Field(ge=0, le=1)]


class Filter(Kind, Section):
    """Keys shared by all filters."""

    PLACES = ("STEP",)
    STEP: ClassVar[str] = ""
    """module:class of the filter, which takes the section; empty: one of maxstack's."""

    name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Name in counts and in the list of removed documents; null: its kind, numbered if a kind
    occurs more than once."""


class NormalizeFilter(Filter):
    """Normalizes the characters of each document."""

    kind: Literal["normalize"]
    """Selects this filter."""
    ftfy: bool = False
    """Repair wrongly decoded text, HTML entities, ligatures, wide letters and curly quotes with
    ftfy (Speer 2019)."""
    unicode: Literal["NFC", "NFKC"] | None = "NFC"
    """Unicode normal form (UAX 15); null: unchanged."""
    newlines: bool = True
    """Turn CRLF, CR, NEL and line and paragraph separators into LF."""
    control: bool = True
    """Drop control characters other than tab and LF, and byte order marks."""


class LanguageFilter(Filter):
    """Removes documents in other languages, identified by py3langid, whose model of 140 languages
    is bundled with it. Short texts are often misidentified."""

    kind: Literal["language"]
    """Selects this filter."""
    languages: Items[str] = Field(min_length=1)
    """Codes of the languages to keep (ISO 639-1), as in [en, de]."""
    min_confidence: Share = 0.65
    """Minimum probability of the most likely language."""
    characters: PositiveInt = 2000
    """Number of characters to examine, from the beginning of the document."""

    def own_faults(self) -> Iterator[Fault]:
        for language in self.languages:
            if language not in LANGUAGES.split():
                advice = did_you_mean(language, LANGUAGES.split())
                yield "languages", f"{quoted(language)} is not known{advice}; known: {LANGUAGES}"


class LengthFilter(Filter):
    """Removes documents that are too short or too long."""

    kind: Literal["length"]
    """Selects this filter."""
    unit: Literal["characters", "words", "bytes"] = "characters"
    """Unit of length; words are separated by white space, bytes are those of UTF-8."""
    min: NonNegativeInt = 0
    """Minimum length."""
    max: PositiveInt | None = None
    """Maximum length; null: no limit."""

    def own_faults(self) -> Iterator[Fault]:
        if self.max is None and not self.min:
            yield "", "removes nothing without a min or a max; give one of them"
        if self.max is not None and self.max < self.min:
            yield "max", f"is below min={self.min}, so that every document is removed"


class RegexFilter(Filter):
    """Removes documents by a regular expression, or replaces its matches."""

    kind: Literal["regex"]
    """Selects this filter."""
    pattern: Regex
    """Regular expression in Python syntax; (?i), (?m) and (?s) at its beginning set flags."""
    action: Literal["drop", "keep", "replace"] = "drop"
    """drop: remove documents with a match; keep: remove documents without one; replace: replace all
    matches."""
    replacement: str = ""
    """Replacement of each match; \\1 stands for the first group."""

    def own_faults(self) -> Iterator[Fault]:
        if self.action != "replace" and self.replacement:
            yield "replacement", f"is not used with action {self.action}; leave it out"
        try:
            re.sub(self.pattern, self.replacement, "")
        except (re.error, IndexError) as error:
            yield "replacement", f"{quoted(self.replacement)} does not fit the pattern: {error}"


class GopherQualityFilter(Filter):
    """Quality rules of MassiveText (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1). Words are
    separated by white space. null disables a rule."""

    kind: Literal["gopher_quality"]
    """Selects this filter."""
    min_words: NonNegativeInt | None = 50
    """Minimum number of words."""
    max_words: PositiveInt | None = 100_000
    """Maximum number of words."""
    min_mean_word_length: float | None = Field(3.0, ge=0)
    """Minimum mean word length in characters."""
    max_mean_word_length: float | None = Field(10.0, ge=0)
    """Maximum mean word length in characters."""
    max_symbol_ratio: float | None = Field(0.1, ge=0)
    """Maximum number of hash signs, or of ellipses, per word."""
    max_bullet_lines: Share | None = 0.9
    """Maximum fraction of lines that begin with a bullet."""
    max_ellipsis_lines: Share | None = 0.3
    """Maximum fraction of lines that end with an ellipsis."""
    min_alphabetic_words: Share | None = 0.8
    """Minimum fraction of words with a letter."""
    min_stop_words: NonNegativeInt | None = 2
    """Minimum number of different `stop_words`."""
    stop_words: Items[str] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Frequent words of the language, in lower case."""


class GopherRepetitionFilter(Filter):
    """Repetition rules of MassiveText (Rae et al. 2021, arXiv:2112.11446, table A1). Fractions of
    characters are of the whole text. Every occurrence but the first is a duplicate. null disables a
    rule."""

    kind: Literal["gopher_repetition"]
    """Selects this filter."""
    duplicate_lines: Share | None = 0.3
    """Maximum fraction of duplicate lines."""
    duplicate_paragraphs: Share | None = 0.3
    """Maximum fraction of duplicate paragraphs, which blank lines separate."""
    duplicate_line_characters: Share | None = 0.2
    """Maximum fraction of characters in duplicate lines."""
    duplicate_paragraph_characters: Share | None = 0.2
    """Maximum fraction of characters in duplicate paragraphs."""
    top_2_gram: Share | None = 0.2
    """Maximum fraction of characters in occurrences of the most frequent word bigram."""
    top_3_gram: Share | None = 0.18
    """Maximum fraction of characters in occurrences of the most frequent word trigram."""
    top_4_gram: Share | None = 0.16
    """Maximum fraction of characters in occurrences of the most frequent word 4-gram."""
    duplicate_5_grams: Share | None = 0.15
    """Maximum fraction of characters in duplicate word 5-grams, each character counted once."""
    duplicate_6_grams: Share | None = 0.14
    """Maximum fraction of characters in duplicate word 6-grams, each character counted once."""
    duplicate_7_grams: Share | None = 0.13
    """Maximum fraction of characters in duplicate word 7-grams, each character counted once."""
    duplicate_8_grams: Share | None = 0.12
    """Maximum fraction of characters in duplicate word 8-grams, each character counted once."""
    duplicate_9_grams: Share | None = 0.11
    """Maximum fraction of characters in duplicate word 9-grams, each character counted once."""
    duplicate_10_grams: Share | None = 0.1
    """Maximum fraction of characters in duplicate word 10-grams, each character counted once."""


class C4Filter(Filter):
    """Rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2): remove documents by their
    content, then drop lines, then remove documents with too little left. C4's removal of repeated
    three-sentence spans is not included."""

    kind: Literal["c4"]
    """Selects this filter."""
    terminal_punctuation: bool = True
    """Drop lines that do not end with a period, exclamation mark, question mark or quotation mark,
    and those that end with an ellipsis."""
    min_line_words: NonNegativeInt = 5
    """Drop lines with fewer words than this."""
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
    """Path or URL of a file with one word or phrase per line; documents that contain any of them
    are removed, as in the paper with a public list. null: no such rule."""
    min_sentences: NonNegativeInt = 3
    """Remove documents with fewer sentences than this."""


class ExactDuplicatesFilter(Filter):
    """Keeps the first of equal documents, across all sources in order."""

    kind: Literal["exact_duplicates"]
    """Selects this filter."""
    ignore: Items[Literal["case", "whitespace", "punctuation"]] = ("case", "whitespace")
    """Differences between documents to ignore. whitespace: differences in its amount and kind."""


class NearDuplicatesFilter(Filter):
    """Keeps the first document of each cluster of similar ones, across all sources in order.
    Similarity is the Jaccard index of n-gram sets, estimated by MinHash (Broder 1997); pairs are
    found by bands of the signatures (LSH), and clusters are the connected components of pairs."""

    kind: Literal["near_duplicates"]
    """Selects this filter."""
    threshold: float = Field(0.8, gt=0, lt=1)
    """Minimum estimated similarity."""
    permutations: int = Field(128, ge=16, le=1024)
    """Number of permutations, which is the length of a signature. The estimate's standard deviation
    at similarity J is sqrt(J (1 - J) / permutations)."""
    ngram: PositiveInt = 5
    """Length of an n-gram, in units; a shorter document counts as one n-gram."""
    unit: Literal["words", "characters"] = "words"
    """Unit of n-grams, which are compared in lower case. words: runs of letters and digits;
    characters: for languages written without white space."""
    seed: NonNegativeInt = 1
    """Seed for the permutations."""


class DecontaminateFilter(Filter):
    """Removes documents that share word n-grams with evaluation tasks (Brown et al. 2020,
    arXiv:2005.14165, appendix C), ignoring case and punctuation. Texts of tasks that are shorter
    than an n-gram are ignored."""

    kind: Literal["decontaminate"]
    """Selects this filter."""
    tasks: Items[str] = ()
    """Evaluation tasks, by name or file as in eval.tasks; their texts are each question with each
    of its answers."""
    files: Items[str] = ()
    """Paths or URLs of further files of texts: .jsonl files, with any texts in each line, or other
    files, with one text per line."""
    ngram: PositiveInt = 13
    """Length of an n-gram, in words."""
    min_matches: PositiveInt = 1
    """Remove a document if such n-grams occur at this many positions or more."""

    def own_faults(self) -> Iterator[Fault]:
        if not self.tasks and not self.files:
            yield "tasks", "names nothing to look for; give tasks, or files"
        for number, task in enumerate(self.tasks):
            try:
                merged_tree(TaskConfig.PRESETS, task)
            except ConfigError as error:
                yield f"tasks.{number}", str(error)


class PersonalDataFilter(Filter):
    """Masks personal data with placeholders. null leaves a kind of data unchanged."""

    kind: Literal["pii"]
    """Selects this filter."""
    email: str | None = "<email>"
    """Placeholder for email addresses."""
    ip: str | None = "<ip>"
    """Placeholder for public IP addresses, of version 4 and 6."""
    phone: str | None = "<phone>"
    """Placeholder for phone numbers that the package phonenumbers finds valid."""
    phone_regions: Items[Annotated[str, Field(pattern="^[A-Z]{2}$")]] = ()
    """Countries whose national notation of phone numbers is also recognized, as in [US, CH];
    otherwise only numbers that begin with + are."""
    iban: str | None = "<iban>"
    """Placeholder for bank account numbers (ISO 13616) with valid check digits."""
    credit_card: str | None = "<credit_card>"
    """Placeholder for 13 to 19 digits of a known card issuer with a valid check digit (Luhn)."""


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
    Open(Filter),
]


def names_of(filters: Sequence[Filter]) -> list[str]:
    """The name of each filter."""
    kinds: collections.Counter[str] = collections.Counter()
    names = []
    for section in filters:
        kind = last_name(section.kind)  # type: ignore[attr-defined]
        kinds[kind] += 1
        names.append(section.name or (kind if kinds[kind] == 1 else f"{kind}-{kinds[kind]}"))
    return names


GLOBAL = ExactDuplicatesFilter, NearDuplicatesFilter
"""Filters that compare documents with one another."""


def may_change(section: Filter) -> bool:
    """Whether a filter may change a text; one of one's own may."""
    ours = NormalizeFilter, RegexFilter, C4Filter, PersonalDataFilter
    return bool(section.STEP) or isinstance(section, ours)
