"""Environments that answer the model, and answers of records among samples of the model."""

import contextlib

import numpy as np
import pytest
import tiny

from maxstack import startup
from maxstack.errors import DataError

ECHO = '''
class Echo:
    """Counts the model's turns; asks for another until there are three."""

    def reset(self, row, seed):
        self.turns = 0
        return {begin}

    def step(self, text, tool_calls):
        self.turns += 1
        assert {check}
        return {answer}, {{"long": len(text) / 10, "turn": 1.0}}, self.turns == 3
'''


def environment(folder, begin="None", answer="'again?'", check="True"):
    (folder / "echo.py").write_text(ECHO.format(begin=begin, answer=answer, check=check))


def played(folder, monkeypatch, **sections):
    """The batch of a run's first step, its figures, and what the step says of it."""
    monkeypatch.chdir(folder)
    cfg = tiny.with_rollouts(**sections)
    run = tiny.make_run(cfg)
    with contextlib.ExitStack() as ending:
        feed, _ = startup.open_feed(run, folder, ending)
        state, frozen = run.init(), startup.frozen_weights(run)
        feed.refresh(state, frozen)
        batch, figures = next(feed), feed.metrics()
        placed = run.batches.place(batch, cfg.train.batch_size)
        _, scalars = run.step(state, placed, *frozen)
    return batch, figures, scalars


def parts(row, segments, segment):
    """Of a sample in a row: runs of tokens, each with whether the model chose them."""
    chosen = row["mask"][segments == segment] > 0
    tokens = row["targets"][segments == segment]
    cuts = np.flatnonzero(np.diff(chosen)) + 1
    return [
        (bool(c[0]), t) for c, t in zip(np.split(chosen, cuts), np.split(tokens, cuts), strict=True)
    ]


SECTIONS = {
    "rollout": {"environment": {"call": "echo:Echo", "turns": 4}, "max_tokens": 8},
    "data": {"seq_len": 1024},
    "rewards": [],
}


@pytest.mark.parametrize("messages", [False, True])
def test_an_environments_tokens_are_not_learned(tmp_path, monkeypatch, messages):
    """Three answers with two observations between; the answers' tokens stay as they were sampled,
    and the reward is the sum of the turns'."""
    sections = SECTIONS
    if messages:
        environment(tmp_path, answer='[{"role": "user", "content": "again?"}]')
    else:
        environment(tmp_path, begin="'Say: '")
    batch, figures, scalars = played(tmp_path, monkeypatch, **sections)
    assert figures["turns"] == 3 and figures["reward/environment/turn"] == 3
    long = figures["reward/environment/long"]
    assert figures["reward"] == pytest.approx(3 + long)
    assert scalars["sampler/difference"] < 1e-5 and scalars["grad_norm"] > 0
    row = {name: array[0] for name, array in batch.items()}
    runs = parts(row, row["segments"], 1)
    assert [chosen for chosen, _ in runs] == [False, True, False, True, False, True]
    read = bytes(t for t in runs[2][1] if t < 256).decode()
    assert read.startswith("again?") if not messages else "again?" in read
    assert all(len(tokens) <= 8 for chosen, tokens in runs if chosen)


@pytest.mark.slow
def test_long_messages_of_an_environment_are_reported(tmp_path, monkeypatch):
    environment(tmp_path, answer="'again?' * 200")
    monkeypatch.chdir(tmp_path)
    run = tiny.make_run(tiny.with_rollouts(**SECTIONS))
    with contextlib.ExitStack() as ending:
        feed, _ = startup.open_feed(run, tmp_path, ending)
        feed.refresh(run.init())
        assert any("32 samples so far ended because" in line for line in feed.skipped())


@pytest.mark.slow
def test_an_environment_that_fails_is_named_with_its_row(tmp_path, monkeypatch):
    environment(tmp_path, check="False")
    with pytest.raises(DataError, match=r"echo:Echo, turn 1, .*sample 0: AssertionError"):
        played(tmp_path, monkeypatch, **SECTIONS)
    lenient = SECTIONS["rollout"] | {
        "environment": {"call": "echo:Echo", "turns": 4, "failure": "zero"}
    }
    _, figures, _ = played(tmp_path, monkeypatch, **SECTIONS | {"rollout": lenient})
    assert figures["reward/environment/failed"] == 32 and figures["reward"] == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.slow
def test_distillation_learns_from_answers_of_records_too(tmp_path, monkeypatch, share):
    """GKD's lambda (arXiv:2306.13649): a share of the prompts has the record's completion."""
    (tmp_path / "rows.py").write_text(
        "def row(i): return {'prompt': f'{i} is ', 'completion': 'a number.'}"
    )
    source = {"kind": "function", "call": "rows:row", "documents": 64}
    monkeypatch.syspath_prepend(tmp_path)
    batch, _, scalars = played(
        tmp_path,
        monkeypatch,
        objective={"kind": "distill"},
        teacher=tiny.model(**tiny.ONE_KIND | {"layers": 1}),
        data={"sources": [source | {"record": {"kind": "prompts"}}], "seq_len": 128},
        rollout={"samples": 1, "on_policy": share, "prompts": 16},
        rewards=[],
    )
    given = 0
    for row, segments in zip(batch["targets"], batch["segments"], strict=True):
        for segment in (1, 2):
            text = bytes(t for t in row[segments == segment] if t < 256)
            given += text.endswith(b"a number.")
    assert (given == 0) == (share == 1) and (given == 16) == (share == 0)
    assert np.isfinite(scalars["loss"]) and scalars["grad_norm"] > 0
