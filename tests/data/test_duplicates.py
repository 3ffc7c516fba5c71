import numpy as np
import pytest

from maxstack.data.filters.duplicates import find_keepers, shingles, signatures
from maxstack.schema.filters import ExactDuplicatesFilter, NearDuplicatesFilter


def planted(rng, pairs, words=300):
    """Pairs of texts, each pair with a share of words of the second replaced in one run."""
    made = []
    for _ in range(pairs):
        first = rng.integers(10_000, size=words)
        second = first.copy()
        changed = rng.integers(0, words * 2 // 3)
        second[:changed] = rng.integers(10_000, size=changed)
        made += [" ".join(f"w{word}" for word in text) for text in (first, second)]
    return made


def jaccard(cfg, left, right):
    left, right = ({*shingles(cfg, text).tolist()} for text in (left, right))
    return len(left & right) / len(left | right)


def test_near_duplicates_are_those_of_a_brute_force_jaccard_but_for_the_estimates_error():
    cfg = NearDuplicatesFilter(kind="near_duplicates", threshold=0.75, permutations=256)
    texts = planted(np.random.default_rng(0), 300)
    kept, similarity = find_keepers(cfg, signatures(cfg, texts))
    error = 4 * (0.75 * 0.25 / 256) ** 0.5
    near = 0
    for at in range(0, len(texts), 2):
        true = jaccard(cfg, texts[at], texts[at + 1])
        assert kept[at] == at
        if abs(true - 0.75) > error:
            assert (kept[at + 1] == at) == (true > 0.75), true
        else:
            near += 1
        if kept[at + 1] == at:
            assert similarity[at + 1] == pytest.approx(true, abs=error)
    assert near < 100


@pytest.mark.parametrize(
    "cfg",
    [
        NearDuplicatesFilter(kind="near_duplicates"),
        NearDuplicatesFilter(kind="near_duplicates", unit="characters"),
        ExactDuplicatesFilter(
            kind="exact_duplicates", ignore=["case", "whitespace", "punctuation"]
        ),
    ],
)
def test_texts_without_words_are_alike_where_they_are_equal(cfg):
    texts = ["\u2192 \u2211 \u222b", "\U0001f600", "{ } ; { }", "\U0001f600", "___", ""]
    kept, _ = find_keepers(cfg, signatures(cfg, texts))
    assert kept.tolist() == [0, 1, 2, 1, 4, 5]


def test_an_underscore_joins_no_words():
    cfg = NearDuplicatesFilter(kind="near_duplicates", ngram=1)
    assert {*shingles(cfg, "a_b __c").tolist()} == {*shingles(cfg, "a b c").tolist()}


def test_a_cluster_keeps_its_first_document_whatever_links_it():
    cfg = NearDuplicatesFilter(kind="near_duplicates", threshold=0.6, ngram=1)
    words = [f"w{n}" for n in range(100)]
    chain = [" ".join(words[at : at + 70]) for at in (20, 10, 0, 30)]
    texts = ["something else entirely", chain[0], chain[1], "", chain[2], chain[3], ""]
    kept, _ = find_keepers(cfg, signatures(cfg, texts))
    assert kept.tolist() == [0, 1, 1, 3, 1, 1, 3]
    assert jaccard(cfg, chain[2], chain[3]) < 0.5


@pytest.mark.parametrize(
    "ignore, equal",
    [
        ((), [0, 1, 2, 3]),
        (("case",), [0, 0, 2, 3]),
        (("whitespace",), [0, 1, 0, 3]),
        (("case", "punctuation", "whitespace"), [0, 0, 0, 0]),
    ],
)
def test_equal_documents_are_those_without_the_differences_that_do_not_count(ignore, equal):
    cfg = ExactDuplicatesFilter(kind="exact_duplicates", ignore=ignore)
    texts = ["a b", "A b", " a\n b ", "a, b"]
    assert find_keepers(cfg, signatures(cfg, texts))[0].tolist() == equal
