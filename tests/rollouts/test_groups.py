"""Groups of samples: what is left out, replaced, masked, recorded; rewards that fail; rewards by a
model."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from maxstack import startup, train
from maxstack.errors import ConfigError, DataError
from maxstack.load import load


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.chdir(Path(__file__).parent)


def reward(function, **more):
    return {"kind": "function", "call": f"letters:{function}"} | more


def played(folder, **sections):
    """The batch of a run's first step, its figures, and lines for the log."""
    cfg = tiny.with_rollouts(**{"rewards": [reward("vowels")]} | sections)
    run = tiny.make_run(cfg)
    with contextlib.ExitStack() as ending:
        feed, _ = startup.open_feed(run, folder, ending)
        feed.refresh(run.init(), startup.frozen_weights(run))
        return next(feed), feed.metrics(), feed.skipped()


def groups_of(batch):
    """Number of a group -> rewards of its samples."""
    found = {}
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            first = np.flatnonzero(batch["segments"][row] == segment)[0]
            number = int(batch["group"][row][first])
            found.setdefault(number, []).append(float(batch["reward"][row][first]))
    return found


@pytest.mark.release
def test_a_group_may_fill_several_rows(tmp_path):
    """Thirty-two rows hold one sample each, eight rows four: the same samples."""
    wide, narrow = (
        played(tmp_path, train={"batch_size": rows}, data={"seq_len": length})[0]
        for rows, length in ((8, 256), (32, 64))
    )
    assert groups_of(wide) == groups_of(narrow)
    assert sorted(groups_of(wide)) == [*range(1, 9)]
    assert {len(group) for group in groups_of(wide).values()} == {4}


@pytest.mark.release
def test_groups_without_signal_are_replaced(tmp_path):
    """Dynamic sampling: half of the prompts have equal rewards, and other prompts are drawn."""
    rewards = [reward("even")]
    batch, figures, _ = played(tmp_path, rewards=rewards, rollout={"drop_equal": True})
    assert figures["prompts"] > 8 and figures["groups_without_signal"] == 0
    assert all(len({*group}) > 1 for group in groups_of(batch).values())
    _, figures, _ = played(tmp_path, rewards=rewards)
    assert figures["prompts"] == 8 and figures["groups_without_signal"] > 0
    _, figures, told = played(
        tmp_path,
        rewards=[{"kind": "exact", "field": "json"}],
        rollout={"drop_equal": True, "draws": 2},
    )
    assert figures["groups_without_signal"] == 1
    assert any("after 2 draws 8 groups of rollout 0 still have equal" in line for line in told)


@pytest.mark.slow
def test_truncated_answers_can_be_masked(tmp_path):
    usual, figures, _ = played(tmp_path)
    masked, _, _ = played(tmp_path, rollout={"truncated": "mask"})
    assert figures["truncated"] > 0.5 and masked["mask"].sum() < usual["mask"].sum()
    assert groups_of(usual) == groups_of(masked)


@pytest.mark.slow
def test_components_and_weights_of_rewards_are_logged(tmp_path):
    rewards = [reward("parts", weight=2.0), {"kind": "length", "most": 16, "buffer": 4}]
    _, figures, _ = played(tmp_path, rewards=rewards)
    assert figures["reward/parts"] == pytest.approx(
        figures["reward/parts/length"] + figures["reward/parts/prompt"]
    )
    assert figures["reward"] == pytest.approx(
        2 * figures["reward/parts"] + figures["reward/length"]
    )
    assert figures["reward/length"] < 0  # most answers have all 16 tokens


@pytest.mark.parametrize("policy", ["fail", "zero", "drop"])
@pytest.mark.slow
def test_a_reward_that_fails_is_named_and_counted(tmp_path, policy):
    sections = {"rewards": [reward("picky", failure=policy)], "rollout": {"record": 32}}
    if policy == "fail":
        with pytest.raises(DataError, match=r"reward picky, .*people:prompts\(\d+\), sample \d"):
            played(tmp_path, **sections)
        return
    batch, figures, told = played(tmp_path, **sections)
    failed = int(figures["reward/picky/failed"])
    assert 0 < failed < 32 and failed % 4 == 0
    assert sum("such samples are counted" in line for line in told) == 1
    kept = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    marked = [row for row in kept if "failures" in row]
    assert 0 < len(marked) < len(kept) and all(row["failures"]["picky"] for row in marked)
    assert all(row.get("dropped", False) == (policy == "drop") for row in marked)
    rewards = [value for group in groups_of(batch).values() for value in group]
    assert len(rewards) == (32 - failed if policy == "drop" else 32)
    assert rewards.count(0.0) == (0 if policy == "drop" else failed)


@pytest.mark.slow
def test_permute_shuffles_rewards(tmp_path):
    usual, _, _ = played(tmp_path)
    control, _, _ = played(tmp_path, rollout={"permute": True})
    one, other = (
        [value for group in groups_of(batch).values() for value in group]
        for batch in (usual, control)
    )
    assert one != other and sorted(one) == sorted(other)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """A reward model's run."""
    folder = tmp_path_factory.mktemp("scorer")
    source = {"kind": "function", "call": "maxstack.data.people:pairs", "documents": 64}
    data = {"tokenizer": {"kind": "bytes"}, "template": "plain", "packing": "fit", "seq_len": 96}
    cfg = tiny.config(
        model=tiny.model(head={"scores": True}),
        data=data | {"sources": [source | {"record": {"kind": "pairs"}}]},
        objective={"kind": "reward"},
        train={"steps": 1},
        checkpoint={"every": 1},
        run={"name": "scorer", "output_dir": str(folder), "tensorboard": False},
    )
    assert train.main([str(tiny.write(folder, cfg))]) == 0
    return folder / "scorer"


