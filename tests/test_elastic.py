"""Slices that are lost in the middle of a run, simulated: four of two CPU devices each, of which
some raise and answer no more."""

import os
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
import tiny

from maxstack import config, elastic, train
from maxstack.checkpoint.weights import WeightsReader
from maxstack.compiled_steps import CompiledSteps
from maxstack.errors import ConfigError
from maxstack.load import load

STEPS = 12


class Losing:
    """The compiled step; at some steps of the run other slices than before are lost, and it raises
    as jax does."""

    losses: dict[int, set[int]] = {}
    lost: set[int] = set()
    ran: list[tuple[int, int]] = []

    def __init__(self, compiled, run):
        self._compiled, self._run = compiled, run

    def __getattr__(self, name):
        return getattr(self._compiled, name)

    def __call__(self, state, batch):
        step = int(state.step) + 1
        if new := self.losses.pop(step, None):
            Losing.lost = new
            raise jax.errors.JaxRuntimeError(f"DATA_LOSS: slices {sorted(new)} went away")
        self.ran.append((step, self._run.mesh.size))
        return self._compiled(state, batch)


@pytest.fixture
def losing(monkeypatch):
    """A step that loses slices, and devices of theirs that do not answer."""
    plain, responds = CompiledSteps.at, elastic.responds

    def at(steps, step):
        shaped = plain(steps, step)
        return shaped._replace(step=Losing(shaped.step, shaped.run))

    monkeypatch.setattr(CompiledSteps, "at", at)
    monkeypatch.setattr(
        elastic,
        "responds",
        lambda devices: (
            not Losing.lost & {device.id // 2 for device in devices} and responds(devices)
        ),
    )
    Losing.lost, Losing.ran, Losing.losses = set(), [], {}
    return Losing


def write(folder, name, **sections):
    cfg = tiny.config(
        model=tiny.model(**tiny.ONE_KIND),
        mesh={"slices": 4, "fsdp": 2, "data": 1},
        train={"steps": STEPS, "batch_size": 8} | sections.pop("train", {}),
        checkpoint={"every": 5},
        eval={"every": 0},
        run={
            "output_dir": str(folder),
            "name": name,
            "tensorboard": False,
            "virtual_devices": 8,
            "compilation_cache": processes.COMPILED or None,
        },
        faults=sections.pop("faults", {}),
        **sections,
    )
    path = folder / f"{name}.yml"
    path.write_text(config.dump(cfg))
    return [str(path), "optimizer.schedule=null"]


def watchdogs():
    """Processes that watch this one."""
    return [
        child
        for child in processes.children(os.getpid())
        if b"watchdog.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def losses(folder):
    return {row["step"]: row["loss"] for row in tiny.metrics(folder) if "loss" in row}


@pytest.mark.slow
def test_a_run_continues_without_lost_slices_on_the_same_batches(tmp_path, losing, capfd):
    assert train.main(write(tmp_path, "whole")) == 0
    losing.ran.clear()
    losing.losses = {8: {0, 1}, 11: {2}}
    traced = {"profile": {"start": 6, "steps": 3}}  # slices are lost in the middle of it
    assert train.main(write(tmp_path, "fewer", faults={"elastic": {}}, train=traced)) == 0
    assert watchdogs() == []  # nor of the runs that slices were lost to
    assert losing.ran == [
        *((step, 8) for step in range(1, 8)),
        *((step, 4) for step in range(6, 11)),
        (11, 4),
        (12, 4),
    ]  # 0 and 1 were back
    found, wanted = losses(tmp_path / "fewer"), losses(tmp_path / "whole")
    assert found == pytest.approx(wanted, rel=1e-5) and len(found) == STEPS
    ends = [
        WeightsReader(tmp_path / name / "checkpoints" / str(STEPS)) for name in ("fewer", "whole")
    ]
    for path in ends[0].shapes:
        np.testing.assert_allclose(*(end.read(path) for end in ends), atol=1e-5, err_msg=path)
    said = capfd.readouterr().err
    assert (
        "elastic: DATA_LOSS: slices [0, 1] went away; lost of 4 slices: 0, 1; attempt 1 "
        "of at most 10 to continue" in said
    )
    assert "lost of 4 slices: 2; attempt 2 of at most 10" in said


@pytest.mark.slow
def test_more_losses_than_are_allowed_end_the_run(tmp_path, losing):
    losing.losses = {2: {0, 1, 2}}
    with pytest.raises(
        elastic.TooFew,
        match="faults.elastic: 1 of 4 slices are left, and no number of them from "
        "faults.elastic.least=2 on serves",
    ):
        train.main(write(tmp_path, "few", faults={"elastic": {"least": 2}}))
    losing.lost, losing.losses = set(), {3: {3}}
    with pytest.raises(jax.errors.JaxRuntimeError, match="DATA_LOSS"):
        train.main(write(tmp_path, "none"))


@pytest.mark.slow
def test_other_errors_are_not_retried(tmp_path, losing, monkeypatch):
    def full(self, state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")

    monkeypatch.setattr(losing, "__call__", full)
    with pytest.raises(ConfigError, match="memory: the first step ran out of it"):
        train.main(write(tmp_path, "full", faults={"elastic": {}}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["mesh.slices=1", "mesh.data=4"], "mesh.slices=1 with least=1 leaves none to lose"),
        (["checkpoint.every=0"], "but checkpoint.every is 0"),
        (
            ["distributed={coordinator: 'h:1', processes: 2, process: 0}"],
            "is for one process that drives all slices",
        ),
    ],
)
def test_settings_that_cannot_be_elastic_are_refused(changes, says, tmp_path):
    path, _ = write(tmp_path, "no")
    with pytest.raises(ConfigError, match=says):
        load(path, ["faults.elastic={}", *changes])
