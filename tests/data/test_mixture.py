"""Mixtures: weights over steps, tokens and documents, epochs, sources that change in mid-run."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from maxstack.data.feed import Feed
from maxstack.data.lanes import FED, Rows
from maxstack.data.mixture import Mixture, size_factors, unimax
from maxstack.data.position import Sources
from maxstack.data.sources import open_sources
from maxstack.schema.data import DataConfig
from maxstack.schema.mixture import weight_at
from maxstack.schema.stages import StageConfig, Stages

LANES = 4
NAMES = "web", "code", "math", "talk"


def source(name, documents=40, length=30, **fields):
    """Made-up documents whose tokens say by their range which source they are of."""
    return {"kind": "synthetic", "name": name, "documents": documents, "length": length} | fields


def config(*sources, **fields):
    return DataConfig.model_validate({"sources": [*sources], "seq_len": 16} | fields)


def mixture(cfg, stages=None):
    return Mixture(cfg, open_sources(cfg), LANES, False, "data", {}, stages)


def made(mixture, count, state=None, lanes=range(LANES)):
    """The next batches of some lanes."""
    state = mixture.start(LANES) if state is None else state
    rows = Rows(mixture, [*lanes], state[[*lanes]])
    return [rows.next() for _ in range(count)]


def fed(batches):
    """[steps, sources]: tokens of each source in each batch."""
    return np.stack([batch[FED][:, :-2].sum(0) for batch in batches])


def same(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a[key], b[key])
        for a, b in zip(left, right, strict=True)
        for key in a
        if key not in ("state", FED)
    )


def moved(cfg, old, state, step):
    """Mixture of a configuration that goes on where another stood, and its positions."""
    now = mixture(cfg)
    return now, now.adopt(old.described(), state, step)


def test_a_weight_follows_the_line_between_its_points():
    points = ((10, 1.0), (20, 0.0), (20, 4.0))
    weights = [weight_at(points, step) for step in (1, 10, 15, 19, 20, 99)]
    assert weights == pytest.approx([1, 1, 0.5, 0.1, 4, 4])
    assert weight_at(0.3, 5) == 0.3


def test_shares_are_of_tokens_where_the_mixture_is_by_tokens():
    sources = source("web", length=90), source("code", length=10, weight=3.0)
    shares = {}
    for by in ("documents", "tokens"):
        counts = fed(made(mixture(config(*sources, mixture={"by": by})), 400)).sum(0)
        shares[by] = counts / counts.sum()
    assert shares["tokens"] == pytest.approx([0.25, 0.75], abs=0.01)
    assert shares["documents"] == pytest.approx([90 / 120, 30 / 120], abs=0.02)


def test_shares_follow_weights_that_change_with_the_step():
    web = source("web", weight=[[1, 1.0], [100, 1.0], [200, 0.0]])
    code = source("code", weight=[[100, 0.0], [200, 1.0]])
    counts = fed(made(mixture(config(web, code)), 300))
    assert counts[:100, 1].sum() == 0 and counts[200:, 0].sum() == 0
    assert counts[100:200, 0].sum() / counts[100:200].sum() == pytest.approx(0.5, abs=0.05)
    assert counts[120:140, 0].sum() / counts[120:140].sum() == pytest.approx(0.7, abs=0.15)


def test_a_source_gives_its_epochs_and_no_more():
    cfg = config(source("web", documents=11, length=17, epochs=2), packing="none")
    batches = made(mixture(cfg), 12)
    rows = [tuple(row) for batch in batches for row in batch["tokens"] if row.any()]
    assert len(rows) == 22 and len({*rows}) == 11
    assert all(rows.count(row) == 2 for row in rows) and not batches[-1]["mask"].any()


@pytest.mark.parametrize("lengths", [(4, 16), (16, 4, 16)])
def test_best_packs_what_is_left_of_a_window_anew_where_rows_get_another_length(lengths):
    marks = [StageConfig(step=1 + 6 * i, seq_len=length) for i, length in enumerate(lengths)]
    stages = Stages(marks, LANES, 16)
    cfg = config(source("web", ragged=True), packing="best", window=16)
    batches = made(mixture(cfg, stages), 30)
    full = [batch["mask"].mean() / stages.at(i + 1).length for i, batch in enumerate(batches)]
    assert np.mean(full) > 0.85 / 16
    for cut in 3, 8, 15:
        rest = made(mixture(cfg, stages), 30 - cut, batches[cut - 1]["state"])
        assert same(batches[cut:], rest)


def test_others_go_on_without_a_source_that_gave_its_epochs():
    cfg = config(source("web", documents=8, epochs=1), source("code"))
    counts = fed(made(mixture(cfg), 60))
    assert counts[:, 0].sum() == 8 * 29 and (counts[40:].sum(1) == LANES * 16).all()


def test_temperature_flattens_the_shares_of_sizes():
    sources = source("web", documents=800), source("code", documents=100)
    for temperature, ratio in ((1.0, 8.0), (3.0, 2.0), (1e9, 1.0)):
        cfg = config(*sources, mixture={"temperature": temperature})
        web, code = size_factors(cfg, open_sources(cfg))
        assert web / code == pytest.approx(ratio)
    cfg = config(
        source("web", documents=100, length=10),
        source("code", documents=100, length=40),
        mixture={"by": "tokens", "temperature": 2.0},
    )
    web, code = size_factors(cfg, open_sources(cfg))
    assert code / web == pytest.approx(2.0)


def test_unimax_gives_equal_parts_but_of_none_more_than_its_epochs():
    assert unimax(np.array([10.0, 1000.0, 50.0]), 2, 300) == pytest.approx(
        np.array([20, 180, 100]) / 300
    )
    assert unimax(np.array([10.0, 20.0]), 1, 10) == pytest.approx([0.5, 0.5])


def test_a_budget_that_the_epochs_do_not_give_is_told(caplog):
    sources = source("web", documents=80), source("code", documents=20)
    for budget, warnings in ((100, 0), (101, 1)):
        cfg = config(*sources, mixture={"unimax": {"epochs": 1, "budget": budget}})
        assert size_factors(cfg, open_sources(cfg)).sum() == pytest.approx(1)
        assert len(caplog.messages) == warnings
    assert "1 epochs of all sources are some 100 documents" in caplog.messages[0]


def test_the_shares_of_the_next_step_are_told():
    weights = {"weight": [[1, 1], [11, 3]]}, {"weight": 1}
    sources = (source(name, **more) for name, more in zip(NAMES, weights, strict=False))
    feed = Feed(config(*sources), range(8), 8)
    told = ["web: 40 documents, 50.00% of step 1's documents", "code: 40 documents, 50.00% of"]
    assert all(line.startswith(want) for line, want in zip(feed.describe(), told, strict=True))
    for _ in range(10):
        next(feed)
    assert feed.describe()[0].endswith(", 75.00% of step 11's documents")
    feed.close()


@pytest.mark.parametrize("packing", ["concat", "fit", "none"])
def test_sources_changed_at_a_step_feed_what_a_schedule_from_the_start_does(packing):
    web, code, mathematics = (source(name, length=25) for name in ("web", "code", "math"))
    before = mixture(config(web, code, packing=packing))
    first = made(before, 12)
    changed = config(mathematics, web | {"weight": 3.0}, packing=packing)
    now, state = moved(changed, before, first[-1]["state"], 12)
    whole = config(
        web | {"weight": [[12, 1.0], [13, 3.0]]},
        code | {"weight": [[12, 1.0], [13, 0.0]]},
        mathematics | {"weight": [[12, 0.0], [13, 1.0]]},
        packing=packing,
    )
    assert same(first + made(now, 20, state), made(mixture(whole), 32))


def texts(folder, numbers):
    """Files of 17 letters, all different."""
    for number in numbers:
        (folder / f"{number:02}.txt").write_text(chr(65 + number) * 17)
    web = {"kind": "text", "name": "web", "files": [f"{folder}/*.txt"]}
    code = source("code", vocab=60, length=18)
    return config(web, code, packing="none", seq_len=17)


def letters(batches, lanes=range(LANES)):
    """Letters of the text files that rows hold, in order."""
    rows = [batch["tokens"][lane] for batch in batches for lane in lanes]
    return [chr(row[1]) for row in rows if row[1] >= 65]


def test_new_files_of_a_source_begin_while_its_old_documents_go_on_in_their_order(tmp_path):
    old = mixture(texts(tmp_path, range(12)))
    batches = made(old, 30)
    cfg = texts(tmp_path, range(20))
    now = mixture(cfg)
    told = "web: has more files (8), which begin at the first"
    assert now.changes(old.described()) == [told]
    state = now.adopt(old.described(), batches[3]["state"], 4)
    assert [part.name for part in now.described()] == ["web", "web+4", "code"]
    after = made(now, 40, state)
    for lane in range(LANES):
        own, expected = (letters(some, [lane]) for some in (after, batches[4:]))
        before = [letter for letter in own if letter < chr(65 + 12)]
        assert before[: len(expected)] == expected[: len(before)] and len(before) > 5
    before = [letter for letter in letters(after) if letter < chr(65 + 12)]
    added = [letter for letter in letters(after) if letter >= chr(65 + 12)]
    assert {*added[:8]} == {chr(65 + number) for number in range(12, 20)}
    assert len(added) / len(before) == pytest.approx(8 / 12, rel=0.3)
    assert fed(after)[:, 0].sum() / fed(after).sum() == pytest.approx(0.5, abs=0.05)
    # and the parts stay as they are at the next restart, and with further files
    again = mixture(cfg)
    assert again.changes(now.described()) == []
    state = again.adopt(now.described(), after[9]["state"], 14)
    assert same(made(again, 5, state), after[10:15])
    third = mixture(texts(tmp_path, range(22)))
    third.adopt(now.described(), after[9]["state"], 14)
    assert [part.name for part in third.described()] == ["web", "web+4", "web+14", "code"]


def test_a_file_of_another_size_is_named_and_the_order_goes_on(tmp_path):
    old = mixture(texts(tmp_path, range(6)))
    batches = made(old, 6)
    (tmp_path / "03.txt").write_text("x" * 18)
    now = mixture(texts(tmp_path, []))
    (line,) = now.changes(old.described())
    assert line.startswith("web: 1 of its files changed, such as ") and "03.txt; its" in line
    state = now.adopt(old.described(), batches[2]["state"], 3)
    assert state.tolist() == batches[2]["state"].tolist()
    assert now.changes(now.described()) == []


def test_a_source_that_lost_a_file_begins_anew(tmp_path):
    old = mixture(texts(tmp_path, range(6)))
    batches = made(old, 3)
    (tmp_path / "03.txt").unlink()
    now = mixture(texts(tmp_path, []))
    assert "web: has other documents" in now.changes(old.described())[0]
    now.adopt(old.described(), batches[-1]["state"], 3)
    assert [part.key for part in now.described()] == ["web 3", "code"]


def test_positions_of_older_versions_go_on_in_the_same_order():
    sources = [source("web", weight=2.0), source("code")]
    before = mixture(config(*sources))
    before._set(Sources(p._replace(key=f"{i}") for i, p in enumerate(before.described())))
    batches = made(before, 9)
    states = batches[4]["state"]
    meta = {"config": {"data": {"sources": sources}}, "sources": "repr"}
    now = mixture(config(*sources))
    old = Sources.of_meta(meta, now.described(), {})
    older = np.concatenate([states[:, :2], states[:, -2:-1]], 1)
    assert same(made(now, 4, now.adopt(old, older, 5)), batches[5:])


def test_small_batches_take_together_the_rows_of_large_ones():
    cfg, stages = config(source("web")), [StageConfig(step=1, batch_size=1)]
    large = made(mixture(cfg), 3)
    feed = Feed(cfg, range(LANES), LANES, stages=Stages(stages, LANES, 16))
    rows = [next(feed)["tokens"] for _ in range(3 * LANES)]
    feed.close()
    assert all(row.shape == (1, 16) for row in rows)
    assert np.concatenate(rows).tolist() == np.concatenate([b["tokens"] for b in large]).tolist()


def test_shorter_rows_hold_the_same_tokens_in_the_same_order():
    cfg, stages = config(source("web")), [StageConfig(step=1, seq_len=8), StageConfig(step=9)]
    short = Feed(cfg, [0], 1, stages=Stages(stages, 1, 16))
    long = Feed(cfg, [0], 1)
    tokens = [
        np.concatenate([next(feed)["tokens"][0] for _ in range(n)])
        for feed, n in ((short, 12), (long, 8))
    ]
    assert [len(row["tokens"][0]) for row in (next(short),)] == [16]
    short.close(), long.close()
    assert tokens[0].tolist() == tokens[1].tolist()


def drawn_config(draw):
    """Any configuration of sources, schedules, packing and stages."""
    count = draw(st.integers(1, 3))
    sources = []
    for name in NAMES[:count]:
        weight = draw(st.sampled_from([1.0, 0.3, [[1, 1.0], [9, 0.1]], [[4, 0.0], [7, 2.0]]]))
        epochs = draw(st.sampled_from([None, None, 1, 2.5]))
        length, ragged = draw(st.integers(2, 70)), draw(st.booleans())
        sources.append(source(name, 9, length, ragged=ragged, weight=weight, epochs=epochs))
    sources[0] |= {"weight": 1.0, "epochs": None}
    packing = draw(st.sampled_from(["concat", "fit", "best", "none"]))
    cfg = config(
        *sources,
        packing=packing,
        window=draw(st.integers(1, 5)),
        across_documents=draw(st.booleans()),
        shuffle=draw(st.booleans()),
        mixture={"by": draw(st.sampled_from(["documents", "tokens"]))},
    )
    stages = draw(
        st.sampled_from(
            [
                [],
                [{"step": 1, "batch_size": 2}, {"step": 9}],
                [{"step": 1, "seq_len": 5}, {"step": 6, "seq_len": 12}, {"step": 12}],
                [{"step": 1, "batch_size": 1, "seq_len": 8}, {"step": 5, "batch_size": 4}],
            ]
        )
    )
    return cfg, Stages([StageConfig(**stage) for stage in stages], LANES, 16)


configurations = st.composite(drawn_config)()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(configurations, st.integers(0, 14), st.sampled_from([1, 2, 4]))
def test_any_lanes_go_on_from_any_batch_as_before(drawn, at, processes):
    cfg, stages = drawn
    whole = made(mixture(cfg, stages), 18)
    state = whole[at]["state"]
    share = LANES // processes
    for begin in range(0, LANES, share):
        lanes = range(begin, begin + share)
        again = made(mixture(cfg, stages), 3, state, lanes)
        for got, expected in zip(again, whole[at + 1 : at + 4], strict=True):
            for key, array in expected.items():
                assert np.array_equal(got[key], array[begin : begin + share]), key


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(configurations)
def test_what_was_fed_is_counted_by_source(drawn):
    cfg, stages = drawn
    for batch in made(mixture(cfg, stages), 8):
        assert batch[FED][:, :-2].sum() == int(batch["mask"].sum())
        begun, cut = batch[FED][:, -2], batch[FED][:, -1]
        assert (cut <= begun).all()
