"""The folder of compiled programs that outlives a run of the tests."""

import os
import time

import programs
import pytest
import zstandard

WHOLE = zstandard.compress(b"a program" * 99)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "FOLDER", tmp_path)
    monkeypatch.setattr(programs, "CLEARED", tmp_path / "cleared")
    for name, content in {"whole": WHOLE, "half": WHOLE[:-9], "empty": b""}.items():
        (tmp_path / f"{name}-cache").write_bytes(content)
    return tmp_path


def left(folder):
    return sorted(file.name.removesuffix("-cache") for file in folder.glob("*-cache"))


def test_what_a_killed_run_left_half_written_is_removed_by_the_next(folder):
    for file in folder.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    programs.clear()
    assert left(folder) == ["whole"]
