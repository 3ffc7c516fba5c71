"""What a run's folder says of the code that it ran."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from processes import stand_ins

from maxstack.errors import ConfigError
from maxstack.report import run_folder


def test_a_git_that_does_not_answer_leaves_the_commit_out(tmp_path, monkeypatch):
    (tmp_path / ".git").touch()
    monkeypatch.setattr(run_folder.maxstack, "__file__", str(tmp_path / "maxstack" / "init.py"))
    monkeypatch.setattr(run_folder, "GIT", 0.2)
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "bin", {"git": "echo abc"})["PATH"])
    assert run_folder._git_revision() == "abc"
    stand_ins(tmp_path / "bin", {"git": "exec sleep 100"})
    assert run_folder._git_revision() is None


def test_the_older_of_two_processes_that_write_a_folder_is_refused(tmp_path):
    cfg = SimpleNamespace(run=SimpleNamespace(output_dir=str(tmp_path), name="run"))
    with contextlib.ExitStack() as ending:
        folder = run_folder.claim(cfg, True, ending)
        run_folder.check_owner(folder)
        # another host, which does not see the lock
        note = {"token": "its own", "host": "other", "pid": 7}
        (folder / run_folder.OWNER).write_text(json.dumps(note))
        with pytest.raises(ConfigError, match="process 7 on other has started writing"):
            run_folder.check_owner(folder)
    with contextlib.ExitStack() as ending:
        run_folder.check_owner(run_folder.claim(cfg, True, ending))
