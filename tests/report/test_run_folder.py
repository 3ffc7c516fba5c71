"""What a run's folder says of the code that it ran."""

from processes import stand_ins

from maxstack.report import run_folder


def test_a_git_that_does_not_answer_leaves_the_commit_out(tmp_path, monkeypatch):
    (tmp_path / ".git").touch()
    monkeypatch.setattr(run_folder.maxstack, "__file__", str(tmp_path / "maxstack" / "init.py"))
    monkeypatch.setattr(run_folder, "GIT", 0.2)
    monkeypatch.setenv("PATH", stand_ins(tmp_path / "bin", {"git": "echo abc"})["PATH"])
    assert run_folder._git_revision() == "abc"
    stand_ins(tmp_path / "bin", {"git": "exec sleep 100"})
    assert run_folder._git_revision() is None
