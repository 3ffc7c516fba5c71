"""Checkpoints on real files: what a manifest finds, which step a run goes on from, and a disk that
is full."""

import asyncio
import contextlib
import errno
import functools
import gc
import json
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from maxstack.checkpoint import manifest
from maxstack.checkpoint.compatibility import FREE, Compatibility
from maxstack.checkpoint.store import Checkpoints, removable
from maxstack.data.feed import Feed
from maxstack.errors import ConfigError, TransientError
from maxstack.schema.checkpoint import CheckpointConfig


def checkpoints(folder, said, **changes):
    """(the run's checkpoints in a folder, its feed, the run) as a new process would make them."""
    run = tiny.make_run(tiny.config(checkpoint={"every": 1} | changes))
    feed = Feed(run.cfg.data, run.batches.rows(8), 8)
    return Checkpoints(run, folder, said), feed, run


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """(A folder with three saved steps, the state of each)."""
    folder = tmp_path_factory.mktemp("three")
    saves, feed, run = checkpoints(folder / "checkpoints", print)
    states, state = {}, run.init()
    for step in (1, 2, 3):
        state, _ = run.step(state, run.batches.place(next(feed), 8))
        states[step] = jax.tree.map(np.array, state)
        saves.save(step, state, feed, {})
    saves.close()
    feed.close()
    return folder, states


@pytest.fixture
def saved(three, tmp_path):
    """(What opens a copy of these checkpoints, the states, the copy, what was said)."""
    (made, states), said = three, []
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    again = functools.partial(checkpoints, tmp_path / "checkpoints", said.append)
    return again, states, tmp_path / "checkpoints", said


def largest(folder):
    """The file with the most bytes."""
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip(path):
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


