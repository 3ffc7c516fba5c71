"""Whole and unfinished steps on the disks of two hosts, one of which is played here."""

import json
import shutil

from maxstack.checkpoint import local, manifest


class Two:
    """This process and another one, which has `theirs` of each step: shards' owner -> save."""

    number, count = 0, 2

    def __init__(self):
        self.theirs = {}

    def exchange(self, topic, value):
        theirs = [self.theirs, ""] if topic == "local steps" else value
        return json.loads(json.dumps([value, theirs]))


def test_trim_deletes_parts_older_than_all_kept_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PeerFiles", lambda *_: None)
    peers = Two()
    disk, steps = (
        local.Local(tmp_path, peers, 0, "layout"),
        {3: "another mesh", 4: "layout", 5: "another mesh", 6: "layout", 7: "another mesh"},
    )
    for step, layout in steps.items():
        part = tmp_path / "host_0" / f"{step}" / "of_0"
        part.mkdir(parents=True)
        manifest.write(part, {}, {"layout": layout, "processes": 2, "save": "7 000001"})
    peers.theirs = {f"{step}": {"1": "7 000001"} for step in steps}
    disk.trim(lambda steps: steps[:-1])
    assert sorted(path.name for path in (tmp_path / "host_0").iterdir()) == ["6", "7"]


def test_shards_of_different_saves_make_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PeerFiles", lambda *_: None)
    peers = Two()
    disk = local.Local(tmp_path, peers, 1, "layout")
    for owner, save in ((0, "7 000002"), (1, "7 000001")):
        part = tmp_path / "host_0" / "5" / f"of_{owner}"
        part.mkdir(parents=True)
        manifest.write(part, {}, {"layout": "layout", "processes": 2, "save": save})
    steps = {}
    for name, theirs in {
        "none": {},
        "of the same save": {"1": "7 000002"},
        "of an older one": {"1": "7 000001"},
        "whole, of an older one": {"0": "7 000001"},
        "both whole": {"0": "7 000001", "1": "7 000002"},
    }.items():
        peers.theirs = {"5": theirs}
        steps[name] = [(step, disk._saves[step]) for step in disk.steps()]
    assert steps == {
        "none": [],
        "of the same save": [(5, "7 000002")],
        "of an older one": [],
        "whole, of an older one": [(5, "7 000001")],
        "both whole": [(5, "7 000002")],
    }


def test_a_kill_while_shards_are_deleted_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PeerFiles", lambda *_: None)
    disk = local.Local(tmp_path, Two(), 0, "layout")
    gone, half = tmp_path / "host_0" / "4" / "of_0", tmp_path / "host_0" / "5" / "of_0"
    for part in (gone, half):
        part.mkdir(parents=True)
        manifest.write(part, {}, {"layout": "layout", "processes": 2, "save": "7 000001"})
        manifest.mark(part).touch()
    shutil.rmtree(gone)
    assert [str(half.parent) in line or str(gone.parent) in line for line in disk.clear()]
    assert disk.steps() == [] and not any((tmp_path / "host_0").iterdir())