@pytest.mark.release
def test_a_reward_model_scores_prompt_and_answer(tmp_path, scorer):
    """As `maxstack score` does: here, another score for each sample, the same each time."""
    rewards = [{"kind": "model", "path": str(scorer), "name": "judge"}]
    batch, figures, _ = played(tmp_path, rewards=rewards)
    again, _, _ = played(tmp_path, rewards=rewards)
    assert groups_of(batch) == groups_of(again)
    assert figures["reward/judge"] == figures["reward"] and figures["reward_std"] > 0
    with pytest.raises(ConfigError, match="rewards: path: .*nowhere"):
        played(tmp_path, rewards=[{"kind": "model", "path": str(tmp_path / "nowhere")}])


def trained(folder, name, *overrides, **sections):
    """Rows of metrics.jsonl of a run."""
    run = {"name": name, "output_dir": str(folder), "tensorboard": False}
    sections = {"rewards": [reward("vowels")], "run": run, "train": {"steps": 6}} | sections
    sections |= {"eval": {"every": 3, "steps": 1}, "checkpoint": {"every": 2}}
    sections |= {"optimizer": {"learning_rate": 0.1, "chain": [{"kind": "sgd"}], "schedule": None}}
    path = tiny.write(folder, tiny.with_rollouts(**sections))
    assert train.main([str(path), *overrides]) == 0
    return tiny.metrics(folder / name)


def figures_of(rows):
    """Rows of steps without times."""
    times = "seconds", "wait", "per_second"
    return {
        row["step"]: {key: value for key, value in row.items() if not key.endswith(times)}
        for row in rows
        if "loss" in row
    }


@pytest.mark.release
@pytest.mark.parametrize(
    "rollout",
    [{"ahead": 1}, {"epochs": 3, "ahead": 2}],
    ids=str,
)
def test_a_run_goes_on_bit_for_bit_from_any_checkpoint(tmp_path, rollout):
    """Stopped after step 4 and gone on with, also in the middle of a rollout's epochs: the same
    metrics; rewards of held-out prompts, samples in rollouts.jsonl and in the log."""
    whole = trained(tmp_path, "whole", rollout=rollout)
    trained(tmp_path, "parts", "train.steps=4", rollout=rollout)
    parts = trained(tmp_path, "parts", rollout=rollout)
    assert figures_of(parts) == figures_of(whole) and len(figures_of(whole)) == 6
    held_out, again = (
        {row["step"]: row["eval_reward"] for row in rows if "eval_reward" in row}
        for rows in (whole, parts)
    )
    assert [*held_out] == [0, 3, 6] and held_out.items() <= again.items()
    lines = (tmp_path / "whole" / "rollouts.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["rollout"] for line in lines]
    assert numbers == sorted([*range(6 // rollout.get("epochs", 1))] * 8)
    assert json.loads(lines[0])["rewards"].keys() == {"vowels"}
    assert "rollout 0: " in (tmp_path / "whole" / "log.txt").read_text()


@pytest.mark.release
def test_a_checkpoint_binds_rewards_and_sampling(tmp_path):
    """Another reward or temperature is refused; limits of a reward may change."""
    trained(tmp_path, "parts", "train.steps=3")
    for change in ("rewards.0.weight=2", "rollout.temperature=0.5"):
        with pytest.raises(ConfigError, match=change.partition("=")[0].replace(".", "[.]")):
            trained(tmp_path, "parts", change)
    trained(tmp_path, "parts", "rewards.0.timeout=7", "rewards.0.failure=zero", "train.steps=4")


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["rollout=null"], "rollout", "learns from samples: set rollout.prompts"),
        (["rollout.prompts=6"], "train.batch_size", "cannot share the 6 prompts"),
        (["rollout.max_tokens=65"], "data.seq_len", "a row holds 4 samples, each of at most 65"),
        (["data.overlong=cut"], "data.overlong", "cuts the end of a prompt"),
        (["rollout.samples=1"], "rollout.samples", "one sample has no group to compare with"),
        (["objective.distil=1"], "teacher", "objective.distil needs a teacher"),
        (["rollout.on_policy=0.5"], "rollout.on_policy", "are for objective.kind=distill"),
        (["rewards=[{kind: exact}, {kind: exact}]"], "rewards.1.name", "exact is taken"),
        (["objective={kind: next_token}"], "rollout", "learns from data, not from samples"),
    ],
)
def test_a_mistake_is_named(tmp_path, overrides, key, message):
    path = tiny.write(tmp_path, tiny.with_rollouts())
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, overrides)
    assert key.rpartition(".")[2] in str(caught.value)


def test_an_engine_over_devices_that_are_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="rollout.tensor=3: does not divide the 1 devices"):
        played(tmp_path, rollout={"tensor": 3})


def test_functions_that_cannot_be_imported_are_named_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"rewards\.0: letters has no nothing"):
        played(tmp_path, rewards=[reward("nothing")])
