import itertools
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from maxstack.data.documents import Documents
from maxstack.data.feed import Feed
from maxstack.data.lanes import Rows
from maxstack.data.mixture import Mixture
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig, SyntheticSource


class Lists(Documents):
    """Documents given as token lists."""

    def __init__(self, documents, name="lists"):
        self.name, self._documents = name, [np.array(document, np.int32) for document in documents]

    def __len__(self):
        return len(self._documents)

    def __getitem__(self, index):
        return self._documents[index]

    def where(self, index):
        return f"{self.name} {index}"

    def paths(self):
        return []

    def hashes(self):
        raise NotImplementedError

    def identity(self):
        return self.name


def numbered(lengths, start=1):
    """Documents whose tokens are all different."""
    ends = np.cumsum([0, *lengths]) + start
    return [list(range(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def rows(sources, lanes=1, evaluation=False, weights=None, **fields):
    """Rows of all lanes for sources given as lists of documents."""
    sources = [Lists(source) if isinstance(source, list) else source for source in sources]
    weights = weights or [1.0] * len(sources)
    cfg = DataConfig(
        sources=[SyntheticSource(kind="synthetic", weight=weight) for weight in weights], **fields
    )
    mixture = Mixture(cfg, sources, lanes, evaluation, "data", {})
    return Rows(mixture, list(range(lanes)), mixture.start(lanes))


def one_pass(documents, lanes, **fields):
    """All batches of an evaluation up to the first empty one."""
    made, batches = rows([documents], lanes, evaluation=True, **fields), []
    while (batch := made.next())["segments"].any():
        batches.append(batch)
    return batches


documents = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(
    lambda lengths: max(lengths) > 1
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    documents,
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["concat", "fit", "best", "none"]),
)
def test_segments_number_documents_positions_restart_and_each_target_counts_once(
    lengths, seq_len, lanes, packing
):
    made, counted = numbered(lengths), Counter()
    owner = {token: i for i, document in enumerate(made) for token in document}
    for batch in one_pass(made, lanes, seq_len=seq_len, packing=packing):
        for row in ({key: array[lane] for key, array in batch.items()} for lane in range(lanes)):
            assert ((row["mask"] == 1) == (row["segments"] > 0)).all()
            for segment in range(1, row["segments"].max() + 1):
                at = np.flatnonzero(row["segments"] == segment)
                tokens, targets = row["tokens"][at].tolist(), row["targets"][at].tolist()
                assert (np.diff(at) == 1).all()
                assert row["positions"][at].tolist() == [*range(len(at))]
                assert len({owner[token] for token in tokens + targets}) == 1
                counted.update(zip(tokens, targets, strict=True))
            padding = row["segments"] == 0
            for key in ("tokens", "targets", "positions", "mask"):
                assert not row[key][padding].any()
            assert not padding[:-1][row["segments"][1:] > 0].any()
    if packing != "none":  # which cuts documents
        pairs = (zip(document[:-1], document[1:], strict=True) for document in made)
        assert counted == Counter(itertools.chain.from_iterable(pairs))


def test_fit_splits_only_documents_longer_than_a_row():
    batches = one_pass(numbered([5, 5, 3, 12, 3]), 1, seq_len=6, packing="fit")
    assert [batch["tokens"][0].tolist() for batch in batches] == [
        [1, 2, 3, 4, 0, 0],
        [6, 7, 8, 9, 11, 12],
        [14, 15, 16, 17, 18, 19],
        [20, 21, 22, 23, 24, 0],
        [26, 27, 0, 0, 0, 0],
    ]


def test_best_fills_the_rows_of_a_window_from_the_longest_document_on():
    documents = numbered([3, 6, 5, 13, 4, 2])
    batches = one_pass(documents, 1, seq_len=6, packing="best")
    lengths = [np.bincount(batch["segments"][0])[1:].tolist() for batch in batches]
    assert lengths == [[2, 4], [5, 1], [6], [6], [3]]
    fitted = one_pass(documents, 1, seq_len=6, packing="fit")
    assert len(fitted) == 6


def test_a_row_across_documents_is_one_segment_with_positions_that_count_on():
    (batch, *_) = one_pass(numbered([5, 9, 2]), 1, seq_len=7, across_documents=True)
    assert batch["segments"][0].tolist() == [1] * 7
    assert batch["positions"][0].tolist() == [*range(7)]
    assert batch["targets"][0].tolist() == [2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("bos", [True, False])
def test_a_row_across_documents_says_where_one_ends(tmp_path, bos):
    """By BOS, or where there is none by EOS, which is an input then, as nanoGPT has it."""
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    data = {
        "sources": [{"kind": "jsonl", "files": [f"{tmp_path}/a.jsonl"]}],
        "shuffle": False,
        "tokenizer": {"kind": "bytes", "bos": bos, "eos": True},
        "across_documents": True,
        "seq_len": 6,
    }
    batch = next(Feed(DataConfig.model_validate(data), [0], 1))
    a, b, c, d = map(ord, "abcd")
    assert batch["tokens"][0].tolist() == [256, a, b, 256, c, d]
    assert batch["targets"][0].tolist() == [a, b, 256, c, d, 256]


def test_none_cuts_each_document_at_the_end_of_its_row():
    batches = one_pass(numbered([9, 3]), 1, seq_len=5, packing="none")
    assert [batch["tokens"][0].tolist() for batch in batches] == [
        [1, 2, 3, 4, 5],
        [10, 11, 0, 0, 0],
    ]
    assert [batch["targets"][0].tolist() for batch in batches] == [
        [2, 3, 4, 5, 6],
        [11, 12, 0, 0, 0],
    ]


def test_an_epoch_draws_each_document_once_over_all_lanes_and_the_next_in_another_order():
    made = rows([numbered([2] * 24)], 4, seq_len=1, packing="none")
    drawn = np.stack([made.next()["tokens"][:, 0] for _ in range(12)])
    first, second = drawn[:6].ravel(), drawn[6:].ravel()
    assert len({*first}) == len({*second}) == 24
    assert (first != second).any() and sorted(first) != first.tolist()


def test_without_shuffle_lanes_take_turns_in_the_order_of_the_source():
    made = rows([numbered([2] * 6)], 4, seq_len=1, packing="none", shuffle=False)
    assert [made.next()["tokens"][:, 0].tolist() for _ in range(3)] == [
        [1, 3, 5, 7],
        [9, 11, 1, 3],
        [5, 7, 9, 11],
    ]


def test_the_seed_changes_the_order():
    one, same, other = (
        rows([numbered([2] * 50)], 1, seq_len=40, seed=seed).next()["tokens"].tolist()
        for seed in (0, 0, 1)
    )
    assert one == same != other


def test_the_mixture_follows_the_weights_in_each_lane_all_along():
    made = rows(
        [numbered([2] * 30), numbered([2] * 7, 1000), numbered([2] * 9, 2000)],
        3,
        weights=[5.0, 2.0, 1.0],
        seq_len=1,
        packing="none",
    )
    drawn = np.stack([made.next()["tokens"][:, 0] for _ in range(800)]) // 1000
    for lane in range(3):
        for source, share in enumerate((5 / 8, 2 / 8, 1 / 8)):
            counts = np.cumsum(drawn[:, lane] == source)
            assert abs(counts - share * np.arange(1, 801)).max() < 3


def test_lanes_do_not_all_draw_from_one_source_at_once():
    made = rows([numbered([2] * 30), numbered([2] * 30, 1000)], 16, seq_len=1, packing="none")
    assert 0 < (made.next()["tokens"] // 1000).sum() < 16


def test_documents_without_a_target_are_passed_over():
    made = rows([[[7], [], [1, 2], [9]]], 2, seq_len=3)
    assert all(set(made.next()["tokens"].ravel()) == {1} for _ in range(5))


def test_nothing_to_predict_at_all_is_an_error():
    with pytest.raises(
        DataError, match="nothing to predict: every document.*shorter than 2 tokens, from lists"
    ):
        rows([[[7], []]], 2, seq_len=3).next()


def test_a_document_that_shrank_since_the_checkpoint_is_an_error():
    made = rows([numbered([40])], seq_len=8)
    made.next()
    state = made.next()["state"]
    shorter = rows([numbered([10])], seq_len=8)
    with pytest.raises(DataError, match="changed since the checkpoint"):
        Rows(shorter._lanes[0]._mixture, [0], state).next()
