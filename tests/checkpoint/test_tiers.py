"""Tiers of several processes: copies on each other's disks, and what a lost disk costs."""

import shutil
import time

import processes
from processes import numbers, rows, write_config

TIERS = "checkpoint={every: 100, tiers: [{path: SSD, every: 2, keep: 2, replicate: 1}]}"


def test_a_process_that_lost_its_disk_goes_on_from_the_copy_on_another_s(tmp_path):
    steady = {"learning_rate": {"kind": "constant", "value": 0.01}}
    config, disk = write_config(tmp_path, optimizer=steady, mesh={"data": 1, "fsdp": -1}), tmp_path / "ssd"
    tiers = TIERS.replace("SSD", str(disk))
    started = processes.several(config, 2, tiers, "train.steps=100000")
    while not any(row["step"] >= 7 for row in rows(tmp_path / "run")):
        assert all(process.poll() is None for process in started), started[0].communicate()[0]
        time.sleep(0.02)
    for process in started:
        process.kill()
        process.communicate()
    newest = max(int(path.name) for path in (disk / "run" / "host_0").iterdir() if (path / "of_1" / "manifest.json").exists())
    assert not (tmp_path / "run" / "checkpoints").exists()
    shutil.rmtree(disk / "run" / "host_1")
    steps = f"train.steps={newest + 4}"
    assert f"resumed from step {newest} of {disk / 'run'}" in processes.together(config, 2, tiers, steps)[0]
    assert {path.name for path in (disk / "run" / "host_1" / f"{newest + 4}").iterdir()} == {"of_0", "of_1"}
    processes.together(config, 2, steps, "run.name=steady", "checkpoint.every=0")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "steady")