FAULTS = {
    "one bit": (flip, "its checksum is"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes were written"),
    "deleted": (os.unlink, "is missing"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_step_is_put_aside_and_the_one_before_restored(saved, fault):
    again, states, folder, said = saved
    (harm, told), victim = FAULTS[fault], largest(folder / "3")
    harm(victim)
    saves, feed, _ = again()
    state = saves.restore(feed)
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, state, states[2])
    assert (
        "DAMAGED CHECKPOINT, step 3" in said[0]
        and victim.name in said[0]
        and told.split()[-1] in said[0]
    )
    assert saves.steps() == [1, 2] and [
        path.name for path in (folder.parent / "damaged").glob("*/*")
    ] == ["3"]
    state, _ = tiny.make_run(tiny.config()).step(
        state, tiny.make_run(tiny.config()).batches.place(next(feed), 8)
    )
    jax.tree.map(np.testing.assert_array_equal, state, states[3])
    feed.close()


def test_a_step_that_was_asked_for_is_not_replaced_by_another(saved):
    again, _, folder, _ = saved
    flip(largest(folder / "2"))
    saves, feed, _ = again(restore=2)
    with pytest.raises(
        ConfigError,
        match=r"all steps that checkpoint.restore=2 may take are damaged: \[2\]; name another of "
        r"\[1, 2, 3\]",
    ):
        saves.restore(feed)


def test_a_step_without_a_manifest_was_never_finished_and_is_cleared_away(saved):
    again, _, folder, _ = saved
    (folder / "3" / manifest.NAME).unlink()
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    (folder / "5").mkdir()
    (folder / "6" / "part").mkdir(parents=True)
    (folder / "6.unfinished").touch()
    saves, feed, _ = again()
    assert int(saves.restore(feed).step) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert [path.name for path in (folder.parent / "unfinished").glob("*/*")] == ["3"], (
        "it may be of another program"
    )


@pytest.mark.slow
def test_the_same_command_goes_back_to_a_step_once(saved):
    again, states, folder, said = saved
    saves, feed, run = again(restore=2)
    state = saves.restore(feed)
    assert int(state.step) == 2 and saves.steps() == [1, 2]
    state, _ = run.step(state, run.batches.place(next(feed), 8))
    saves.save(3, state, feed, {})
    saves.close()
    for config, step in (
        ({"restore": 2}, 3),
        ({"restore": 2}, 3),
        ({}, 3),
        ({"restore": 2}, 2),
    ):  # another command in between: go back again
        saves, feed, _ = again(**config)
        assert int(saves.restore(feed).step) == step
    assert any(
        "went back to it before, and goes on from there; to go back again, delete "
        f"{folder.parent / 'saved.json'}" in line
        for line in said
    )


@pytest.mark.parametrize("told", [0, 3])
def test_a_run_that_lost_its_steps_does_not_start_over(saved, tmp_path, told):
    again, _, folder, _ = saved
    shutil.copytree(folder / "1", tmp_path / "origin" / "1")
    (folder.parent / "saved.json").write_text(json.dumps({"step": told}))
    shutil.rmtree(folder)
    for restore in ("latest", str(tmp_path / "origin")):
        saves, feed, _ = again(restore=restore)
        with pytest.raises(
            ConfigError, match=f"says that step {told} was saved, but no tier holds a checkpoint"
        ):
            saves.restore(feed)


def test_positions_in_other_sources_are_forced_by_name(saved):
    again, states, folder, said = saved
    kind = tiny.config().data.sources[0].model_dump()
    run = tiny.make_run(
        tiny.config(checkpoint={"every": 1}, data={"sources": [kind | {"name": "new"}, kind]})
    )
    feed = Feed(run.cfg.data, run.batches.rows(8), 8)
    with pytest.raises(ConfigError, match="data.sources: "):
        Checkpoints(run, folder, said.append).restore(feed)
    assert int(Checkpoints(run, folder, said.append, ["data"]).restore(feed).step) == 3
    assert "data.sources: new: is new, and begins at its first document" in said
    assert "data.sources: synthetic-0: is gone" in said


@pytest.mark.parametrize(
    ("chosen", "refused"),
    [
        ({}, None),
        ({"encoding_errors": "keep"}, None),
        ({"encoding_errors": "replace"}, "encoding_errors"),
        ({"normalize": ["bom"]}, "normalize"),
    ],
)
def test_an_older_checkpoint_resumes_where_batches_stay_the_same(chosen, refused):
    text = {"kind": "text", "files": ["a.txt"]}
    old = tiny.config(data={"sources": [text]}).model_dump(mode="json")
    for key in ("encoding_errors", "normalize"):
        del old["data"]["sources"][0][key]
    cfg = tiny.config(data={"sources": [text | chosen]})
    if refused is None:
        Compatibility("1", old, cfg, False).refuse_changes(FREE)
        return
    Compatibility(
        "1",
        tiny.config(data={"sources": [text]}).model_dump(mode="json"),
        tiny.config(data={"sources": [text | {"encoding_errors": "replace"}]}),
        False,
    ).refuse_changes(FREE)
    with pytest.raises(ConfigError, match=rf"data.sources.0.{refused}: \(absent\) -> "):
        Compatibility("1", old, cfg, False).refuse_changes(FREE)


def test_keys_missing_in_an_older_checkpoint_have_their_defaults():
    old, cfg = tiny.config().model_dump(mode="json"), tiny.config()
    del old["rollout"], old["data"]["longest"], old["data"]["sources"][0]["record"]
    for block in old["model"]["blocks"].values():
        del block["mixer"]["causal"]
    Compatibility("1", old, cfg, False).refuse_changes(FREE)
    model = tiny.model()
    model["blocks"]["global"]["mixer"]["causal"] = False
    with pytest.raises(ConfigError, match=r"mixer.causal: \(absent\) -> false"):
        Compatibility("1", old, tiny.config(model=model), False).refuse_changes(FREE)


@pytest.mark.parametrize(
    ("chain", "refused"),
    [
        ([{"kind": "yogi"}], "chain.0.kind: adam -> yogi"),
        ([{"kind": "adam", "b1": 0.5, "learning_rate": {"kind": "constant", "value": 1}}], ""),
    ],
)
def test_another_optimizers_state_is_refused(chain, refused):
    old = tiny.config(optimizer={"chain": [{"kind": "adam"}]}).model_dump(mode="json")
    match = Compatibility("1", old, tiny.config(optimizer={"chain": chain}), False)
    if not refused:
        match.refuse_optimizer()
        assert "optimizer.chain.0.b1: (absent) -> 0.5" in match.changed(("*",))
        return
    with pytest.raises(ConfigError, match=rf"{refused}[\s\S]*restore_parts=\[params, data, step"):
        match.refuse_optimizer()


def test_every_file_of_a_step_is_in_its_manifest(saved):
    folder = saved[2] / "3"
    facts, files = manifest.read(folder)
    assert {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } == {*files, manifest.NAME}
    assert (
        facts == {"eval_loss": None, "evaluated": {}, "owed": False}
        and list(manifest.damages(folder)) == []
    )


def test_a_damaged_manifest_is_damage(saved):
    folder = saved[2] / "3"
    for text in ("{", json.dumps({"files": {}})):
        (folder / manifest.NAME).write_text(text)
        assert [
            line.startswith(str(folder / manifest.NAME)) for line in manifest.damages(folder)
        ] == [True]


@pytest.mark.parametrize("passes", [True, False])
def test_a_disk_that_fails_condemns_no_step(saved, monkeypatch, passes):
    opened, states, folder, said = saved
    plain, failures = manifest._entry, []

    def entry(path):
        if path == largest(folder / "3") and not (passes and failures):
            failures.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return plain(path)

    monkeypatch.setattr(manifest, "_entry", entry)
    monkeypatch.setenv("MAXSTACK_RETRY_SECONDS", "60" if passes else "0")
    saves, feed, _ = opened()
    if passes:
        assert int(saves.restore(feed).step) == 3
    else:
        with pytest.raises(manifest.Unreadable, match="Input/output error; nothing was moved"):
            saves.restore(feed)
    assert failures and saves.steps() == [1, 2, 3]
    assert [path.name for path in folder.parent.iterdir() if path.name != "saved.json"] == [
        "checkpoints"
    ]


def test_a_last_save_that_fails_leaves_with_42(saved, monkeypatch):
    opened, _, folder, said = saved
    saves, feed, _ = opened()
    state = saves.restore(feed)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest, "write", full)
    saves.save(4, state, feed, {})
    with pytest.raises(TransientError, match="step 4 was not saved.*No space left") as raised:
        saves.close()
    assert raised.value.exit_code == 42 and saves.steps() == [1, 2, 3]
    assert [path.name for path in folder.iterdir() if "4" in path.name] == []


def test_retention_keeps_newest_multiples_and_best():
    losses = {1: None, 2: 3.0, 4: 1.0, 6: None, 8: 2.0, 10: 2.5}

    def facts(step):
        if step == 1:
            raise manifest.Damage("its manifest cannot be read")
        return {"eval_loss": losses[step], "evaluated": {} if step == 2 else {"tasks/acc": -step}}

    stored = SimpleNamespace(facts=facts)
    cfg = CheckpointConfig(keep=1, keep_every=6, keep_best=2)
    assert removable(stored, cfg, [*losses]) == [1, 2]
    cfg = CheckpointConfig(keep=1, keep_best={"eval_loss": 1, "-tasks/acc": 1, "tasks/acc": 1})
    assert removable(stored, cfg, [*losses]) == [1, 2, 6, 8]


TIERS = (
    {"path": "ssd", "every": 1, "keep": 2, "replicate": 0},
    {"path": "far", "every": 2, "keep": 5},
)


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def tiers_of(folder, said, tiers=TIERS, **changes):
    """`checkpoints` on 8 devices: the host's own disk at every step, the run's folder at every
    third, another at every second."""
    sections = {"checkpoint": {"every": 3, "tiers": tiers} | changes}
    run = tiny.make_run(tiny.config(mesh=MESH, **sections), 8)
    feed = Feed(run.cfg.data, run.batches.rows(8), 8)
    return Checkpoints(run, folder / "run" / "checkpoints", said), feed, run


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """(A folder with the tiers of seven steps, the state of each)."""
    folder, said = tmp_path_factory.mktemp("seven"), []
    with contextlib.chdir(folder):
        saves, feed, run = tiers_of(folder, said.append)
        states, state = {}, run.init()
        for step in range(1, 8):
            state, _ = run.step(state, run.batches.place(next(feed), 8))
            states[step] = jax.tree.map(np.array, state)
            if saves.due(step):
                saves.save(step, state, feed, {})
        saves.close()
    feed.close()
    assert said == []
    return folder, states


@pytest.fixture
def tiered(seven, tmp_path, monkeypatch):
    """(What opens a copy of these tiers, the states, the copy's folder, what was said)."""
    (made, states), said = seven, []
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for mark in tmp_path.rglob("run.json"):
        mark.write_text(mark.read_text().replace(str(made), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return functools.partial(tiers_of, tmp_path, said.append), states, tmp_path, said


@pytest.mark.slow
def test_a_last_step_on_a_local_disk_is_copied_to_shared_tiers(tiered):
    again, states, folder, _ = tiered
    saves, feed, _ = again()
    saves.complete(7, saves.restore(feed), feed, {})
    assert [tier.storage.steps()[-1] for tier in saves._tiers] == [7, 7, 7]
    shutil.rmtree(folder / "ssd")
    jax.tree.map(np.testing.assert_array_equal, again()[0].restore(feed), states[7])


@pytest.mark.parametrize(
    ("lost", "step", "place"),
    [
        ([], 7, "ssd"),
        (["ssd"], 6, "run"),
        (["ssd", "run/checkpoints"], 6, "far"),
        (["run/checkpoints", "far"], 7, "ssd"),
    ],
    ids=str,
)
def test_the_newest_step_of_the_nearest_tier_is_restored(tiered, lost, step, place):
    again, states, folder, said = tiered
    for name in lost:
        shutil.rmtree(folder / name)
    saves, feed, run = again()
    state = saves.restore(feed)
    jax.tree.map(np.testing.assert_array_equal, state, states[step])
    assert all(
        jax.tree.leaves(
            jax.tree.map(
                lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim),
                state,
                run.abstract,
            )
        )
    )
    assert f"resumed from step {step} of {folder / place}" in saves.summary
    assert any("step 7 was saved, but no tier holds it" in line for line in said) is (step == 6)


def test_a_tier_of_another_run_is_refused_until_that_is_gone(tiered):
    again, _, folder, _ = tiered
    (folder / "run").rename(folder / "first")
    for path in ("ssd", "far"):
        (folder / path / "run" / "run.json").write_text(json.dumps({"run": str(folder / "first")}))
    with pytest.raises(
        ConfigError, match=f"ssd/run holds the steps of {folder}/first; choose another run.name"
    ):
        again()
    shutil.rmtree(folder / "first")
    saves, feed, _ = again()
    assert int(saves.restore(feed).step) == 7


def test_a_damaged_step_of_one_tier_is_taken_from_the_next(tiered):
    again, states, folder, said = tiered
    flip(folder / "ssd/run/host_0/7/of_0/shards.bin")
    flip(folder / "ssd/run/host_0/6/of_0/shards.bin")
    saves, feed, _ = again()
    jax.tree.map(np.testing.assert_array_equal, saves.restore(feed), states[6])
    assert (
        str(folder / "run") in saves.summary
        and sum("DAMAGED CHECKPOINT" in line for line in said) == 2
    )
    assert saves._tiers[0].storage.steps() == []


def test_another_mesh_restores_from_a_shared_tier(tiered):
    again, states, folder, _ = tiered
    run = tiny.make_run(tiny.config(mesh={"data": 2, "fsdp": 4}, checkpoint={"tiers": TIERS}), 8)
    saves, feed = (
        Checkpoints(run, folder / "run" / "checkpoints", print),
        Feed(run.cfg.data, run.batches.rows(8), 8),
    )
    jax.tree.map(np.testing.assert_array_equal, saves.restore(feed), states[6])


@pytest.mark.slow
def test_a_task_of_orbax_that_fails_prints_no_traceback(caplog):
    async def fails():
        raise OSError("No space left on device")

    async def leaves():
        asyncio.create_task(fails())  # noqa: RUF006
        await asyncio.sleep(0.01)

    asyncio.run(leaves())
    gc.collect()
    assert caplog.records == []
